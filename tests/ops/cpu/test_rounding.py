"""Rounding at random in the fused rules: the bits of the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, LR, RULES, Case, fresh, fused, same, truth

from quorem import Full
from quorem.ops import rounding
from quorem.ops.rows import IdBatch
from quorem.ops.state import CATCHES_UP

pytestmark = pytest.mark.kernels(device="cpu")
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [16, 7])
def test_every_kind_of_number_is_rounded_by_the_same_bits(dtype, width):
    """A step of SGD from zero by minus the number itself: large, tiny and subnormal ones, infinite, and no number."""
    case = Case([(Full(), 4000, None)], width=width, dtype=dtype)
    case.stored.zero_()
    numbers = torch.randn(4000, width) * 2.0 ** torch.randint(-45, 25, (4000, width))
    numbers[:3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    numbers[3, :3] = torch.tensor([65519.9, 65520.1, 2.0**-24 * 1.4])
    lr, seed = torch.tensor(1.0, dtype=torch.float64), 2**40 + 77
    state, constants = fresh("sgd", case)
    state.step.fill_(2**33 + 5)
    options = {"rule": "sgd", "constants": constants, "rounding_seed": seed}
    fused("rows_update_", torch.arange(4000), -numbers, case.stored, lr, state, **options)
    bits = rounding.random_bits(torch.arange(4000), width, rounding.Rounding(seed, torch.tensor(2**33 + 5)))
    expected = rounding.round_at_random(numbers, bits, dtype)
    torch.testing.assert_close(case.stored, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", RULES)
def test_rules_round_as_the_truth_does(rule):
    """Ids of a batch differ, so that no sum depends on an order; few numbers lie within an ulp of another choice."""
    case = Case(HOT_COLD[:6], dtype=torch.bfloat16)
    runs = []
    for run in (fused, truth):
        torch.manual_seed(1)
        stored, (state, constants) = case.stored.clone(), fresh(rule, case)
        options = {"rule": rule, "constants": constants, "rounding_seed": 9}
        for step in range(6):
            ids = torch.randint(0, 60, (1, 6)).expand(3, 6).clone()
            ids[1:] = -1 if step % 2 else 60 - ids[1:].clamp(min=1)
            ids[2] = -1  # no row is read twice
            if rule in CATCHES_UP:
                run("catch_up_", IdBatch(ids), stored, state, case.layout, **options)
            run("update_", case.grad(3), IdBatch(ids), stored, LR, state, case.layout, **options)
        if rule in CATCHES_UP:
            run("rows_catch_up_", None, stored, state, **options)
        runs.append(stored)
    moved = (runs[0] != case.stored).sum()
    assert moved > 100 and (runs[0] != runs[1]).sum() <= moved // 500
    same("stored", runs[0], runs[1])


def test_float32_rows_are_not_rounded_at_random():
    case = Case(HOT_COLD[:1])
    state, constants = fresh("sgd", case)
    with pytest.raises(AssertionError):
        fused(
            "update_",
            *(case.grad(2), IdBatch(case.ids(2)), case.stored, LR, state, case.layout),
            rule="sgd",
            constants=constants,
            rounding_seed=1,
        )

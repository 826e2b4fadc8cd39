"""Rounding at random in the fused rules: the bits of the truth."""

from functools import partial

import pytest
import torch
from kernel_cases import HOT_COLD, RULES, Case, fresh, fused, same, truth
from rounded_sums import check_sums

from quorem import Full
from quorem.ops import rounding
from quorem.ops.rows import IdBatch

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 7])
def test_every_kind_of_number_is_rounded_by_the_same_bits(width, dtype):
    """A step of SGD from zero by minus the number itself: large, tiny and subnormal ones, infinite, and no number."""
    case = Case([(Full(), 4000, None)], width=width, dtype=dtype)
    case.stored.zero_()
    numbers = torch.randn(4000, width) * 2.0 ** torch.randint(-45, 25, (4000, width))
    numbers[:3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    seed = 2**40 + 77
    rule = fresh("sgd", case, lr=1.0, seed=seed)
    rule.state.step.fill_(2**33 + 5)
    fused("rows_update_", torch.arange(4000), -numbers, case.stored, rule)
    bits = rounding.random_bits(torch.arange(4000), width, rounding.Rounding(seed, torch.tensor(2**33 + 5)))
    expected = rounding.round_at_random(numbers, bits, dtype)
    torch.testing.assert_close(case.stored, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", RULES)
def test_rules_round_as_the_truth_does(name):
    """Ids of a batch differ, so that no sum depends on an order; few numbers lie within an ulp of another choice."""
    case = Case([*HOT_COLD[:2], HOT_COLD[0], *HOT_COLD[3:6]], dtype=torch.bfloat16)
    runs = []
    for run in (fused, truth):
        torch.manual_seed(1)
        stored, rule = case.stored.clone(), fresh(name, case, seed=9)
        for step in range(6):
            ids = torch.randint(0, 60, (1, 6)).expand(3, 6).clone()
            ids[1:] = -1 if step % 2 else 60 - ids[1:].clamp(min=1)
            ids[2] = -1  # no row is read twice
            if rule.entry.lags:
                run("catch_up_", IdBatch(ids), stored, case.layout, rule)
            run("update_", case.grad(3), IdBatch(ids), stored, case.layout, rule)
        if rule.entry.lags:
            run("rows_catch_up_", None, stored, rule)
        runs.append(stored)
    moved = (runs[0] != case.stored).sum()
    assert moved > 100 and (runs[0] != runs[1]).sum() <= moved // 500
    same("stored", runs[0], runs[1])


@pytest.mark.parametrize("state_dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype, width", [(torch.float32, 16), (torch.float32, 7), (torch.bfloat16, 7)], ids=str)
def test_sums_of_squares_are_rounded_by_the_same_bits(state_dtype, dtype, width):
    check_sums(partial(fused, "update_"), dtype, state_dtype, (4000, width), "cpu")

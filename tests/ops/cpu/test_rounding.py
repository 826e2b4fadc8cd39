"""Rounding at random in the fused rules: the bits of the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, LR, RULES, Case, fresh, fused, same, truth

from quorem import Full
from quorem.ops import rounding
from quorem.ops.rows import IdBatch
from quorem.ops.state import CATCHES_UP, AdagradConstants, AdagradState

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


@pytest.mark.parametrize("state_dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 7])
def test_sums_of_squares_are_rounded_by_the_same_bits(state_dtype, dtype, width):
    """Every code, and gradients of all sizes: the sums are those of the truth, bit for bit."""
    case = Case([(Full(), 4000, None)], width=width, dtype=dtype)
    grad = torch.randn(4000, width) * 2.0 ** torch.randint(-40, 20, (4000, width))
    grad[:4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0])
    sums = torch.randint(0, 256, (4000, width), dtype=torch.uint8)
    if state_dtype == torch.bfloat16:
        sums = rounding.log8_numbers(sums.device)[sums.long()].bfloat16()
    runs = []
    for run in (fused, truth):
        stored, state = case.stored.clone(), AdagradState(sums.clone(), torch.tensor(2**33 + 5))
        options = {"rule": "adagrad", "constants": AdagradConstants(0.0, 1e-10), "rounding_seed": 2**40 + 77}
        run("rows_update_", torch.arange(4000), grad, stored, LR, state, **options)
        runs.append((stored, state.sum))
    same("sum", runs[0][1], runs[1][1], rtol=0, atol=0, equal_nan=True)
    assert (runs[0][1] != sums).sum() > 1000
    finite = runs[1][0].isfinite()  # infinite gradients make no number of a row
    assert torch.equal(finite, runs[0][0].isfinite()) and not finite.all()
    same("stored", runs[0][0][finite], runs[1][0][finite])

"""Rounding at random in the fused rules: the bits of the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, RULES, Case, fresh, fused, same, truth
from row_rules import copied

from quorem import Full
from quorem.ops import rounding
from quorem.ops.rows import IdBatch
from quorem.ops.state import AdagradState

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
    """Every code, and gradients of all sizes: the sums are those of the truth, bit for bit."""
    case = Case([(Full(), 4000, None)], width=width, dtype=dtype)
    grad = torch.randn(4000, width) * 2.0 ** torch.randint(-40, 20, (4000, width))
    grad[:4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0])
    sums = torch.randint(0, 256, (4000, width), dtype=torch.uint8)
    if state_dtype == torch.bfloat16:
        sums = rounding.log8_numbers(sums.device)[sums.long()].bfloat16()
    first, runs = fresh("adagrad", case, seed=2**40 + 77), []
    first.state = AdagradState(sums, torch.tensor(2**33 + 5))
    for run in (fused, truth):
        stored, rule = case.stored.clone(), copied(first)
        run("rows_update_", torch.arange(4000), grad, stored, rule)
        runs.append((stored, rule.state.sum))
    same("sum", runs[0][1], runs[1][1], rtol=0, atol=0, equal_nan=True)
    assert (runs[0][1] != sums).sum() > 1000
    finite = runs[1][0].isfinite()  # infinite gradients make no number of a row
    assert torch.equal(finite, runs[0][0].isfinite()) and not finite.all()
    same("stored", runs[0][0][finite], runs[1][0][finite])

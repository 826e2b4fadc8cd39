"""Rows rounded at random inside the fused updates: the same bits as the truth's."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import CUDA, DEVICE, collection, gradient, row_rule
from rounded_sums import check_sums
from row_rules import copied

from quorem.ops import rules as truth
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops import replay as truth_replay
from quorem.ops.gpu import replay, rules

pytestmark = pytest.mark.kernels(device="gpu")


@pytest.mark.parametrize("seed", [1, 2**40 + 7, -3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_gives_the_same_bits(dtype: torch.dtype, seed: int) -> None:
    """Each row is read once and the learning rate is a power of two, so that every sum is exact."""
    module = collection(16, dtype, names="cat")
    stored = module.stored.detach()
    with torch.no_grad():
        stored[::2] *= 2.0**-16  # below the smallest normal float16
    ids = (torch.arange(8, device=DEVICE) * 5)[:, None]
    fused, plain = stored.clone(), stored.clone()
    rule = row_rule("sgd", stored, lr=2.0**-12, seed=seed)
    steps = copied(rule), copied(rule)
    for _ in range(3):
        grad = gradient(module, 8)
        rules.update_(grad, IdBatch(ids), fused, module.layout, steps[0])
        truth.update_(grad, IdBatch(ids), plain, module.layout, steps[1])
    assert torch.equal(fused.view(torch.int16), plain.view(torch.int16)) and not torch.equal(fused, stored)
    at_random, nearest = stored.clone(), stored.clone()
    for row, chosen in ((at_random, seed), (nearest, None)):
        rules.update_(grad, IdBatch(ids), row, module.layout, replace(copied(rule), rounding_seed=chosen))
    exact = stored.float()
    truth.update_(grad.float(), IdBatch(ids), exact, module.layout, replace(copied(rule), rounding_seed=None))
    assert not torch.equal(at_random, nearest)
    if CUDA or dtype == torch.float16:  # the interpreter cuts bfloat16 off
        assert (nearest - exact).abs().sum() < (at_random - exact).abs().sum()


@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "amsgrad"])
def test_other_rules_round_by_the_same_bits(rule: str) -> None:
    """Sums differ in their last float32 bit, which moves few of the roundings."""
    module = collection(8, torch.bfloat16, names="qr")
    stored, ids = module.stored.detach(), (torch.arange(12, device=DEVICE) * 7)[:, None]
    first = row_rule(rule, stored.float(), lr=1e-3, seed=5)
    fused, plain, second = stored.clone(), stored.clone(), copied(first)
    for _ in range(3):
        grad = gradient(module, 12)
        if rule == "amsgrad":
            replay.catch_up_(IdBatch(ids), fused, module.layout, first)
            truth_replay.catch_up_(IdBatch(ids), plain, module.layout, second)
        rules.update_(grad, IdBatch(ids), fused, module.layout, first)
        truth.update_(grad, IdBatch(ids), plain, module.layout, second)
        ids = ids + 1 if rule == "amsgrad" else ids  # some rows miss steps
    touched = plain != stored
    assert touched.sum() > 20 and (fused != plain).sum() <= 0.02 * touched.sum() + 1


@pytest.mark.parametrize("state_dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_squares_are_rounded_by_the_same_bits(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    most = 2 if CUDA else 0  # a GPU rounds the square and the sum at once
    check_sums(rules.update_, dtype, state_dtype, (40, 16), DEVICE, most)

"""Rows rounded at random inside the fused updates: the same bits as the truth's."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, collection, copied, gradient, rule_state, scalar

from quorem.ops import rules as truth
from quorem.ops.rounding import log8_numbers
from quorem.ops.rows import IdBatch
from quorem.ops.state import AdagradConstants, AdagradState

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
    state, constants = rule_state("sgd", stored)
    states = copied(state), copied(state)
    options = {"rule": "sgd", "constants": constants, "rounding_seed": seed}
    for _ in range(3):
        grad = gradient(module, 8)
        rules.update_(grad, IdBatch(ids), fused, scalar(2.0**-12), states[0], module.layout, **options)
        truth.update_(grad, IdBatch(ids), plain, scalar(2.0**-12), states[1], module.layout, **options)
    assert torch.equal(fused.view(torch.int16), plain.view(torch.int16)) and not torch.equal(fused, stored)
    nearest = stored.clone()
    rules.update_(
        grad, IdBatch(ids), nearest, scalar(2.0**-12), state, module.layout, **options | {"rounding_seed": None}
    )
    assert (nearest == stored).float().mean() > (fused == stored).float().mean()


@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "amsgrad"])
def test_other_rules_round_by_the_same_bits(rule: str) -> None:
    """Sums differ in their last float32 bit, which moves few of the roundings."""
    module = collection(8, torch.bfloat16, names="qr")
    stored, ids = module.stored.detach(), (torch.arange(12, device=DEVICE) * 7)[:, None]
    state, constants = rule_state(rule, stored.float())
    fused, plain, states = stored.clone(), stored.clone(), (copied(state), copied(state))
    options = {"rule": rule, "constants": constants, "rounding_seed": 5}
    for _ in range(3):
        grad = gradient(module, 12)
        if rule == "amsgrad":
            replay.catch_up_(IdBatch(ids), fused, states[0], module.layout, **options)
            truth_replay.catch_up_(IdBatch(ids), plain, states[1], module.layout, **options)
        rules.update_(grad, IdBatch(ids), fused, scalar(1e-3), states[0], module.layout, **options)
        truth.update_(grad, IdBatch(ids), plain, scalar(1e-3), states[1], module.layout, **options)
        ids = ids + 1 if rule == "amsgrad" else ids  # some rows miss steps
    touched = plain != stored
    assert touched.sum() > 20 and (fused != plain).sum() <= 0.02 * touched.sum() + 1


@pytest.mark.parametrize("state_dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_squares_are_rounded_by_the_same_bits(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Every code, and gradients of all sizes; each row is read once, so that the interpreter's sums are the truth's."""
    module = collection(16, dtype, names="cat")
    stored, ids = module.stored.detach(), (torch.arange(40, device=DEVICE) * 5)[:, None]
    sums = torch.randint(0, 256, stored.shape, dtype=torch.uint8, device=DEVICE)
    if state_dtype == torch.bfloat16:
        sums = log8_numbers(sums.device)[sums.long()].bfloat16()
    step = torch.tensor(2**33 + 5, device=DEVICE)
    states = [AdagradState(sums.clone(), step.clone()) for _ in range(2)]
    rows = [stored.clone(), stored.clone()]
    options = {"rule": "adagrad", "constants": AdagradConstants(0.0, 1e-10), "rounding_seed": 2**40 + 7}
    grad = gradient(module, 40).float() * 2.0 ** torch.randint(-14, 16, (), device=DEVICE)
    grad = (grad * 2.0 ** torch.randint(-10, 10, grad.shape, device=DEVICE)).to(dtype)
    grad[:4, 0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0])
    for update_, row, state in zip((rules.update_, truth.update_), rows, states, strict=True):
        update_(grad, IdBatch(ids), row, scalar(0.5), state, module.layout, **options)
    differ = ~((states[0].sum == states[1].sum) | (states[0].sum.isnan() & states[1].sum.isnan()))
    assert differ.sum() <= (2 if CUDA else 0)  # a GPU rounds the square and the sum at once
    assert (states[1].sum != sums).sum() > 100
    torch.testing.assert_close(rows[0], rows[1], equal_nan=True)

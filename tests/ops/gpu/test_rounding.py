"""Rows rounded at random inside the fused updates: the same bits as the truth's."""

import pytest
import torch
from gpu_cases import DEVICE, collection, copied, gradient, rule_state, scalar

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


def test_float32_rows_are_not_rounded_here() -> None:
    module = collection(4, names="qr")
    state, constants = rule_state("sgd", module.stored.detach())
    ids = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    options = {"rule": "sgd", "constants": constants, "rounding_seed": 1}
    inputs = (gradient(module, 1), IdBatch(ids), module.stored.detach(), scalar(0.1), state, module.layout)
    assert rules.update_(*inputs, **options) is NotImplemented

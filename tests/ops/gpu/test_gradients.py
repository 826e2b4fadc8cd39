"""Gradients summed by row against the truth; and where they are summed."""

import gpu_cases
import pytest
import torch
from gpu_cases import CUDA, DEVICE, PLAIN, SHAPES, assert_close, batch, collection, gradient, jagged, no_ids, row_rule

import quorem
from quorem.ops import gradients as truth
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import gradients, host, places, rules

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def no_claim_is_left(stored: torch.Tensor) -> bool:
    return bool((places.claims_of(stored, 0).place == places.UNCLAIMED).all())


@pytest.mark.parametrize(("d", "b", "dtype"), SHAPES)
def test_gradient_of_a_lookup(d: int, b: int, dtype: torch.dtype) -> None:
    module = collection(d, dtype)
    ids = batch(module, b, torch.int64 if d % 3 else torch.int32)
    stored, grad = module.stored.detach(), gradient(module, b)
    dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
    expected = truth.backward(grad.double(), IdBatch(ids), stored.double(), module.layout)
    for (name, table), (_, true) in zip(module.named_tables(dense), module.named_tables(expected), strict=True):
        assert_close(table, true, dtype, name, slack=4)
    assert no_claim_is_left(stored)


@pytest.mark.parametrize("names", PLAIN)
def test_kinds_alone_and_mixed(names: str) -> None:
    module = collection(16, names=names)
    ids, stored, grad = batch(module, 70), module.stored.detach(), gradient(module, 70)
    ids[5] = 2**41
    expected = truth.backward(grad, IdBatch(ids), stored, module.layout)
    dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
    assert_close(dense, expected, torch.float32, "gradient", slack=4)


@pytest.mark.parametrize("b", [4, 40 if CUDA else 9])  # fewer ids than some tables have rows, and more
@pytest.mark.parametrize("names", gpu_cases.FEW)
def test_rows_of_ids_own_pools_and_shared_rows(names: str, b: int) -> None:
    module = collection(4, torch.float64, names)
    stored, layout, grad = module.stored.detach(), module.layout, gradient(module, b)
    for ids in (IdBatch(batch(module, b)), jagged(module, b, weighted=True, mean=True)):
        dense, expected = gradients.backward(grad, ids, stored, layout), truth.backward(grad, ids, stored, layout)
        assert_close(dense, expected, torch.float64, f"{ids.offsets is not None}", slack=4)
    weights, expected = (ops.sample_weights_backward(grad, ids, stored, layout) for ops in (gradients, truth))
    assert_close(weights, expected, torch.float64, "weights", slack=4)
    assert no_claim_is_left(stored)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("d", "b", "dtype"), [(3, 9, torch.float64), (16, 500 if CUDA else 5, torch.float32)])
def test_gradients_of_a_bag(d: int, b: int, dtype: torch.dtype, mean: bool) -> None:
    module = collection(d, dtype)
    bags, stored, grad = jagged(module, b, weighted=True, mean=mean), module.stored.detach(), gradient(module, b)
    inputs = (grad, bags, stored, module.layout)
    assert_close(gradients.backward(*inputs), truth.backward(*inputs), dtype, "stored", slack=4)
    dsamples, expected = gradients.sample_weights_backward(*inputs), truth.sample_weights_backward(*inputs)
    assert_close(dsamples, expected, dtype, "sample_weights", slack=4)


def test_many_reads_of_one_row_in_half_precision() -> None:
    """Sums are in float32: in bfloat16 they would stop growing at 256."""
    module = quorem.EmbeddingCollection([quorem.Table("t", 5, 2, quorem.Full())], device=DEVICE, dtype=torch.bfloat16)
    reads = 3008  # which bfloat16 has
    ids, grad = torch.full((reads, 1), 2, device=DEVICE), torch.ones(reads, 1, 2, device=DEVICE, dtype=torch.bfloat16)
    stored = torch.zeros_like(module.stored)
    dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
    assert dense[2].tolist() == [reads] * 2
    rules.update_(grad, IdBatch(ids), stored, module.layout, row_rule("sgd", stored, lr=1.0))
    assert stored[2].tolist() == [-reads] * 2 and not stored[[0, 1, 3, 4]].any()


def test_the_default_device_does_not_matter() -> None:
    module = collection(4)
    ids, stored, grad, bags = batch(module, 5), module.stored.detach(), gradient(module, 5), jagged(module, 5)
    expected = truth.backward(grad, IdBatch(ids), stored, module.layout)
    with torch.device("meta"):
        dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
        of_bags = gradients.backward(grad, bags, stored, module.layout)
    assert dense.device == of_bags.device == stored.device
    assert_close(dense, expected, torch.float32, "gradient", slack=4)


def test_empty_batches() -> None:
    module = collection(4)
    for ids, size in zip(no_ids(module), (0, 3), strict=True):
        assert not gradients.backward(gradient(module, size), ids, module.stored.detach(), module.layout).any()


def test_deterministic_mode_and_wide_rows_are_left_to_the_truth() -> None:
    module = collection(4)
    inputs = (gradient(module, 3), IdBatch(batch(module, 3)), module.stored.detach(), module.layout)
    torch.use_deterministic_algorithms(True)
    try:
        assert gradients.backward(*inputs) is NotImplemented
    finally:
        torch.use_deterministic_algorithms(False)
    assert gradients.backward(*inputs) is not NotImplemented
    wide = quorem.EmbeddingCollection([quorem.Table("t", 5, host.WIDEST + 1, quorem.Full())], device=DEVICE)
    ids, grad = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), torch.ones(2, 1, host.WIDEST + 1, device=DEVICE)
    assert gradients.backward(grad, IdBatch(ids), wide.stored.detach(), wide.layout) is NotImplemented

"""Gradients summed by row against the truth; and where they are summed."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, assert_close, batch, collection, gradient, jagged, rule_state, scalar

import quorem
from quorem.ops import gradients as truth
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import gradients, host, places, rules

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def no_claim_is_left(stored: torch.Tensor) -> bool:
    return bool((places.claims_of(stored, 0).place == places.UNCLAIMED).all())


@pytest.mark.parametrize(
    ("d", "b", "dtype", "id_dtype"),
    [
        (1, 7, torch.float32, torch.int64),
        (3, 63, torch.float64, torch.int32),
        (16, 1, torch.float32, torch.int64),
        (16, 1000 if CUDA else 130, torch.float32, torch.int64),
        (60, 7, torch.bfloat16, torch.int32),
        (100, 7, torch.float16, torch.int64),
        (130, 7, torch.float32, torch.int64),
    ],
)
def test_gradient_of_a_lookup(d: int, b: int, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    module = collection(d, dtype)
    ids, stored, grad = batch(module, b), module.stored.detach(), gradient(module, b)
    if id_dtype == torch.int32:
        ids[:, [s.num_embeddings > 2**31 for s in module.specs]] %= 2**31 - 1
    ids = ids.to(id_dtype)
    dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
    expected = truth.backward(grad.double(), IdBatch(ids), stored.double(), module.layout)
    for (name, table), (_, true) in zip(module.named_tables(dense), module.named_tables(expected), strict=True):
        assert_close(table, true, dtype, name, slack=4)
    assert no_claim_is_left(stored)


@pytest.mark.parametrize("names", ["qr", "k3", "tiny", "sum", "wide", "pad", "map", "cat", "qr k3 tiny", "qr sum"])
def test_kinds_alone_and_mixed(names: str) -> None:
    module = collection(16, names=names)
    ids, stored, grad = batch(module, 70), module.stored.detach(), gradient(module, 70)
    ids[5] = 2**41
    expected = truth.backward(grad, IdBatch(ids), stored, module.layout)
    dense = gradients.backward(grad, IdBatch(ids), stored, module.layout)
    assert_close(dense, expected, torch.float32, "gradient", slack=4)


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
    state, constants = rule_state("sgd", stored)
    rules.update_(grad, IdBatch(ids), stored, scalar(1.0), state, module.layout, rule="sgd", constants=constants)
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
    stored, features = module.stored.detach(), len(module.specs)
    none = torch.empty(0, features, dtype=torch.int64, device=DEVICE)
    assert not gradients.backward(gradient(module, 0), IdBatch(none), stored, module.layout).any()
    offsets = torch.zeros(features * 3 + 1, dtype=torch.int64, device=DEVICE)
    bags = IdBatch(none.flatten(), offsets, mean=True)
    assert not gradients.backward(gradient(module, 3), bags, stored, module.layout).any()


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

"""The fused lookup, bag and count of invalid ids against the truth."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, assert_close, batch, collection, jagged

from quorem.ops import lookup as truth
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import lookup

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def count() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("d", "b", "dtype"),
    [
        (1, 7, torch.float32),
        (3, 63, torch.float64),
        (16, 1, torch.float32),
        (16, 1000 if CUDA else 130, torch.float32),
        (60, 7, torch.bfloat16),
        (100, 7, torch.float16),
        (130, 7, torch.float32),
    ],
)
def test_lookup(d: int, b: int, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    module = collection(d, dtype)
    ids, stored = batch(module, b), module.stored.detach()
    if id_dtype == torch.int32:
        ids[:, [s.num_embeddings > 2**31 for s in module.specs]] %= 2**31 - 1
    ids = ids.to(id_dtype)
    expected = truth.lookup(IdBatch(ids), stored.double(), module.layout, count())
    assert_close(lookup.lookup(IdBatch(ids), stored, module.layout), expected, dtype, "out")


@pytest.mark.parametrize("names", ["qr", "k3", "tiny", "sum", "wide", "pad", "map", "cat", "qr k3 tiny", "qr sum"])
def test_kinds_alone_and_mixed(names: str) -> None:
    """A kernel leaves out what none of its slots has, such as permutations."""
    module = collection(16, names=names)
    ids, stored = batch(module, 70), module.stored.detach()
    ids[5] = 2**41
    invalid, expected = count(), count()
    out = lookup.lookup(IdBatch(ids), stored, module.layout, invalid)
    assert_close(out, truth.lookup(IdBatch(ids), stored, module.layout, expected), torch.float32, "out")
    assert int(invalid) == int(expected) == len(module.names) + 1


@pytest.mark.parametrize("names", ["qr", "qr k3 tiny"])
def test_many_narrow_vectors(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MANY_VECTORS", 1)
    test_kinds_alone_and_mixed(names)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("d", "b", "dtype"), [(3, 9, torch.float64), (16, 500 if CUDA else 5, torch.float32)])
def test_bag(d: int, b: int, dtype: torch.dtype, mean: bool) -> None:
    module = collection(d, dtype)
    bags, stored = jagged(module, b, mean=mean), module.stored.detach()
    samples = torch.rand(2 * len(bags.ids), dtype=dtype, device=DEVICE)[::2]  # not contiguous
    for name, read in {"weighted": bags._replace(sample_weights=samples), "unweighted": bags}.items():
        expected = truth.lookup(read, stored, module.layout)
        assert_close(lookup.lookup(read, stored, module.layout), expected, dtype, name)


def test_empty_batches() -> None:
    module = collection(4)
    stored, features = module.stored.detach(), len(module.specs)
    none = torch.empty(0, features, dtype=torch.int64, device=DEVICE)
    assert lookup.lookup(IdBatch(none), stored, module.layout).shape == (0, len(module.layout.slots), stored.shape[1])
    offsets = torch.zeros(features * 3 + 1, dtype=torch.int64, device=DEVICE)
    assert not lookup.lookup(IdBatch(none.flatten(), offsets, mean=True), stored, module.layout).any()


def test_invalid_ids_are_counted() -> None:
    module = collection(4)
    ids, stored = batch(module, 20), module.stored.detach()
    ids[3, 0], ids[4, 1], ids[5, 1] = 1000, -7, 2**40
    alone, with_lookup, jagged_count = count(), count(), count()
    lookup.count_invalid_(IdBatch(ids), alone, module.layout)
    assert int(alone) == 4  # and the -1 that ``batch`` plants
    out = lookup.lookup(IdBatch(ids), stored, module.layout, with_lookup)
    assert int(with_lookup) == 4
    torch.testing.assert_close(out, truth.lookup(IdBatch(ids), stored, module.layout, count()))
    bags = jagged(module, 6)
    bags.ids[0] = 10**6
    lookup.count_invalid_(bags, jagged_count, module.layout)
    assert int(jagged_count) == 1

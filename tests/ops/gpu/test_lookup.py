"""The fused lookup, bag and count of invalid ids against the truth."""

import pytest
import torch
from gpu_cases import CUDA, DEVICE, FREQUENCY, PLAIN, SHAPES, assert_close, batch, collection, gradient, jagged, no_ids

import quorem
from quorem.ops import lookup as truth
from quorem.ops.declare import word_bytes
from quorem.ops.rows import IdBatch, lookup_reads

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import host, lookup

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]


def count() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("d", "b", "dtype"), SHAPES)
def test_lookup(d: int, b: int, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    module = collection(d, dtype)
    ids, stored = batch(module, b, id_dtype), module.stored.detach()
    expected = truth.lookup(IdBatch(ids), stored.double(), module.layout, count())
    assert_close(lookup.lookup(IdBatch(ids), stored, module.layout), expected, dtype, "out")


@pytest.mark.parametrize("names", PLAIN + FREQUENCY)
def test_kinds_alone_and_mixed(names: str) -> None:
    """A kernel leaves out what none of its slots has, such as index maps."""
    module = collection(16 if names in PLAIN else 4, names=names)
    ids, stored = batch(module, 70), module.stored.detach()
    ids[5] = 2**41
    invalid, expected = count(), count()
    out = lookup.lookup(IdBatch(ids), stored, module.layout, invalid)
    assert_close(out, truth.lookup(IdBatch(ids), stored, module.layout, expected), torch.float32, "out")
    assert int(invalid) == int(expected) == ids.shape[1] + 1
    if names in FREQUENCY:
        bags = jagged(module, 9, weighted=True, mean=True)
        pooled = lookup.lookup(bags._replace(ids=bags.ids.int()), stored, module.layout)
        assert_close(pooled, truth.lookup(bags, stored, module.layout), torch.float32, "bags", slack=4)


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


@pytest.mark.parametrize(("num_hot", "num_rest", "levels"), [(2000, 0, 1), (2000, 90, 1), (300, 0, 2), (5, 5990, 3)])
def test_ids_are_found_in_the_words_of_a_list(num_hot: int, num_rest: int, levels: int) -> None:
    """In runs of ids that are all hot, in runs without any, and in lists of few ids, whose words have more levels."""
    counts = torch.rand(6000, generator=torch.Generator().manual_seed(1)) + 1
    counts[1000:2500] += 1  # hot, where there are as many
    counts[3000:4000] -= 1  # never hot
    scheme = quorem.HotCold(num_hot, cold=quorem.QR(4), num_rest=num_rest)
    module = quorem.EmbeddingCollection([quorem.Table("t", 6000, 4, scheme, frequencies=counts)], device=DEVICE)
    layout, stored = module.layout, module.stored.detach()
    assert host.host_layout(layout).row_flags.levels == levels
    assert word_bytes(layout) <= layout.ranks.nbytes or levels > 2
    assert levels > 1 or word_bytes(layout) == 8 * (1 + (num_rest > 0)) * (6000 // 32 + 2)
    for dtype in (torch.int64, torch.int32):
        ids = torch.arange(6000, dtype=dtype, device=DEVICE)[:, None]
        assert torch.equal(lookup.lookup(IdBatch(ids), stored, layout), truth.lookup(IdBatch(ids), stored, layout))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("kind", "d", "dtype"),
    [
        ("own", 6, torch.float32),
        ("pool ranked", 1, torch.float64),
        ("pool", 7, torch.bfloat16),
        ("shared", 144, torch.float32),
    ],
)
def test_rows_of_fewer_bits(kind: str, d: int, bits: int, dtype: torch.dtype) -> None:
    module = quorem.quantize_(collection(d, names=kind), bits)
    stored, layout, width = module.stored.detach(), module.layout, module.width
    ids, bags = batch(module, 20), jagged(module, 5, mean=True)
    options = {"width": width, "bits": bits, "dtype": dtype}
    invalid = count()
    out = lookup.lookup(IdBatch(ids), stored, layout, invalid, **options)
    assert int(invalid) == 1 and torch.equal(lookup.lookup(IdBatch(ids), stored, layout, **options), out)
    expected = truth.compose(lookup_reads(ids, layout), stored, width=width, bits=bits)
    assert out.dtype == dtype
    assert_close(out, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, "lookup")
    pooled = lookup.lookup(bags, stored, layout, **options)
    expected = truth.lookup(bags, stored, layout, **options | {"dtype": torch.float32})
    assert_close(pooled, expected, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, "bag", slack=4)


def test_empty_batches() -> None:
    module = collection(4)
    for ids, size in zip(no_ids(module), (0, 3), strict=True):
        out = lookup.lookup(ids, module.stored.detach(), module.layout)
        assert out.shape == gradient(module, size).shape and not out.any()


def test_invalid_ids_are_counted() -> None:
    module = collection(4)
    ids, bags = batch(module, 20), jagged(module, 6)
    ids[3, 0], ids[4, 1], ids[5, 1] = 1000, -7, 2**40
    bags.ids[0] = 10**6
    for each, wrong in ((IdBatch(ids), 4), (bags, 1)):  # of single ids one more is the -1 that ``batch`` plants
        total = count()
        lookup.count_invalid_(each, total, module.layout)
        assert int(total) == wrong

"""Lookups and bags of every shape, forward and backward, against the truth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, MIX, Case, check_bag, check_lookup, fused, truth

from quorem import QR, Custom, Full
from quorem.ops.cpu import lookup
from quorem.ops.rows import IdBatch
from quorem.paper.partitions import Partition

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 63, 1000])
def test_lookup(dtype, size):
    case = Case(dtype=dtype)
    check_lookup(case, case.ids(size))
    check_lookup(case, case.ids(size, torch.int32))


@pytest.mark.parametrize("width", [1, 3, 4, 16, 60, 100])
def test_lookup_of_any_width(width):
    case = Case(width=width)
    check_lookup(case, case.ids(100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 16, 32, 48])
def test_lookup_written_past_the_caches(dtype, width, monkeypatch):
    monkeypatch.setattr(lookup, "STREAMED", 0)
    case = Case(width=width, dtype=dtype)
    check_lookup(case, case.ids(100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_bag(dtype, weighted, mean):
    case = Case(dtype=dtype, width=20)
    for size in (1, 7, 63):
        check_bag(case, *case.bags(size), weighted, mean)
    check_bag(case, *case.bags(7, dtype=torch.int32), weighted, mean)


def test_bags_longer_than_a_block():
    case = Case(MIX[:3], width=20)
    lengths = torch.tensor([0, 1, 63, 64, 65, 0, 128, 300, 1000] * 3)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = case.draw(torch.arange(3).repeat_interleave(9).repeat_interleave(lengths))
    check_bag(case, ids, offsets, weighted=True, mean=True)


def test_tensors_that_are_not_contiguous():
    case = Case(MIX[:3])
    ids = case.ids(90)
    check_lookup(case, ids[::3])
    check_lookup(case, ids.T.contiguous().T)
    strided = torch.stack([case.stored, torch.full_like(case.stored, torch.nan)], 1)[:, 0]
    expected = truth("lookup", IdBatch(ids), case.stored, case.layout)
    assert torch.equal(fused("lookup", IdBatch(ids), strided, case.layout, names=""), expected)
    grad = torch.ones(1).expand(90, len(case.layout.slots), 16)
    expected = truth("backward", grad, IdBatch(ids), case.stored, case.layout)
    torch.testing.assert_close(fused("backward", grad, IdBatch(ids), strided, case.layout), expected)


def test_nan_and_infinity_pass_through():
    case = Case([(QR(4), 100, None)], width=5, dtype=torch.bfloat16)
    case.stored[3], case.stored[4], case.stored[26] = torch.nan, torch.inf, 1e38
    ids = torch.arange(100)[:, None]
    out = fused("lookup", IdBatch(ids), case.stored, case.layout, names="")
    torch.testing.assert_close(out, truth("lookup", IdBatch(ids), case.stored, case.layout), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [-1, 50, 2**31 - 1])
def test_ids_out_of_range(value, dtype):
    case = Case([(QR(4), 1000, None), (Full(), 50, None)])
    names = "table user\ntable day"
    ids = case.ids(200, dtype)
    ids[150, 1] = value
    with pytest.raises(IndexError, match=rf"id {value} is outside \[0, 50\) of table day"):
        fused("lookup", IdBatch(ids), case.stored, case.layout, names=names)
    bags = IdBatch(ids.T.flatten(), torch.arange(0, 401, 5))
    with pytest.raises(IndexError, match=rf"id {value} is outside \[0, 50\) of table day"):
        fused("lookup", bags, case.stored, case.layout, names=names)


@settings(max_examples=60)
@given(st.data())
def test_division_is_exact(data):
    n = data.draw(st.sampled_from([2**31, 2**40, 2**52, 2**52 + 1, 2**60]))
    sizes = data.draw(st.lists(st.integers(2, 2000), min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(1, n - 1), min_size=len(sizes), max_size=len(sizes)))
    parts = tuple(Partition(stride, size) for stride, size in zip(strides, sizes, strict=True))
    case = Case([(Custom(parts, operation="add", check=False), n, None)], width=1)
    near = [q * d + e for d in [*sizes, *strides] for q in (1, n // d // 2, n // d - 1, n // d) for e in (-1, 0, 1)]
    check_lookup(case, torch.tensor([[i] for i in [*near, 0, n - 1] if 0 <= i < n]))

"""Hot, cold and rest ids, pools and tables of several features: fused against the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case, check_bag, check_lookup, fused, same, truth

from quorem.ops import cpu
from quorem.ops.codes import quantize

pytestmark = pytest.mark.kernels(device="cpu")


def case_of(ranked, **options):
    return Case(HOT_COLD, features=HOT_COLD_FEATURES, ranked=ranked, **options)


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_lookups(ranked, dtype):
    case = case_of(ranked, dtype=dtype)
    check_lookup(case, case.ids(300, torch.int32 if ranked else torch.int64))
    check_lookup(case, case.ids(1))


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("weighted, mean", [(False, False), (True, False), (True, True)])
def test_bags(ranked, weighted, mean):
    case = case_of(ranked, widths=[16] * 6 + [32] * 3 + [16])
    check_bag(case, *case.bags(120), weighted, mean)


@pytest.mark.parametrize("ranked", [False, True])
def test_many_threads(ranked, many_threads):
    case = case_of(ranked)
    check_lookup(case, case.ids(500))
    check_bag(case, *case.bags(100), True, True)


def test_a_pool_alone_on_many_threads(many_threads):
    case = Case(HOT_COLD[6:9])
    check_lookup(case, case.ids(700))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width, dtype", [(32, torch.float32), (46, torch.float64), (8, torch.bfloat16)])
def test_quantized_rows(bits, width, dtype):
    case = case_of(ranked=bits == 4, width=width)
    width = case.storage.width
    stored = quantize(case.stored, bits)
    options = {"width": width, "bits": bits, "dtype": dtype, "names": ""}
    args = (case.ids(130), stored, case.layout)
    same("lookup", fused("lookup_quantized", *args, **options), truth("lookup_quantized", *args, **options))
    ids, offsets = case.bags(40)
    for weights, mean in ((None, False), (torch.rand(len(ids)), True)):
        args, options["mean"] = (ids, offsets, weights, stored, case.layout), mean
        same("bag", fused("bag_quantized", *args, **options), truth("bag_quantized", *args, **options))


def test_quantized_rows_of_another_size_are_not_read():
    case = case_of(False)
    options = {"width": case.storage.width, "bits": 4, "dtype": torch.float32, "names": ""}
    op = cpu.kernels()["lookup_quantized"]
    assert op(case.ids(3), quantize(case.stored, 8), case.layout, **options) is NotImplemented


def test_counting():
    case = case_of(False)
    ids, invalid = case.ids(100), torch.tensor(3)
    ids[5, 2], ids[7, 0] = -1, 10**9
    args = (ids, case.stored, case.layout)
    expected = truth("lookup_counting", *args, torch.tensor(0))
    same("out", fused("lookup_counting", *args, invalid, names=""), expected)
    assert invalid == 5
    codes = {"width": case.storage.width, "bits": 8, "dtype": torch.float32}
    args = (ids, quantize(case.stored, 8), case.layout)
    expected = truth("lookup_quantized_counting", *args, torch.tensor(0), **codes)
    same("out", fused("lookup_quantized_counting", *args, invalid, names="", **codes), expected)
    assert invalid == 7

"""Hot, cold and rest ids, pools and tables of several features: fused against the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case, check_bag, check_lookup

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

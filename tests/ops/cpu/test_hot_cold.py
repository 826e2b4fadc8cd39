"""Hot, cold and rest ids, pools and tables of several features: fused against the truth."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case, check_bag, check_lookup, fused, same, truth

from quorem import GeneralizedQR, HotCold
from quorem.ops import cpu
from quorem.ops.codes import quantize
from quorem.ops.rows import IdBatch
from quorem.ops.words import with_words
from quorem.paper.schemes.frequency import Ranks, check_ranks, rank

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


@pytest.mark.parametrize("case", [case_of(False), case_of(True), Case(HOT_COLD[6:9])], ids=["", "ranked", "pool"])
def test_many_threads(case, many_threads):
    check_lookup(case, case.ids(500))
    check_bag(case, *case.bags(100), True, True)


def listed_case(num_ids, num_hot, num_cold):
    """One table with lists of random ids, and ids in and beside the lists."""
    drawn = torch.randperm(num_ids) if num_ids < 2**20 else torch.randint(num_ids, (num_hot + num_cold,)).unique()
    hot, cold = drawn[torch.randperm(len(drawn))][: num_hot + num_cold].split([num_hot, num_cold])
    num_rest = num_ids - num_hot - num_cold
    ranks = check_ranks(Ranks(hot.sort().values, cold.sort().values if num_rest else cold[:0]), num_ids)
    scheme = HotCold(num_hot, cold=GeneralizedQR(4, operation="add"), num_rest=num_rest, force=True)
    case = Case([(scheme, num_ids, None)], width=1, ranks=[rank(ranks, scheme.spec(num_ids, 1))])
    ids = torch.cat([hot, cold, drawn, torch.randint(num_ids, (2000,)), torch.tensor([0, num_ids - 1])])
    near = (ids[torch.randperm(len(ids))[:20_000], None] + torch.tensor([-1, 0, 1, 32])).clamp(0, num_ids - 1)
    return case, near.view(-1, 1)


@pytest.mark.parametrize(
    "num_ids, num_hot, num_cold, levels",
    [
        (200_000, 50_000, 150_000, 1),
        (200_000, 50_000, 149_000, 1),
        (200_000, 3000, 197_000, 2),
        (200_000, 0, 3000, 4),
        (2**32, 30_000, 10_000, 5),
        (2**40, 4000, 4000, 6),
        (6000, 5, 5, 2),
    ],
)
def test_ids_in_lists(num_ids, num_hot, num_cold, levels):
    """In words of one level and of several."""
    torch.manual_seed(1)
    case, ids = listed_case(num_ids, num_hot, num_cold)
    assert with_words(case.layout, case.layout.slots).levels == levels
    assert case.layout.ranks.dtype == (torch.int32 if num_ids < 2**31 else torch.int64)
    for batch in (ids, ids.int()) if num_ids < 2**31 else (ids,):
        args = (IdBatch(batch), case.stored, case.layout)
        same("out", fused("lookup", *args, names=""), truth("lookup", *args))
    check_lookup(case, ids[:300])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width, dtype", [(32, torch.float32), (46, torch.float64), (8, torch.bfloat16)])
def test_quantized_rows(bits, width, dtype):
    case = case_of(ranked=bits == 4, width=width)
    width = case.storage.width
    sizes = 2.0 ** torch.randint(-30, 4, (len(case.stored), 1))  # scales below the smallest normal float16 among them
    stored = quantize(case.stored * sizes, bits)
    options = {"width": width, "bits": bits, "dtype": dtype, "names": ""}
    ids, offsets = case.bags(40)
    bags = IdBatch(ids, offsets), IdBatch(ids, offsets, torch.rand(len(ids)), mean=True)
    for batch in (IdBatch(case.ids(130)), *bags):
        args = (batch, stored, case.layout)
        same("vectors", fused("lookup", *args, **options), truth("lookup", *args, **options))


def test_quantized_rows_of_another_size_are_not_read():
    case = case_of(False)
    options = {"width": case.storage.width, "bits": 4, "dtype": torch.float32, "names": ""}
    op = cpu.kernels()["lookup"]
    assert op(IdBatch(case.ids(3)), quantize(case.stored, 8), case.layout, **options) is NotImplemented

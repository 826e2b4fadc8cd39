"""Row gradients: which ids get one, in which dtype they are summed, and which slots are summed together."""

from itertools import pairwise

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case, fused

from quorem import QR, Embedding, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops import cpu
from quorem.ops.cpu.gradients import CACHED_SUMS, sharing_of
from quorem.ops.cpu.sums import START, UNITS
from quorem.ops.rows import IdBatch

pytestmark = pytest.mark.kernels(device="cpu")


def test_invalid_ids_get_no_gradient():
    case = Case([(QR(4), 1000, None)])
    ids = torch.tensor([[5], [10**12], [-7], [999]])
    grad = case.grad(4)
    dense = fused("backward", grad, IdBatch(ids), case.stored, case.layout)
    valid = [0, 3]
    assert torch.equal(dense, fused("backward", grad[valid], IdBatch(ids[valid]), case.stored, case.layout))


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize("dtype, total", [(torch.bfloat16, 3008), (torch.float16, 3000)])
def test_sparse_gradients_are_summed_before_they_are_rounded(dtype, total, backend, monkeypatch):
    if backend == "plain":
        monkeypatch.setattr(cpu, "kernels", dict)
    table = Embedding(10, 2, Full(), sparse=True, dtype=dtype)
    table(torch.zeros(3000, dtype=torch.int64)).sum().backward()
    assert table.stored.grad.coalesce().values().tolist() == [[total, total]]


@pytest.mark.parametrize("num_ids", [1, 100, 20_000])
def test_each_slot_is_in_one_unit_and_places_lie_apart(num_ids):
    sharing = sharing_of(Case(HOT_COLD, features=HOT_COLD_FEATURES).layout)
    units, places = sharing.placement(num_ids, 16, 4)
    seen = []
    for unit in units:
        slots = sharing.order[unit.first_slot : unit.first_slot + unit.num_slots].tolist()
        bounds = places[unit.first_place : unit.first_place + unit.num_places, START:].flatten().tolist()
        assert bounds[0] == 0 and all(a < b for a, b in pairwise([*bounds, unit.num_bytes]))
        assert unit.num_bytes <= CACHED_SUMS or slots in sharing.groups
        assert all(len(set(group) & set(slots)) in (0, len(group)) for group in sharing.groups)
        used = sharing.place_of[slots][:, 0]
        assert ((used >= unit.first_place) & (used < unit.first_place + unit.num_places)).all()
        seen += [s + i for s in slots for i in range(places[sharing.place_of[s, 0], UNITS])]
    assert sorted(seen) == list(range(sharing.num_slots))


def test_slots_of_one_pool_or_one_table_are_one_group_and_columns_of_the_same_rows_one_slot():
    tables = [
        Table("a", 400, 8, QR(4), features=("b", "c")),
        Table("d", 400, 24, QR(4), features=("e", "f")),
        Table("g", 400, 8, HotCold(20, cold=Pool(80))),
        Table("h", 50, 16, Full()),
        Table("i", 400, 8, HotCold(20, cold=Pool(80))),
    ]
    groups = sharing_of(EmbeddingCollection(tables).layout).groups
    assert groups == [[0, 1], [2, 5], [8, 11], [9]]

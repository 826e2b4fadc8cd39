"""Which slots are summed together, and where their areas lie."""

import pytest
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops.cpu.sharing import CACHED_SUMS, sharing_of

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("most_slots", [1, 3, 100])
def test_each_slot_is_in_one_unit_and_areas_lie_apart(most_slots):
    sharing = sharing_of(Case(HOT_COLD, features=HOT_COLD_FEATURES).layout)
    units, order, offsets = sharing.placement(1000, 16, 4, most_slots)
    seen = []
    for unit in units:
        slots = order[unit.first : unit.first + unit.num_slots].tolist()
        starts = offsets[slots].tolist()
        assert starts[0] == 0 and all(a < b for a, b in zip(starts, [*starts[1:], unit.num_bytes], strict=True))
        assert unit.num_slots <= max(most_slots, sharing.largest_group)
        assert unit.num_bytes <= CACHED_SUMS or unit.num_slots <= sharing.largest_group
        assert all(len(set(group) & set(slots)) in (0, len(group)) for group in sharing.groups)
        seen += slots
    assert sorted(seen) == list(range(sharing.num_slots))


def test_slots_of_one_pool_or_one_wide_table_are_one_group():
    tables = [
        Table("a", 400, 8, QR(4), features=("b", "c")),
        Table("d", 400, 24, QR(4), features=("e", "f")),
        Table("g", 400, 8, HotCold(20, cold=Pool(80))),
        Table("h", 50, 16, Full()),
        Table("i", 400, 8, HotCold(20, cold=Pool(80))),
    ]
    groups = sharing_of(EmbeddingCollection(tables).layout).groups
    assert groups == [[0, 1], [2, 3, 4, 5, 6, 7], [8, 11], [9, 10]]

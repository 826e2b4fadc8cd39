"""Which slots are summed together, and where their areas lie."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, Case

from quorem import QR, EmbeddingCollection, HotCold, Pool, Table, optim
from quorem.ops.cpu.areas import ALL_PARTS, PRIVATE_PARTS, SHARED_PARTS
from quorem.ops.cpu.sharing import CACHED_SUMS, sharing_of

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("parts_taken", [ALL_PARTS, PRIVATE_PARTS, SHARED_PARTS])
@pytest.mark.parametrize("most_slots", [1, 3, 100])
def test_each_slot_is_in_one_unit_and_areas_lie_apart(parts_taken, most_slots):
    sharing = sharing_of(Case(HOT_COLD, features=HOT_COLD_FEATURES).layout)
    units, order, offsets = sharing.placement(1000, 16, 4, parts_taken, most_slots)
    seen = []
    for unit in units:
        slots = order[unit.first : unit.first + unit.num_slots].tolist()
        starts = offsets[slots].tolist()
        assert starts[0] == 0 and all(a < b for a, b in zip(starts, [*starts[1:], unit.num_bytes], strict=True))
        assert unit.num_slots <= max(most_slots, sharing.largest_group)
        assert unit.num_bytes <= CACHED_SUMS or unit.num_slots <= sharing.largest_group
        for group in sharing.groups.values():
            assert parts_taken == PRIVATE_PARTS or len(set(group) & set(slots)) in (0, len(group))
        seen += slots
    shared = [slot for group in sharing.groups.values() if len(group) > 1 for slot in group]
    assert sorted(seen) == (sorted(shared) if parts_taken == SHARED_PARTS else list(range(sharing.num_slots)))
    assert sorted(order.tolist()) == list(range(sharing.num_slots))


@pytest.mark.parametrize("rule", [optim.Adagrad, optim.AMSGrad])
def test_shared_parts_after_the_others_change_no_bit(rule):
    scheme = HotCold(20, cold=Pool(60), num_rest=300)
    ids = torch.randint(0, 400, (200, 5), generator=torch.Generator().manual_seed(0))
    grad = torch.randn(200, 5, 8, generator=torch.Generator().manual_seed(1))

    def trained(splits):
        torch.manual_seed(0)
        tables = [Table(name, 400, 8, scheme) for name in "ab"]
        tables += [Table("c", 400, 8, QR(4)), Table("d", 400, 8, QR(4), features=("e", "f"))]
        module = EmbeddingCollection(tables)
        sharing = sharing_of(module.layout)
        assert sharing.splits
        sharing.splits = splits
        optim.apply_in_backward(module, rule, lr=0.1)
        for _ in range(3):
            module(ids).backward(grad)
        return module.stored.detach().clone()

    assert torch.equal(trained(True), trained(False))


def test_parts_of_one_product_are_summed_together():
    module = EmbeddingCollection([Table("a", 400, 8, QR(4), features=("b", "c")), Table("d", 400, 8, QR(4))])
    sharing = sharing_of(module.layout)
    assert sharing.splits and sharing.private.tolist() == [[0, 0], [0, 0], [1, 1]]
    sharing.private[0, 0] = 1
    assert not sharing._splits(module.layout)

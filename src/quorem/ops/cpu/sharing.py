"""Which slots sum their gradients together, since they share rows, and where their areas lie (see ``areas``)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, GROUP, OWN, PITCH, SIZE, UNUSED, Layout
from ..per_tensor import PerTensor
from .areas import ALL_PARTS, PRIVATE_PARTS, SHARED_PARTS, area_bytes

CACHED_SUMS = 1 << 20  # bytes of summed gradients at a time, which are still in a core's cache when they are used
_MOST_PLACEMENTS = 16  # of one layout, for as many sizes of batches


class Unit(NamedTuple):
    """Slots whose gradients are summed together."""

    first: int  # the position of their first slot in ``Placement.order``
    num_slots: int
    num_bytes: int  # of their areas


class Placement(NamedTuple):
    """Units of work, and where the area of each slot starts in the memory of its unit."""

    units: tuple[Unit, ...]
    order: Tensor  # int64 [S]: slots such that those of a unit come one after another
    offsets: Tensor  # int64 [S], in bytes


class Sharing:
    """Which slots of a layout share rows: those of one group, part by part where the parts start at the same row."""

    def __init__(self, layout: Layout) -> None:
        self.num_slots, self.num_partitions, _ = layout.parts.shape
        groups = layout.slots[:, GROUP].tolist()
        self.groups: dict[int, list[int]] = {}
        for slot, group in enumerate(groups):
            self.groups.setdefault(group, []).append(slot)
        self.largest_group = max(map(len, self.groups.values()))
        self.owners = torch.arange(self.num_slots * self.num_partitions, device="cpu").view(self.num_slots, -1)
        self.readers = [[0] * self.num_partitions for _ in range(self.num_slots)]  # slots that add to each part
        self.num_rows = (layout.parts[..., SIZE] * layout.parts[..., PITCH]).tolist()
        self.pitches = layout.parts[..., PITCH].long().contiguous()
        first: dict[tuple[int, ...], int] = {}
        for slot, parts in enumerate(layout.parts[..., [BASE, SIZE, PITCH]].tolist()):
            for k, part in enumerate(parts):
                if part[0] != UNUSED:
                    owner = first.setdefault((groups[slot], *part), slot * self.num_partitions + k)
                    self.owners[slot, k] = owner
                    self.readers[owner // self.num_partitions][owner % self.num_partitions] += 1
        private = [[int(count == 1) for count in counts] for counts in self.readers]  # of owners; others have none
        self.private = torch.tensor(private, device="cpu")
        self.splits = self.largest_group > 1 and self._splits(layout)
        self._placements: dict[tuple[int, ...], Placement] = {}

    def _splits(self, layout: Layout) -> bool:
        """Whether parts that other slots read too can be summed after the others.

        So it is if no id multiplies rows of both kinds of parts: those of one kind change before the others are summed.
        """
        kinds = []
        for slot, (parts, num_own) in enumerate(
            zip(layout.parts[..., BASE].tolist(), layout.slots[:, OWN], strict=True)
        ):
            composed = [k for k, base in enumerate(parts) if base != UNUSED and not (num_own > 0 and k == 0)]
            kinds.append(len({int(self.private[slot, k]) for k in composed}) <= 1)
        return all(kinds) and bool(self.private.any())

    def placement(self, num_ids: int, width: int, float_bytes: int, parts_taken: int, most_slots: int) -> Placement:
        """Where areas lie for at most ``num_ids`` ids of each slot.

        Args:
            num_ids: at most as many of each slot.
            width: W.
            float_bytes: of a number of the sums.
            parts_taken: of ``Areas``.
            most_slots: slots of a unit, unless more of them share rows; 0 joins all in their order.
        """
        num_ids = 1 << max(num_ids - 1, 0).bit_length()  # so that batches of similar sizes share a placement
        key = (num_ids, width, float_bytes, parts_taken, most_slots)
        if key not in self._placements:
            if len(self._placements) >= _MOST_PLACEMENTS:
                self._placements.clear()
            self._placements[key] = self._place(*key)
        return self._placements[key]

    def _place(self, num_ids: int, width: int, float_bytes: int, parts_taken: int, most_slots: int) -> Placement:
        slots = range(self.num_slots)
        groups = [[*slots]] if most_slots == 0 else list(self.groups.values())
        if parts_taken == PRIVATE_PARTS:
            groups = [[slot] for slot in slots]
        elif parts_taken == SHARED_PARTS:
            groups = [group for group in groups if len(group) > 1]
        offsets, order = [0] * self.num_slots, [slot for group in groups for slot in group]
        order += sorted(set(slots) - set(order))  # of no unit
        units: list[Unit] = []
        for group in groups:
            sizes = [self._area_bytes(slot, num_ids, width, float_bytes, parts_taken) for slot in group]
            joins = bool(units) and units[-1].num_slots + len(group) <= most_slots
            joins = joins and units[-1].num_bytes + sum(sizes) <= CACHED_SUMS
            before = units.pop() if joins else Unit(sum(unit.num_slots for unit in units), 0, 0)
            end = before.num_bytes
            for slot, size in zip(group, sizes, strict=True):
                offsets[slot] = end
                end += size
            units.append(Unit(before.first, before.num_slots + len(group), end))
        return Placement(tuple(units), torch.tensor(order, device="cpu"), torch.tensor(offsets, device="cpu"))

    def _area_bytes(self, slot: int, num_ids: int, width: int, float_bytes: int, parts_taken: int) -> int:
        parts = zip(self.readers[slot], self.num_rows[slot], self.private[slot].tolist(), strict=True)
        capacities = [
            min(readers * num_ids, num_rows + 1)
            if parts_taken == ALL_PARTS or private == (parts_taken == PRIVATE_PARTS)
            else 0
            for readers, num_rows, private in parts
        ]
        return area_bytes(capacities, width, float_bytes)


_sharing = PerTensor()  # of ``slots``


def sharing_of(layout: Layout) -> Sharing:
    """Which slots share rows."""
    return _sharing.get(layout.slots) or _sharing.set(layout.slots, Sharing(layout))

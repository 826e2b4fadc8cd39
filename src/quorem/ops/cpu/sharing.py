"""Which slots sum their gradients together, since they share rows, and where their areas lie (see ``gradients``)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, GROUP, OWN, PITCH, SIZE, UNUSED, Layout
from ..per_tensor import PerTensor
from .gradients import area_bytes

_KEPT = 16  # placements of one layout, for as many sizes of batches


class Unit(NamedTuple):
    """Slots whose gradients are summed together."""

    first: int  # their first slot, or its position in ``Sharing.order``
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
        self.owners = torch.arange(self.num_slots * self.num_partitions, device="cpu").view(self.num_slots, -1)
        self.readers = [[0] * self.num_partitions for _ in range(self.num_slots)]  # slots that add to each part
        self.num_rows = (layout.parts[..., SIZE] * layout.parts[..., PITCH]).tolist()
        first: dict[tuple[int, ...], int] = {}
        for slot, parts in enumerate(layout.parts[..., [BASE, SIZE, PITCH]].tolist()):
            for k, part in enumerate(parts):
                if part[0] != UNUSED:
                    owner = first.setdefault((groups[slot], *part), slot * self.num_partitions + k)
                    self.owners[slot, k] = owner
                    self.readers[owner // self.num_partitions][owner % self.num_partitions] += 1
        private = [[int(count == 1) for count in counts] for counts in self.readers]  # of owners; others have none
        self.private = torch.tensor(private, device="cpu")
        self.splits = self._splits(layout)
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

    def placement(
        self, num_ids: int, width: int, float_bytes: int, most_bytes: int, shared_only: bool = False
    ) -> Placement:
        """Where areas lie for at most ``num_ids`` ids of each slot.

        Args:
            num_ids: at most as many of each slot.
            width: W.
            float_bytes: of a number of the sums.
            most_bytes: groups are joined into units up to that size; 0 keeps them apart, -1 joins all in their order.
            shared_only: leave out the parts that no other slot reads.
        """
        num_ids = 1 << max(num_ids - 1, 0).bit_length()  # so that batches of similar sizes share a placement
        key = (num_ids, width, float_bytes, most_bytes, shared_only)
        if key not in self._placements:
            if len(self._placements) >= _KEPT:
                self._placements.clear()
            self._placements[key] = self._place(*key)
        return self._placements[key]

    def _place(self, num_ids: int, width: int, float_bytes: int, most_bytes: int, shared_only: bool) -> Placement:
        groups = [list(range(self.num_slots))] if most_bytes < 0 else list(self.groups.values())
        if shared_only:
            groups = [group for group in groups if len(group) > 1]
        offsets, order = [0] * self.num_slots, [slot for group in groups for slot in group]
        order += sorted(set(range(self.num_slots)) - set(order))  # of no unit
        units: list[Unit] = []
        for group in groups:
            sizes = []
            for slot in group:
                rows = zip(self.readers[slot], self.num_rows[slot], self.private[slot].tolist(), strict=True)
                capacities = [
                    0 if shared_only and private else min(readers * num_ids, num_rows + 1)
                    for readers, num_rows, private in rows
                ]
                sizes.append(area_bytes(capacities, width, float_bytes))
            joined = bool(units) and most_bytes > 0 and units[-1].num_bytes + sum(sizes) <= most_bytes
            before = units.pop() if joined else Unit(sum(unit.num_slots for unit in units), 0, 0)
            end = before.num_bytes
            for slot, size in zip(group, sizes, strict=True):
                offsets[slot] = end
                end += size
            units.append(Unit(before.first, before.num_slots + len(group), end))
        return Placement(tuple(units), torch.tensor(order, device="cpu"), torch.tensor(offsets, device="cpu"))

    def is_even(self, num_units: int) -> bool:
        """Whether groups make at least that many units of similar size."""
        return max(map(len, self.groups.values())) * num_units <= self.num_slots


_sharing = PerTensor()  # of ``slots``
_NONE = "no rows are shared"


def sharing_of(layout: Layout) -> Sharing | None:
    """Which slots share rows; None if no two do."""
    known = _sharing.get(layout.slots)
    if known is None:
        groups = layout.slots[:, GROUP]
        shared = bool((groups != torch.arange(len(groups), device="cpu")).any())
        known = _sharing.set(layout.slots, Sharing(layout) if shared else _NONE)
    return None if known is _NONE else known

"""Which slots sum their gradients together, since they share rows, and where their areas lie (see ``areas``)."""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, GROUP, PITCH, SIZE, UNUSED, Layout
from ..per_tensor import PerTensor
from .areas import area_bytes

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
    """Which slots of a layout share rows: those of one group, part by part where the parts start at the same row.

    Slots that are columns of one table are in one group too: row-wise rules look at whole rows of tables.
    """

    def __init__(self, layout: Layout) -> None:
        self.num_slots, self.num_partitions, _ = layout.parts.shape
        parts: list[list[list[int]]] = layout.parts[..., [BASE, SIZE, PITCH]].tolist()
        leaders: list[int] = []  # the first slot of each slot's group
        first: dict[tuple[int, ...], int] = {}
        self.owners = torch.arange(self.num_slots * self.num_partitions, device="cpu").view(self.num_slots, -1)
        self.readers = [[0] * self.num_partitions for _ in range(self.num_slots)]  # slots that add to each part
        self.num_rows = [[size * pitch for _, size, pitch in slot] for slot in parts]
        self.pitches = layout.parts[..., PITCH].long().contiguous()
        for slot, group in enumerate(layout.slots[:, GROUP].tolist()):
            base, _, pitch = parts[slot][0]
            continues = slot > 0 and pitch > 1 and base == parts[slot - 1][0][0] + 1
            leaders.append(leaders[slot - 1] if continues else leaders[group] if group < slot else slot)
            for k, part in enumerate(parts[slot]):
                if part[0] != UNUSED:
                    owner = first.setdefault((group, *part), slot * self.num_partitions + k)
                    self.owners[slot, k] = owner
                    self.readers[owner // self.num_partitions][owner % self.num_partitions] += 1
        self.groups = [[s for s in range(self.num_slots) if leaders[s] == leader] for leader in sorted({*leaders})]
        self.largest_group = max(map(len, self.groups))
        self._placements = lru_cache(_MOST_PLACEMENTS)(self._place)

    def placement(self, num_ids: int, width: int, float_bytes: int, most_slots: int) -> Placement:
        """Where areas lie for at most ``num_ids`` ids of each slot.

        Args:
            num_ids: at most as many of each slot.
            width: W.
            float_bytes: of a number of the sums.
            most_slots: slots of a unit, unless more of them are in one group.
        """
        num_ids = 1 << max(num_ids - 1, 0).bit_length()  # so that batches of similar sizes share a placement
        return self._placements(num_ids, width, float_bytes, most_slots)

    def _place(self, num_ids: int, width: int, float_bytes: int, most_slots: int) -> Placement:
        offsets, units = [0] * self.num_slots, [Unit(0, 0, 0)]
        for group in self.groups:
            capacities = [
                [min(n * num_ids, rows + 1) for n, rows in zip(self.readers[slot], self.num_rows[slot], strict=True)]
                for slot in group
            ]
            sizes = [area_bytes(slot, width, float_bytes) for slot in capacities]
            first, num_slots, num_bytes = units[-1]
            if num_slots and (num_slots + len(group) > most_slots or num_bytes + sum(sizes) > CACHED_SUMS):
                units.append(Unit(first + num_slots, 0, 0))
                first, num_slots, num_bytes = units[-1]
            starts = [*accumulate(sizes, initial=num_bytes)]
            for slot, start in zip(group, starts, strict=False):
                offsets[slot] = start
            units[-1] = Unit(first, num_slots + len(group), starts[-1])
        order = [slot for group in self.groups for slot in group]
        return Placement(tuple(units), torch.tensor(order, device="cpu"), torch.tensor(offsets, device="cpu"))


_sharing = PerTensor()  # of ``slots``


def sharing_of(layout: Layout) -> Sharing:
    """Which slots share rows."""
    return _sharing.get(layout.slots) or _sharing.set(layout.slots, Sharing(layout))

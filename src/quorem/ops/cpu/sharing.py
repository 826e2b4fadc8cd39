"""Which slots sum their gradients together, since they share rows, and where their places lie (see ``sums``)."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, FEATURE, GROUP, PITCH, SIZE, UNUSED, Layout
from ..per_tensor import PerTensor
from .sums import place_bytes

CACHED_SUMS = 1 << 20  # bytes of summed gradients at a time, which are still in a core's cache when they are used
_MOST_PLACEMENTS = 16  # of one layout, for as many sizes of batches


class Work(NamedTuple):
    """Slots whose gradients are summed together."""

    first_slot: int  # the position of their first slot in ``Sharing.order``
    num_slots: int
    first_place: int
    num_places: int
    num_bytes: int  # of their places


class Sharing:
    """Which slots of a layout share rows: those of one group, part by part where the parts start at the same row."""

    def __init__(self, layout: Layout) -> None:
        self.num_slots, num_partitions, _ = layout.parts.shape
        groups: list[int] = layout.slots[:, GROUP].tolist()
        leaders: list[int] = []  # the first slot of each slot's group
        for slot, group in enumerate(groups):
            leaders.append(leaders[group] if group < slot else slot)
        self.groups: list[list[int]] = []  # of slots that are columns of the same rows only the first
        self._units: list[int] = []  # the number of these
        follows, members = _follows(layout), list[int]()
        for leader in sorted({*leaders}):
            before, members = members, [s for s in range(self.num_slots) if leaders[s] == leader]
            if members == [s + 1 for s in before] and follows[members].all():
                self._units[-1] += 1
            else:
                self.groups.append(members)
                self._units.append(1)
        self.order = torch.tensor([slot for group in self.groups for slot in group], device="cpu")
        self.place_of = torch.zeros(self.num_slots, num_partitions, dtype=torch.int64, device="cpu")
        self._places: list[list[tuple[int, int, int, int]]] = []  # of each group: base, size, pitch, number of readers
        self._placements = lru_cache(_MOST_PLACEMENTS)(self._place)
        parts, first = layout.parts[..., [BASE, SIZE, PITCH]].tolist(), 0
        for members in self.groups:
            places: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
            for slot in members:
                for k, (base, size, pitch) in enumerate(parts[slot]):
                    if base != UNUSED:
                        places.setdefault((groups[slot], base, size, pitch), []).append((slot, k))
            for number, readers in enumerate(places.values(), start=first):
                self.place_of[tuple(zip(*readers, strict=True))] = number
            self._places.append([(*key[1:], len(readers)) for key, readers in places.items()])
            first += len(places)
        both = zip(self._units, self._places, strict=True)
        # Whether a row of a table, which may be several rows of ``stored``, is summed as one.
        self.sums_whole_rows = all(pitch == units for units, places in both for _, _, pitch, _ in places)

    def placement(self, num_ids: int, width: int, float_bytes: int) -> tuple[list[Work], Tensor]:
        """Units of work of at most ``num_ids`` of each slot, and where places lie, int64 ``[P, PLACE_COLUMNS]``."""
        num_ids = 1 << max(num_ids - 1, 0).bit_length()  # so that batches of similar sizes share a placement
        return self._placements(num_ids, width, float_bytes)

    def _place(self, num_ids: int, width: int, float_bytes: int) -> tuple[list[Work], Tensor]:
        works, table = [Work(0, 0, 0, 0, 0)], list[tuple[int, ...]]()
        for slots, units, places in zip(self.groups, self._units, self._places, strict=True):
            limits = [min(readers * num_ids, rows) for _, rows, _, readers in places]
            sizes = [place_bytes(limit, units * width, float_bytes) for limit in limits]
            first_slot, num_slots, first_place, _, start = works[-1]
            if num_slots and start + sum(end for *_, end in sizes) > CACHED_SUMS:
                first_slot, num_slots, first_place, start = first_slot + num_slots, 0, len(table), 0
                works.append(Work(first_slot, 0, first_place, 0, 0))
            for (base, rows, pitch, _), (entries, hashes, sums, end) in zip(places, sizes, strict=True):
                table.append((base, rows * pitch, pitch, units, entries, start, start + hashes, start + sums))
                start += end
            works[-1] = Work(first_slot, num_slots + len(slots), first_place, len(table) - first_place, start)
        return works, torch.tensor(table, device="cpu")


def _follows(layout: Layout) -> Tensor:
    """Which slots ``[S]`` are the columns after those of the slot before, of the same rows."""
    change, used = layout.parts.diff(dim=0, prepend=layout.parts[:1]), layout.parts[..., BASE] != UNUSED
    change[..., BASE] -= used.to(change.dtype)
    same_rows = ((change == 0).all(2) & (~used | (layout.parts[..., PITCH] > 1))).all(1)
    same_rows[1:] &= layout.slots[1:, FEATURE] == layout.slots[:-1, FEATURE]
    return same_rows


_sharing = PerTensor()  # of ``slots``


def sharing_of(layout: Layout) -> Sharing:
    """Which slots share rows."""
    return _sharing.get(layout.slots) or _sharing.set(layout.slots, Sharing(layout))

"""Where the gradients of a batch are summed: in places of one buffer.

A table with at most as many rows as the batch has ids gets a place for each row, the *direct* places of a pair of a
slot and a partition; these come first. A row of a larger table is *claimed* by the first id that reads it, and gets the
next place that is free. A large batch may be processed in several *ranges* of slots, one after another, which share the
buffer and the claims; slots that share rows are in one range.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, FEATURE, GROUP, OWN, PITCH, SIZE, UNUSED
from ..per_tensor import PerTensor
from ..rows import accumulator
from .host import HostLayout
from .launch import cdiv, power_of_2
from .rows import row_dtype

UNCLAIMED = 2**31 - 1
CLAIMING = UNCLAIMED - 1  # the row is claimed, but its place is not known yet
MOST_RANGES = 4
MOST_AT_ONCE = 2**20  # claimed places that are used at once; a program uses one block of them after another
EXTRA = 0.25  # limit for a step's extra memory, returned vectors included, as a share of the tables' memory
PLACE_COLUMNS = 6  # columns of ``Places.table``


@dataclass
class SlotRange:
    """Slots whose gradients are summed together, as a range of pairs ``s * K + k``."""

    first_pair: int
    num_pairs: int
    claimers: Tensor  # int64: the pairs whose rows are claimed
    num_claimers: int
    num_direct: int  # direct places
    num_places: int  # with those that may be claimed
    first_row: int  # the first row of ``stored`` that may be claimed
    num_rows: int  # number of rows from there to the last that may be claimed
    longest: int  # the most direct places of a pair, without copies

    def programs(self, block: int) -> tuple[int, int]:
        """How many programs use the sums of direct and of claimed places, ``block`` places at a time."""
        claimed = cdiv(self.num_places - self.num_direct, block)
        return self.num_pairs * cdiv(self.longest, block), min(claimed, MOST_AT_ONCE // block)


@dataclass
class Places:
    """The places of a batch.

    The columns of ``table`` are, for each pair: its first direct place; its number of direct places; the number of
    copies of them; how many the pair itself handles, 0 if an earlier pair has the same; 0, or 1 + the range's
    ``first_row`` if its rows are claimed; and which of the ``pitch`` rows of ``stored`` that make up a table's row the
    slot has.
    """

    table: Tensor  # int64 [S * K, PLACE_COLUMNS]
    ranges: list[SlotRange]

    def extra_bytes(self, place_bytes: int, row_bytes: int) -> int:
        """Bytes of the sums, ``place_bytes`` each, of the rows of claimed places, and of the claims."""
        claimed = max(r.num_places - r.num_direct for r in self.ranges)
        sums = max(r.num_places for r in self.ranges) * place_bytes
        return sums + row_bytes * claimed + 4 * max(r.num_rows for r in self.ranges)


class Claims(NamedTuple):
    """Which rows are claimed; every use restores both tensors."""

    place: Tensor  # int32 [rows]: the place of each row, UNCLAIMED if it is not claimed
    counts: Tensor  # int32 [2]: how many are claimed now; and how many were when the sums were taken


_claims = PerTensor()  # stored -> list of Claims


def places_of(stored: Tensor, reads: int, jagged: bool, host: HostLayout) -> Places:
    """The places for a batch of up to ``reads`` ids: of each feature, or of all features together if jagged.

    It has as few ranges as keep the extra memory of a step below EXTRA; one range if MOST_RANGES are not enough. The
    result is cached, so that only the first step of a layout and batch size waits for the GPU.
    """
    key = (stored.shape, stored.dtype, reads, jagged)
    places: Places | None = host.places.get(key)
    if places is None:
        place_bytes = stored.shape[1] * accumulator(stored).itemsize
        returned = reads * len(host.slots) * stored.shape[1] * stored.itemsize
        left = EXTRA * stored.numel() * stored.itemsize - returned
        places, row_bytes = places_in_ranges(host, reads, jagged, 1, place_bytes), row_dtype(stored).itemsize
        if not jagged and places.extra_bytes(place_bytes, row_bytes) > left:
            tried = (places_in_ranges(host, reads, jagged, n, place_bytes) for n in range(2, MOST_RANGES + 1))
            places = next((p for p in tried if p.extra_bytes(place_bytes, row_bytes) <= left), places)
        host.places[key] = places
    return places


def places_in_ranges(host: HostLayout, reads: int, jagged: bool, most_ranges: int, place_bytes: int) -> Places:
    """The places of a batch in up to ``most_ranges`` ranges that need about the same memory.

    Raises:
        ValueError: if the batch has more places than a claim can store.
    """
    slots, parts, device = host.slots, host.parts, host.table.device
    k = parts.shape[1]
    rows = torch.where(parts[..., BASE] >= 0, parts[..., SIZE], 0).flatten()
    claimed = rows > reads
    count = torch.where(claimed, 0, rows)
    copies = torch.where(rows > 4096, 1, torch.where(rows > 256, 4, 32)).clamp(max=max(1, reads // 256))
    pair = torch.arange(len(rows), device="cpu")
    same = same_places(parts, claimed)
    used = torch.where(same == pair, count, 0)
    length, claims = used * copies, num_claims(slots, claimed.view(len(slots), k))
    unit = units(slots, parts)
    bounds = [0, len(rows)]
    if not jagged:
        needed = (length * place_bytes + torch.where(claimed, 4 * rows, 0)).view(len(slots), k).sum(1)
        needed += claims * reads * place_bytes
        later = slots[:, GROUP].flip(0).cummin(0).values.flip(0)  # the lowest group of this and all later slots
        alone = later >= torch.arange(len(slots), device="cpu")
        starts = ((unit == 0).all(1) & alone).nonzero().flatten()  # all slots of a table's row are in one range
        group = torch.bucketize(torch.arange(len(slots), device="cpu"), starts, right=True) - 1
        cuts = boundaries(needed.new_zeros(len(starts)).index_add(0, group, needed), most_ranges)
        bounds = [k * (int(starts[cut]) if cut < len(starts) else len(slots)) for cut in cuts]
    else:  # each id belongs to one feature
        claims = claims.new_zeros(len(host.spans)).index_add(0, slots[:, FEATURE], claims).max().expand(1)
    first, marks, ranges = torch.zeros_like(rows), torch.zeros_like(rows), []
    base, pitch = parts[..., BASE].flatten(), parts[..., PITCH].flatten()
    last = base + (rows - 1) * pitch
    for begin, end in pairwise(bounds):
        first[begin:end] = length[begin:end].cumsum(0) - length[begin:end]
        claimers = begin + claimed[begin:end].nonzero().flatten()
        first_row = int(base[claimers].min()) if len(claimers) else 0
        num_rows = int(last[claimers].max()) + 1 - first_row if len(claimers) else 0
        num_direct = int(length[begin:end].sum())
        num_claimed = min(int(claims[begin // k : -(-end // k)].sum()) * reads, num_rows)
        sizes = (num_direct, num_direct + num_claimed, first_row, num_rows, int(used[begin:end].max()))
        ranges.append(SlotRange(begin, end - begin, claimers.to(device), len(claimers), *sizes))
        marks[claimers] = 1 + first_row
    if max(r.num_places for r in ranges) >= CLAIMING:
        raise ValueError(f"a batch of {reads} ids must have fewer than {CLAIMING} places for the sums of its rows")
    table = torch.stack([first[same], count, copies, used, marks, unit.flatten()], 1)
    return Places(table.to(device), ranges)


def num_claims(slots: Tensor, claimed: Tensor) -> Tensor:
    """How many rows an id claims at most in each slot, ``[S]``: the one of its own, or the others."""
    others = claimed.sum(1) - claimed[:, 0].long()
    own = slots[:, OWN] > 0
    return torch.where(own, torch.maximum(claimed[:, 0].long(), others), others + claimed[:, 0])


def same_places(parts: Tensor, claimed: Tensor) -> Tensor:
    """For each pair, the first pair ``[S * K]`` with the same rows, whose direct places it uses; itself if claimed."""
    bases = parts[..., BASE].flatten()
    pair = torch.arange(len(bases), device="cpu")
    values, which = bases.unique(return_inverse=True)
    same = torch.full_like(values, len(bases)).scatter_reduce(0, which, pair, "amin")[which]
    return torch.where(claimed | (bases == UNUSED), pair, same)


def units(slots: Tensor, parts: Tensor) -> Tensor:
    """Which of the ``pitch`` rows of ``stored`` that make up a table's row each slot has, ``[S, K]``."""
    unit = torch.zeros_like(parts[..., BASE])
    for s in range(1, len(slots)):
        before, base = parts[s - 1, :, BASE], parts[s, :, BASE]
        follows = (before >= 0) & (base == before + 1) & (slots[s, FEATURE] == slots[s - 1, FEATURE])
        follows &= unit[s - 1] + 1 < parts[s, :, PITCH]
        unit[s] = torch.where(follows, unit[s - 1] + 1, 0)
    return unit


def boundaries(lengths: Tensor, parts: int) -> list[int]:
    """Where to cut ``lengths`` into at most ``parts`` runs of about equal sums; its two ends are included.

    >>> boundaries(torch.tensor([4, 1, 1, 2, 4]), 2), boundaries(torch.tensor([0, 9, 0]), 3)
    ([0, 3, 5], [0, 2, 3])
    """
    ends = lengths.cumsum(0)
    wanted = torch.arange(1, parts, device=lengths.device) * int(ends[-1]) / parts
    cuts = torch.searchsorted(ends, wanted.ceil().long()) + 1
    return sorted({0, *cuts.clamp(max=len(lengths)).tolist(), len(lengths)})


def rounded_up(reads: int) -> int:
    """``reads`` rounded up to one of eight sizes for each power of two, so that jagged batches can share places.

    >>> [rounded_up(n) for n in (5, 16, 17, 1000, 1025)]
    [5, 16, 18, 1024, 1152]
    """
    step = max(1, power_of_2(reads) // 16)
    return cdiv(reads, step) * step


def claims_of(stored: Tensor, rows: int) -> Claims:
    """Claims of ``rows`` rows that are kept between batches."""
    buffers: list[Claims] | None = _claims.get(stored)
    if buffers is None:
        buffers = _claims.set(stored, [])
    if buffers and buffers[-1].place.device != stored.device:
        buffers.clear()
    if not buffers or buffers[-1].place.shape[0] < rows:  # old ones stay: a CUDA graph may use their addresses
        place = torch.full((max(rows, 1),), UNCLAIMED, dtype=torch.int32, device=stored.device)
        buffers.append(Claims(place, place.new_zeros(2)))
    return buffers[-1]

"""Where the gradients of a batch are summed: each pair of a slot and a partition has a run of places in one buffer.

A table with at most as many rows as the batch has ids gets a place for each row. In a larger table the first id that
reads a row claims it, and the row uses the place of that id. An id that has a row of its own reads no other row, so the
first two pairs of a slot use the same places if both are claimed. A large batch may be processed in several *ranges* of
slots, one after another, which share the buffer and the claims; slots that share rows are in one range.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..layout import BASE, FEATURE, GROUP, OWN, PITCH, SIZE, UNUSED
from ..per_tensor import PerTensor
from ..rows import accumulator
from .host import HostLayout
from .launch import cdiv, power_of_2

UNCLAIMED = 2**31 - 1
MOST_RANGES = 4
EXTRA = 0.25  # limit for a step's extra memory, returned vectors included, as a share of the tables' memory
PLACE_COLUMNS = 7  # columns of ``Places.table``


@dataclass
class SlotRange:
    """Slots whose gradients are summed together, as a range of pairs ``s * K + k``."""

    first_pair: int
    num_pairs: int
    claimers: Tensor  # int64: the pairs whose rows are claimed
    num_claimers: int
    num_places: int
    num_direct: int  # places of tables with a place for each row, which come first
    num_noted: int  # entries in which claiming pairs note the rows of their ids
    first_row: int  # the first row of ``stored`` that may be claimed
    num_rows: int  # number of rows from there to the last that may be claimed


@dataclass
class Places:
    """The places of a batch.

    The columns of ``table`` are, for each pair: its first place; its number of places; the number of copies of them; 0,
    or 1 + the range's ``first_row`` if its rows are claimed; which of the ``pitch`` rows of ``stored`` that make up a
    table's row the slot has; how many places the pair itself handles, 0 if an earlier pair has the same places; and
    where the rows of its ids are noted.
    """

    table: Tensor  # int64 [S * K, PLACE_COLUMNS]
    ranges: list[SlotRange]
    longest: int  # the most places of a pair, without copies

    def extra_bytes(self, place_bytes: int) -> int:
        """Bytes of the sums, ``place_bytes`` each, and of the claims."""
        return max(r.num_places for r in self.ranges) * place_bytes + 4 * max(r.num_rows for r in self.ranges)


_claims = PerTensor()  # stored -> buffers int32 [rows]: the id that claimed each row


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
        places = divided(host, reads, jagged, 1, place_bytes)
        if not jagged and places.extra_bytes(place_bytes) > left:
            tried = (divided(host, reads, jagged, number, place_bytes) for number in range(2, MOST_RANGES + 1))
            places = next((p for p in tried if p.extra_bytes(place_bytes) <= left), places)
        host.places[key] = places
    return places


def divided(host: HostLayout, reads: int, jagged: bool, number: int, place_bytes: int) -> Places:
    """The places of a batch in up to ``number`` ranges that need about the same memory.

    Raises:
        ValueError: if slots share rows and the batch has more places than a claim can store.
    """
    slots, parts, spans, device = host.slots, host.parts, host.spans, host.table.device
    k = parts.shape[1]
    rows = torch.where(parts[..., BASE] >= 0, parts[..., SIZE], 0).flatten()
    claimed = rows > reads
    count = torch.where(claimed, reads, rows)
    copies = torch.where(claimed | (rows > 4096), 1, torch.where(rows > 256, 4, 32))
    copies = copies.clamp(max=max(1, reads // 256))
    pair = torch.arange(len(rows), device="cpu")
    same = same_places(slots, parts, claimed)
    length = torch.where(same == pair, count * copies, 0)
    unit = units(slots, parts)
    bounds = [0, len(rows)]
    if not jagged:
        needed = (length * place_bytes + torch.where(claimed, 4 * rows, 0)).view(len(slots), k).sum(1)
        later = slots[:, GROUP].flip(0).cummin(0).values.flip(0)  # the lowest group of this and all later slots
        alone = later >= torch.arange(len(slots), device="cpu")
        starts = ((unit == 0).all(1) & alone).nonzero().flatten()  # all slots of a table's row are in one range
        group = torch.bucketize(torch.arange(len(slots), device="cpu"), starts, right=True) - 1
        cuts = boundaries(needed.new_zeros(len(starts)).index_add(0, group, needed), number)
        bounds = [k * (int(starts[cut]) if cut < len(starts) else len(slots)) for cut in cuts]
    first, direct = torch.zeros_like(rows), torch.where(claimed, 0, length)
    noted = torch.zeros_like(rows)
    for begin, end in pairwise(bounds):
        noted[begin:end] = reads * (claimed[begin:end].cumsum(0) - 1)
        few, many = direct[begin:end], (length - direct)[begin:end]
        first[begin:end] = torch.where(claimed[begin:end], few.sum() + many.cumsum(0) - many, few.cumsum(0) - few)
    if jagged:  # each id belongs to one feature, so all features use the same claimed places
        nth_slot = torch.arange(len(slots), device="cpu") - spans[slots[:, FEATURE], 0]
        nth = (nth_slot[:, None] * k + torch.arange(k, device="cpu")).flatten()
        first, noted = torch.where(claimed, direct.sum() + nth * reads, first), nth * reads
    first = first[same]
    base, pitch = parts[..., BASE].flatten(), parts[..., PITCH].flatten()
    last, ranges, marks = base + (rows - 1) * pitch, [], torch.zeros_like(rows)
    for begin, end in pairwise(bounds):
        claimers = begin + claimed[begin:end].nonzero().flatten()
        first_row = int(base[claimers].min()) if len(claimers) else 0
        num_rows = int(last[claimers].max()) + 1 - first_row if len(claimers) else 0
        num_places = int((first + count * copies)[begin:end].max())
        num_noted = int(noted[claimers].max()) + reads if len(claimers) else 0
        sizes = (len(claimers), num_places, int(direct[begin:end].sum()), num_noted, first_row, num_rows)
        ranges.append(SlotRange(begin, end - begin, claimers.to(device), *sizes))
        marks[claimers] = 1 + first_row
    if host.shared and max(r.num_places for r in ranges) >= UNCLAIMED:
        raise ValueError(f"a batch of {reads} ids must have fewer than {UNCLAIMED} places where tables share rows")
    used = torch.where((same == pair) | claimed, count, 0)
    table = torch.stack([first, count, copies, marks, unit.flatten(), used, noted], 1)
    return Places(table.to(device), ranges, int(used.max()))


def same_places(slots: Tensor, parts: Tensor, claimed: Tensor) -> Tensor:
    """For each pair, the pair ``[S * K]`` whose places it uses: itself, or an earlier one.

    Where there is a place for each row, it is the first pair with the same rows. Where rows are claimed, the second
    pair of a slot uses the places of the first, if that has the rows that ids have of their own.
    """
    k = parts.shape[1]
    bases = parts[..., BASE].flatten()
    pair = torch.arange(len(bases), device="cpu")
    values, which = bases.unique(return_inverse=True)
    same = torch.full_like(values, len(bases)).scatter_reduce(0, which, pair, "amin")[which]
    same = torch.where(claimed | (bases == UNUSED), pair, same)
    after_own = (pair % k == 1) & (slots[:, OWN] > 0).repeat_interleave(k) & claimed
    return torch.where(after_own & claimed.roll(1), pair - 1, same)


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


def claims_of(stored: Tensor, rows: int) -> Tensor:
    """A scratch buffer for claims of ``rows`` rows; every use restores it to UNCLAIMED."""
    buffers: list[Tensor] | None = _claims.get(stored)
    if buffers is None:
        buffers = _claims.set(stored, [])
    if buffers and buffers[-1].device != stored.device:
        buffers.clear()
    if not buffers or buffers[-1].shape[0] < rows:  # old ones stay: a CUDA graph may use their address
        buffers.append(torch.full((max(rows, 1),), UNCLAIMED, dtype=torch.int32, device=stored.device))
    return buffers[-1]

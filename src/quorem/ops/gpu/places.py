"""Where the gradients of a batch are summed: a run of places in one buffer for each pair of a slot and a partition.

A table with at most as many rows as the batch has ids gets a place for each row. Of a larger one the first id that
reads a row claims it, and the place is that id's. A large batch may be done in several *passes*, some slots at a time,
which share the buffer and the claims.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import layout
from ..reference import accumulator
from .host import Host, PerTensor, on_host
from .launch import cdiv, power_of_2

UNCLAIMED = 2**31 - 1
MOST_PASSES = 4
EXTRA = 0.25  # of the tables: a step takes as many passes as keep it below, with the vectors that it returns


@dataclass
class Pass:
    """The pairs whose gradients are summed at a time."""

    first: int
    pairs: int
    claimers: Tensor  # int64: those whose rows are claimed
    num_claimers: int
    places: int
    origin: int  # the row that the first claim is of
    rows: int  # from there to the last that may be claimed


@dataclass
class Places:
    """The places of a batch."""

    table: Tensor  # int64 [S * K, 4]: first place, number of places, copies; 1 + origin if its rows are claimed, or 0
    passes: list[Pass]
    longest: int  # most places of a pair, copies aside

    def extra_bytes(self, place_bytes: int) -> int:
        """What the sums, of ``place_bytes`` each, and the claims take."""
        return max(now.places for now in self.passes) * place_bytes + 4 * max(now.rows for now in self.passes)


_claims = PerTensor()  # weight -> int32 [rows]: the ids that claimed some rows


def places_of(weight: Tensor, reads: int, jagged: bool, *integers: Tensor) -> Places:
    """The places for a batch of up to ``reads`` ids: of each feature, or of all together if jagged.

    In as few passes as keep the extra memory of a step below EXTRA; in one if MOST_PASSES do not. Cached, so that only
    the first step of a layout and batch size waits for the GPU.
    """
    host = on_host(*integers)
    key = (weight.shape, weight.dtype, reads, jagged)
    found: Places | None = host.places.get(key)
    if found is None:
        width, itemsize = weight.shape[1], accumulator(weight).itemsize
        returned = reads * len(host.slots) * width * weight.itemsize
        left = EXTRA * weight.numel() * weight.itemsize - returned
        one, *more = [1] if jagged else range(1, MOST_PASSES + 1)
        found = divided(host, reads, jagged, one, width * itemsize)
        if found.extra_bytes(width * itemsize) > left:
            tried = (divided(host, reads, jagged, number, width * itemsize) for number in more)
            found = next((places for places in tried if places.extra_bytes(width * itemsize) <= left), found)
        host.places[key] = found
    return found


def divided(host: Host, reads: int, jagged: bool, number: int, place_bytes: int) -> Places:
    """The places of a batch in up to ``number`` passes, which need about as much memory each."""
    slots, parts, spans, device = host.slots, host.parts, host.spans, host.table.device
    rows = torch.where(parts[..., layout.BASE] >= 0, parts[..., layout.SIZE], 0).flatten()
    claimed = rows > reads
    count = torch.where(claimed, reads, rows)
    copies = torch.where(claimed | (rows > 4096), 1, torch.where(rows > 256, 4, 32))
    copies = copies.clamp(max=max(1, reads // 256))
    length = count * copies
    first = length.cumsum(0) - length
    bounds = [0, len(rows)]
    if not jagged:
        needed = length * place_bytes + torch.where(claimed, 4 * rows, 0)
        bounds = boundaries(needed.view(len(slots), -1).sum(1), number)
        bounds = [slot * parts.shape[1] for slot in bounds]
        for begin in bounds[1:-1]:
            first[begin:] -= int(first[begin])
    else:  # an id is of one feature, so the claimed places of all features are the same ones
        alone = torch.where(claimed, 0, length)
        nth_slot = torch.arange(len(slots), device="cpu") - spans[slots[:, layout.FEATURE], 0]
        nth = (nth_slot[:, None] * parts.shape[1] + torch.arange(parts.shape[1], device="cpu")).flatten()
        first = torch.where(claimed, alone.sum() + nth * reads, alone.cumsum(0) - alone)
    base, pitch = (parts[..., column].flatten() for column in (layout.BASE, layout.PITCH))
    last, passes, marks = base + (rows - 1) * pitch, [], torch.zeros_like(rows)
    for begin, end in pairwise(bounds):
        claimers = begin + claimed[begin:end].nonzero().flatten()
        origin = int(base[claimers].min()) if len(claimers) else 0
        span = int(last[claimers].max()) + 1 - origin if len(claimers) else 0
        places = int((first + length)[begin:end].max())
        passes.append(Pass(begin, end - begin, claimers.to(device), len(claimers), places, origin, span))
        marks[claimers] = 1 + origin
    return Places(torch.stack([first, count, copies, marks], 1).to(device), passes, int(count.max()))


def boundaries(lengths: Tensor, parts: int) -> list[int]:
    """Where to cut ``lengths`` into runs of about equal sums, ``parts`` at most; first and last are its ends.

    >>> boundaries(torch.tensor([4, 1, 1, 2, 4]), 2), boundaries(torch.tensor([0, 9, 0]), 3)
    ([0, 3, 5], [0, 2, 3])
    """
    ends = lengths.cumsum(0)
    wanted = torch.arange(1, parts, device=lengths.device) * int(ends[-1]) / parts
    cuts = torch.searchsorted(ends, wanted.ceil().long()) + 1
    return sorted({0, *cuts.clamp(max=len(lengths)).tolist(), len(lengths)})


def bucket(reads: int) -> int:
    """At least ``reads``, of which there are eight for each power of two: jagged batches differ, and share places.

    >>> [bucket(n) for n in (5, 16, 17, 1000, 1025)]
    [5, 16, 18, 1024, 1152]
    """
    step = max(1, power_of_2(reads) // 16)
    return cdiv(reads, step) * step


def claims_of(weight: Tensor, rows: int) -> Tensor:
    """Scratch by which ids claim ``rows`` rows; every use leaves it as it found it."""
    found: list[Tensor] | None = _claims.get(weight)
    if found is None:
        found = _claims.set(weight, [])
    if found and found[-1].device != weight.device:
        found.clear()
    if not found or found[-1].shape[0] < rows:  # smaller ones are kept: a CUDA graph may hold their address
        found.append(torch.full((max(rows, 1),), UNCLAIMED, dtype=torch.int32, device=weight.device))
    return found[-1]

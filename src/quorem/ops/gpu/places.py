"""Where the gradients of a batch are summed: in places of one buffer.

A table with at most as many rows as the batch has ids gets a place for each row, the *direct* places of a pair of a
slot and a partition; these come first. A row of a larger table is *claimed* by the first id that reads it, and gets the
next place that is free.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BASE, FEATURE, OWN, PITCH, SIZE, UNUSED
from ..memory import PerTensor
from .host import HostLayout
from .launch import cdiv, power_of_2

UNCLAIMED = 2**31 - 1
CLAIMING = UNCLAIMED - 1  # the row is claimed, but its place is not known yet
MOST_AT_ONCE = 2**20  # claimed places that are used at once; a program uses one block of them after another
PLACE_COLUMNS = 5  # columns of ``Places.table``


@dataclass
class Places:
    """The places of a batch.

    The columns of ``table`` are, for each pair ``s * K + k``: its first direct place; its number of direct places; the
    number of copies of them; how many the pair itself handles, 0 if an earlier pair has the same; and whether its rows
    are claimed.
    """

    table: Tensor  # int64 [S * K, PLACE_COLUMNS]
    claimers: Tensor  # int64: the pairs whose rows are claimed
    num_direct: int  # direct places
    num_places: int  # with those that may be claimed
    first_row: int  # the first row of ``stored`` that may be claimed
    num_rows: int  # number of rows from there to the last that may be claimed
    longest: int  # the most direct places of a pair, without copies

    def runs(self, block: int) -> "Runs":
        """How programs share the places, ``block`` at a time."""
        num_pairs, claimed = len(self.table), cdiv(self.num_places - self.num_direct, block)
        return Runs(num_pairs, num_pairs * cdiv(self.longest, block), min(claimed, MOST_AT_ONCE // block))


class Runs(NamedTuple):
    """How many programs use the sums of a batch, as kernels take it."""

    num_pairs: int  # S * K
    direct: int  # programs for direct places
    claiming: int  # programs for claimed places


class Claims(NamedTuple):
    """Which rows are claimed; every use restores both tensors."""

    place: Tensor  # int32 [rows]: the place of each row, UNCLAIMED if it is not claimed
    counts: Tensor  # int32 [2]: how many are claimed now; and how many were when the sums were taken


_claims = PerTensor()  # stored -> list of Claims


def places_of(reads: int, jagged: bool, host: HostLayout) -> Places:
    """The places for a batch of up to ``reads`` ids: of each feature, or of all features together if jagged.

    The result is cached, so that only the first step of a layout and batch size waits for the GPU.

    Raises:
        ValueError: if the batch has more places than a claim can store.
    """
    places: Places | None = host.places.get((reads, jagged))
    if places is not None:
        return places
    slots, parts, device = host.slots, host.parts, host.on_device.table.device
    rows = torch.where(parts[..., BASE] >= 0, parts[..., SIZE], 0).flatten()
    claimed = rows > reads
    count = torch.where(claimed, 0, rows)
    copies = torch.where(rows > 4096, 1, torch.where(rows > 256, 4, 32)).clamp(max=max(1, reads // 256))
    base, pitch = parts[..., BASE].flatten(), parts[..., PITCH].flatten()
    pair = torch.arange(len(rows), device="cpu")
    values, which = base.unique(return_inverse=True)  # pairs with the same rows use the direct places of their first
    same = torch.full_like(values, len(base)).scatter_reduce(0, which, pair, "amin")[which]
    same = torch.where(claimed | (base == UNUSED), pair, same)
    used = torch.where(same == pair, count, 0)
    length = used * copies
    own, composed = (part.sum(1) for part in claimed.view(len(slots), -1).tensor_split([1], 1))
    # An id reads either a row of its own, the first part of a slot that has such rows, or the others.
    claims = torch.where(slots[:, OWN] > 0, torch.maximum(own, composed), own + composed)
    if jagged:  # each id belongs to one feature
        claims = claims.new_zeros(len(host.spans)).index_add(0, slots[:, FEATURE], claims).max()
    claimers = claimed.nonzero().flatten()
    first_row = num_rows = 0
    if len(claimers):
        first_row = int(base[claimers].min())
        num_rows = int((base + (rows - 1) * pitch)[claimers].max()) + 1 - first_row
    num_direct = int(length.sum())
    num_places = num_direct + min(int(claims.sum()) * reads, num_rows)
    if num_places >= CLAIMING:
        raise ValueError(f"a batch of {reads} ids must have fewer than {CLAIMING} places for the sums of its rows")
    table = torch.stack([(length.cumsum(0) - length)[same], count, copies, used, claimed.long()], 1).to(device)
    sizes = (num_direct, num_places, first_row, num_rows, int(used.max()))
    places = host.places[reads, jagged] = Places(table, claimers.to(device), *sizes)
    return places


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

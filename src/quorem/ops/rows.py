"""Which rows of ``stored`` an id reads: the truth, in plain PyTorch. ``layout`` explains the shapes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper.renumbering import mixing_rounds
from . import layout as column
from .codes import dequantize
from .layout import MULT, NO_RANKS, UNUSED, Layout
from .rounding import Rounding, random_bits, round_at_random


class IdBatch(NamedTuple):
    """The ids of an op: ``[B, F]``, or jagged ``[V]`` in bags.

    ``offsets`` ``[F * B + 1]`` runs over the bags of the first feature, then of the second, and so on.
    """

    ids: Tensor  # int32 or int64
    offsets: Tensor | None = None
    sample_weights: Tensor | None = None  # [V]: what the vectors of a bag are multiplied by
    mean: bool = False  # whether the vectors of a bag are averaged; else they are added


class Reads(NamedTuple):
    """The rows that N ids read, in S slots of up to K rows."""

    rows: Tensor  # [N, S, K]
    valid: Tensor  # [N, S]: the id is neither padding nor out of range
    used: Tensor  # [N, S, K]: the id reads a k-th row
    product: Tensor  # [N, S] or [S]: the slot multiplies its rows; else it adds them


class IdBags(NamedTuple):
    """The bags and slots of V jagged ids. P is the largest number of slots of a feature."""

    bag: Tensor  # [V]
    slot: Tensor  # [V, P]: the slots of the id's feature, then any


def lookup_reads(ids: Tensor, layout: Layout) -> Reads:
    """What ids ``[B, F]`` read."""
    return reads_of(ids[:, layout.slots[:, column.FEATURE]], layout.slots, layout.parts, layout)


def batch_reads(batch: IdBatch, layout: Layout) -> tuple[Reads, IdBags | None]:
    """What the ids of a batch read; and the bags and slots of jagged ids, which have S = P slots each."""
    ids, offsets = batch.ids, batch.offsets
    if offsets is None:
        return lookup_reads(ids, layout), None
    bag, feature = bag_and_feature(ids, offsets, layout.spans)
    inside = (torch.arange(len(ids), device=ids.device) < offsets[-1])[:, None]
    first, count = layout.spans[feature].unbind(1)
    steps = torch.arange(int(layout.spans[:, 1].max()), device=ids.device)
    slot = (first[:, None] + steps).clamp(max=len(layout.slots) - 1)
    reads = reads_of(ids[:, None], layout.slots[slot], layout.parts[slot], layout)
    return reads._replace(valid=reads.valid & inside & (steps < count[:, None])), IdBags(bag, slot)


def rows_read(reads: Reads) -> Tensor:
    """Row numbers ``[N, S, K]``, UNUSED where nothing is read."""
    return torch.where(reads.valid[..., None] & reads.used, reads.rows, UNUSED)


class LocatedIds(NamedTuple):
    """Where ids are in their tables: among the rows of ids' own, or among the composed ids; all ``[N, S]``."""

    valid: Tensor  # the id is neither padding nor out of range
    composed: Tensor  # the vector is composed; else it is a row of the id's own
    own_row: Tensor  # where it is not composed, the number of that row
    number: Tensor  # where it is, what the partitions divide: its number among the composed ids, mixed if in a pool


def reads_of(ids: Tensor, slots: Tensor, parts: Tensor, layout: Layout) -> Reads:
    """What ``ids`` ``[N, S]`` read; ``slots`` and ``parts`` are the same for all ids, or given for each id."""
    located = locate(ids, slots, layout.ranks)
    bucket = buckets_of(located.number, parts, layout.maps)
    # Where ids have rows of their own, these are the first part, and the others are for composed ids.
    first = (torch.arange(parts.shape[-2], device=parts.device) == 0) & (slots[..., column.OWN] > 0)[..., None]
    bucket = torch.where(first, located.own_row[..., None], bucket)
    used = (parts[..., column.BASE] >= 0) & (first != located.composed[..., None])
    rows = parts[..., column.BASE] + bucket * parts[..., column.PITCH]
    return Reads(rows, located.valid, used, slots[..., column.OPERATION] == MULT)


def buckets_of(number: Tensor, parts: Tensor, maps: Tensor) -> Tensor:
    """The bucket ``[N, S, K]`` of each number ``[N, S]`` in each partition."""
    number = number[..., None]
    bucket = (number // parts[..., column.STRIDE]) % parts[..., column.SIZE]
    if len(maps):
        mapped = parts[..., column.MAP] >= 0
        bucket = torch.where(mapped, maps[torch.where(mapped, parts[..., column.MAP] + number, 0)], bucket)
    return bucket


def locate(ids: Tensor, slots: Tensor, ranks: Tensor) -> LocatedIds:
    """Where ids ``[N, S]`` are in the tables of their slots."""
    i = ids.long()
    valid = ~out_of_range(i, slots[..., column.LIMIT]) & (i != slots[..., column.PADDING])
    place, own = places(torch.where(valid, i, 0), slots, ranks), slots[..., column.OWN]
    composed = place >= own
    number = torch.where(composed, place - own, 0)
    bits = slots[..., column.BITS].long()
    number = torch.where(bits > 0, mixing_rounds(number + slots[..., column.OFFSET], bits), number)
    return LocatedIds(valid, composed, torch.where(composed, 0, place), number)


def places(ids: Tensor, slots: Tensor, ranks: Tensor, longest: int | None = None) -> Tensor:
    """The place of each id in its table: ids with rows of their own first (hot, then the rest), then the composed ids.

    Without lists of ids, hot ids are the lowest and the rest are the highest (``frequency`` explains the ranges).
    ``longest`` is the length of the longest list, if it is known.
    """
    own, first_rest = slots[..., column.OWN], slots[..., column.REST]
    rest = first_rest < slots[..., column.LIMIT]
    hot = own - rest.long()
    place = torch.where(ids < hot, ids, ids + rest)
    place = torch.where(ids >= first_rest, hot, place)
    if not len(ranks):
        return place
    steps = (len(ranks) if longest is None else longest).bit_length()  # a number that compilers know
    below_hot, is_hot = _search(ids, slots[..., column.HOT], hot, ranks, steps)
    below_cold, is_cold = _search(ids, slots[..., column.COLD], torch.where(rest, first_rest - hot, 0), ranks, steps)
    cold = torch.where(rest, torch.where(is_cold, own + below_cold, hot), own + ids - below_hot)
    return torch.where(slots[..., column.HOT] == NO_RANKS, place, torch.where(is_hot, below_hot, cold))


def _search(ids: Tensor, start: Tensor, length: Tensor, ranks: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """How many entries of a rising list in ``ranks`` are below each id, and whether the id is in it; by bisection."""
    below, last = torch.zeros_like(ids), ranks.shape[0] - 1
    for step in reversed(range(steps)):
        further = below + 2**step
        entry = ranks[(start + further - 1).clamp(0, last)]
        below = torch.where((entry < ids) & (further <= length), further, below)
    return below, (ranks[(start + below).clamp(0, last)] == ids) & (below < length)


def bag_and_feature(ids: Tensor, offsets: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Bag ``[V]`` and feature ``[V]`` of each jagged id."""
    positions = torch.arange(ids.shape[0], device=ids.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, positions, right=True) - 1
    # Sizes may be symbolic: torch.export would guard on Python's max.
    bag = bag.clamp(0, torch.sym_max(offsets.shape[0] - 2, 0))  # ids past the last offset are ignored
    return bag, bag // torch.sym_max((offsets.shape[0] - 1) // spans.shape[0], 1)


def out_of_range(ids: Tensor, limits: Tensor) -> Tensor:
    """Which of ``ids`` lie outside ``[0, limits)``."""
    return (ids < 0) | (ids >= limits)


def invalid_ids(batch: IdBatch, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Which ids are out of range; the limit of each; the feature of each. Shaped as ``ids``."""
    ids, offsets, _, _ = batch
    limits = layout.slots[layout.spans[:, 0], column.LIMIT]
    if offsets is None:
        feature = torch.arange(len(layout.spans), device=ids.device).expand(ids.shape)
        return out_of_range(ids, limits), limits[feature], feature
    feature = bag_and_feature(ids, offsets, layout.spans)[1]
    inside = torch.arange(len(ids), device=ids.device) < offsets[-1]  # ids past the last offset are ignored
    return out_of_range(ids, limits[feature]) & inside, limits[feature], feature


def raise_out_of_range(batch: IdBatch, layout: Layout, names: str) -> None:
    """Raise IndexError for the first id on the CPU that is outside its table, if there is one.

    ``names`` has the name of each feature's table, one per line.
    """
    if batch.ids.device.type == "cpu":
        titles = names.split("\n") if names else ["the table"] * len(layout.spans)
        raise_first(batch.ids, *invalid_ids(batch, layout), titles)


def raise_first(ids: Tensor, invalid: Tensor, limit: Tensor, feature: Tensor, titles: Sequence[str]) -> None:
    """Raise IndexError for the first ``invalid`` id, if there is one; ``titles`` has the table of each feature."""
    if invalid.any():
        outside, table = f"[0, {int(limit[invalid][0])})", titles[int(feature[invalid][0])]
        raise IndexError(f"id {int(ids[invalid][0])} is outside {outside} of {table}")


def accumulator(stored: Tensor) -> torch.dtype:
    """The dtype in which rows of ``stored`` are summed and multiplied."""
    return torch.float32 if stored.dtype in (torch.bfloat16, torch.float16, torch.uint8) else stored.dtype


def read(stored: Tensor, rows: Tensor, width: int, bits: int = 8) -> Tensor:
    """``rows`` of ``stored``, ``[..., W]``, in the accumulator's dtype; bytes are codes of ``bits`` bits."""
    if stored.dtype == torch.uint8:
        return dequantize(stored, rows, width, bits)
    return F.embedding(rows, stored).to(accumulator(stored))


def subtract_(stored: Tensor, rows: Tensor, change: Tensor, rounding: Rounding | None = None) -> None:
    """Subtract ``change`` ``[N, W]`` from ``rows`` ``[N]``, all different, in the accumulator's dtype.

    Half precision is rounded to the nearest, or at random where ``rounding`` is given.
    """
    width = change.shape[1]
    numbers = (read(stored, rows, width) - change).to(accumulator(stored))
    if rounding is not None and stored.dtype in (torch.bfloat16, torch.float16):
        numbers = round_at_random(numbers, random_bits(rows, width, rounding), stored.dtype)
    stored[rows] = numbers.to(stored.dtype)

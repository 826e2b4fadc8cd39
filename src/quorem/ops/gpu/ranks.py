"""Renumber the ids of tables that have lists of hot and cold ids to be in order of frequency: one launch before others.

A hot id becomes its position in the list of hot ids, a cold id its position among the cold ids, after the hot ones, and
any other the first id of the rest. The other kernels then need no lists. Padding becomes -1, since another id may get
its number; ids out of range stay as they are.

Lists rise, so an id is found by bisection. An index shortens it: for each run of 2**shift ids it has the position of
the first list entry from there on, so that only the entries of one run are searched. It has at most one number for
every SPAN entries of a list.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import layout as column
from ..layout import NO_RANKS, Layout
from .fast_launch import scratch
from .host import HostLayout, IdBatch
from .launch import cdiv, launch
from .rows import COLD, HOT, LIMIT, OWN, PADDING, REST, read_ids, slot_at

BLOCK = 128  # ids for each program
SPAN = 32  # list entries for each number of an index, at least
RUN_COLUMNS = tl.constexpr(4)  # of each feature: where its index of hot ids starts, its shift; the same of cold ids


@triton.jit
def below(ids, valid, ranks, start, length, index, shift, ROUNDS: tl.constexpr):
    """How many entries of a rising list are below each id, and whether the id is in it.

    ``index`` is that of the list; ROUNDS halve the entries of any run of 2**shift ids to none.
    """
    run = index + (ids >> shift)
    lower = tl.load(run, mask=valid, other=0).to(tl.int64)
    upper = tl.load(run + 1, mask=valid, other=0).to(tl.int64)
    for _ in range(ROUNDS):
        middle = (lower + upper) >> 1
        inside = valid & (lower < upper)
        entry = tl.load(ranks + start + middle, mask=inside, other=0)
        lower = tl.where(inside & (entry < ids), middle + 1, lower)
        upper = tl.where(inside & (entry >= ids), middle, upper)
    inside = valid & (lower < length)
    return lower, inside & (tl.load(ranks + start + lower, mask=inside, other=0) == ids)


@triton.jit
def rank_kernel(
    ids, offsets, out, invalid, slots, spans, ranks, index, runs, B, id_stride, F,
    ROUNDS: tl.constexpr, T: tl.constexpr, JAGGED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """T ids of one feature. With COUNT, the number of ids outside the table is added to ``invalid``."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, tl.load(spans + 2 * feature))
    i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
    limit, rest, start = tl.load(slot + LIMIT), tl.load(slot + REST), tl.load(slot + HOT)
    if JAGGED:
        inside = place < tl.load(offsets + (feature + 1) * B)
        target = out + place
    else:
        inside = n < B
        target = out + n * F + feature
    if COUNT:
        count = tl.sum((inside & ((i < 0) | (i >= limit))).to(tl.int64))
        if count > 0:
            tl.atomic_add(invalid, count, sem="relaxed")
    i = tl.where(i == tl.load(slot + PADDING), -1, i).to(tl.int64)
    if start >= 0:
        valid = (i >= 0) & (i < limit)
        hot = tl.load(slot + OWN) - (rest < limit).to(tl.int64)
        run = runs + RUN_COLUMNS * feature
        below_hot, is_hot = below(
            i, valid, ranks, start, hot, index + tl.load(run), tl.load(run + 1), ROUNDS
        )  # fmt: skip
        cold = hot + i - below_hot
        if rest < limit:
            below_cold, is_cold = below(
                i, valid, ranks, tl.load(slot + COLD), rest - hot, index + tl.load(run + 2), tl.load(run + 3), ROUNDS
            )  # fmt: skip
            cold = tl.where(is_cold, hot + below_cold, rest)
        i = tl.where(valid, tl.where(is_hot, below_hot, cold), i)
    tl.store(target, i.to(out.dtype.element_ty), mask=inside)


class Index(NamedTuple):
    """The index of all lists of a layout."""

    index: Tensor  # int32: positions in lists
    runs: Tensor  # int64 [F, RUN_COLUMNS]
    rounds: int  # of the bisection


def index_of(layout: Layout, host: HostLayout) -> Index:
    """Make the index; it waits for the GPU."""
    parts: list[Tensor] = []
    places: dict[tuple[int, int], list[int]] = {}  # start and length of a list -> where its index starts, its shift
    runs = []
    for slot in layout.slots.cpu()[host.spans[:, 0]].tolist():
        limit, rest = slot[column.LIMIT], slot[column.REST]
        hot = slot[column.OWN] - (rest < limit)
        run = [0] * RUN_COLUMNS.value
        if slot[column.HOT] != NO_RANKS:
            lists = [(slot[column.HOT], hot)]
            if rest < limit:
                lists.append((slot[column.COLD], rest - hot))
            for n, (start, length) in enumerate(lists):
                if (start, length) not in places:
                    shift = 0
                    while (limit - 1 >> shift) + 2 > max(2, length // SPAN):
                        shift += 1
                    entries = layout.ranks[start : start + length].long()
                    firsts = torch.arange((limit - 1 >> shift) + 2, device=entries.device) << shift
                    places[start, length] = [sum(map(len, parts)), shift]
                    parts.append(torch.searchsorted(entries, firsts, out_int32=True))
                run[2 * n : 2 * n + 2] = places[start, length]
        runs.append(run)
    most = max(int(part.diff().max()) for part in parts)
    return Index(torch.cat(parts), torch.tensor(runs, device=layout.slots.device), most.bit_length())


def by_frequency(
    batch: IdBatch, host: HostLayout, layout: Layout, invalid: Tensor | None = None
) -> tuple[IdBatch, Layout]:
    """The renumbered ids and the layout for them; both unchanged if no table has lists of hot and cold ids.

    If there are lists, the number of ids out of range is added to ``invalid``.
    """
    if host.by_frequency is None:
        return batch, layout
    lists: Index | None = host.lists
    if lists is None:
        lists = host.lists = index_of(layout, host)
    ids, offsets, *_ = batch
    features = len(layout.spans)
    size = len(ids) if offsets is None else (len(offsets) - 1) // features
    renumbered = scratch(ids, *ids.shape, dtype=ids.dtype)
    launch(
        rank_kernel, (cdiv(len(ids), BLOCK) * features,),
        ids, offsets, renumbered, invalid, layout.slots, layout.spans, layout.ranks, lists.index, lists.runs, size,
        batch.stride, features, ROUNDS=lists.rounds, T=BLOCK, JAGGED=batch.jagged, COUNT=invalid is not None,
    )  # fmt: skip
    return batch._replace(ids=renumbered), host.by_frequency

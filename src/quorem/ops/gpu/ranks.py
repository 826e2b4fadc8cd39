"""Renumber the ids of tables that have lists of hot and cold ids to be in order of frequency: one launch before others.

A hot id becomes its position in the list of hot ids, a cold id its position among the cold ids, after the hot ones, and
any other the first id of the rest. The other kernels then need no lists. Padding becomes -1, since another id may get
its number; ids out of range stay as they are.
"""

import triton
import triton.language as tl

from ..layout import Layout
from .fast_launch import scratch
from .host import HostLayout, IdBatch
from .launch import cdiv, launch
from .rows import COLD, HOT, LIMIT, OWN, PADDING, REST, read_ids, slot_at

BLOCK = 128  # ids for each program


@triton.jit
def below(ids, valid, ranks, start, length, ROUNDS: tl.constexpr):
    """How many entries of a rising list of up to 2**ROUNDS - 1 are below each id, and whether the id is in it."""
    lower = tl.zeros_like(ids)
    for r in range(ROUNDS):
        probe = lower + (tl.full((), 1, tl.int64) << (ROUNDS - 1 - r))
        inside = valid & (probe <= length)
        entry = tl.load(ranks + start + probe - 1, mask=inside, other=0)
        lower = tl.where(inside & (entry < ids), probe, lower)
    inside = valid & (lower < length)
    return lower, inside & (tl.load(ranks + start + lower, mask=inside, other=0) == ids)


@triton.jit
def rank_kernel(
    ids, offsets, out, slots, spans, ranks, B, id_stride, F, ROUNDS: tl.constexpr, T: tl.constexpr, JAGGED: tl.constexpr
):  # fmt: skip
    """T ids of one feature."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, tl.load(spans + 2 * feature))
    i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
    limit, rest, start = tl.load(slot + LIMIT), tl.load(slot + REST), tl.load(slot + HOT)
    i = tl.where(i == tl.load(slot + PADDING), -1, i).to(tl.int64)
    if start >= 0:
        valid = (i >= 0) & (i < limit)
        hot = tl.load(slot + OWN) - (rest < limit).to(tl.int64)
        below_hot, is_hot = below(i, valid, ranks, start, hot, ROUNDS)
        cold = hot + i - below_hot
        if rest < limit:
            below_cold, is_cold = below(i, valid, ranks, tl.load(slot + COLD), rest - hot, ROUNDS)
            cold = tl.where(is_cold, hot + below_cold, rest)
        i = tl.where(valid, tl.where(is_hot, below_hot, cold), i)
    if JAGGED:
        inside = place < tl.load(offsets + (feature + 1) * B)
        target = out + place
    else:
        inside = n < B
        target = out + n * F + feature
    tl.store(target, i.to(out.dtype.element_ty), mask=inside)


def by_frequency(batch: IdBatch, host: HostLayout, layout: Layout) -> tuple[IdBatch, Layout]:
    """The renumbered ids and the layout for them; both unchanged if no table has lists of hot and cold ids."""
    if host.by_frequency is None:
        return batch, layout
    ids, offsets, *_ = batch
    features = len(layout.spans)
    size = len(ids) if offsets is None else (len(offsets) - 1) // features
    renumbered = scratch(ids, *ids.shape, dtype=ids.dtype)
    launch(
        rank_kernel, (cdiv(len(ids), BLOCK) * features,),
        ids, offsets, renumbered, layout.slots, layout.spans, layout.ranks, size, batch.stride, features,
        ROUNDS=host.rounds, T=BLOCK, JAGGED=batch.jagged,
    )  # fmt: skip
    return batch._replace(ids=renumbered), host.by_frequency

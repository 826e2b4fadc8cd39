"""Sums of the gradients of equal rows, without a table-sized gradient: two launches, then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it; and a buffer of
   about ``sum(min(rows, ids))`` places is cleared.
2. *gather*: each read's gradient is added to its row's place in the buffer.

Hot rows would serialize the additions, so a small table has several *copies* of its places, which programs take in
turn; whoever uses the sums adds up the copies. A large batch is done in several *passes*, some slots at a time, which
share the buffer and the claims: launches cost it nothing, and it needs the less memory.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Ids are ``[B, F]``, or jagged with offsets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import layout
from ..reference import accumulator
from .index import base_of, feature_of, is_valid, operation_of, part_at, pitch_of, row_of, slot_at
from .launch import Plan, cdiv, launch, power_of_2, scratch

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32, torch.float16: tl.float32}
UNCLAIMED = 2**31 - 1
READS_OF_A_PASS = 16384  # of a feature: with more, there are more passes
CLEARED = 1024  # numbers that a program clears


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
    """Where a batch's gradients are summed: a run of places in one buffer for each pair of a pass."""

    table: Tensor  # int64 [S * K, 4]: first place, number of places, copies; 1 + origin if its rows are claimed, or 0
    passes: list[Pass]
    longest: int  # most places of a pair, copies aside


@dataclass
class Host:
    """A layout on the host, and what follows from it."""

    slots: Tensor
    parts: Tensor
    spans: Tensor
    places: dict[tuple[int, bool], Places] = field(default_factory=dict)
    plans: dict[Any, Plan] = field(default_factory=dict)


_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parts -> Host
_claims: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> int32 [rows]: the ids that claimed some rows


def places_of(reads: int, jagged: bool, *integers: Tensor) -> Places:
    """The places for a batch of up to ``reads`` ids: of each feature, or of all together if jagged.

    Cached, so that only the first step of a layout and batch size waits for the GPU.
    """
    host = on_host(*integers)
    found = host.places.get((reads, jagged))
    if found is None:
        slots, parts, spans = host.slots, host.parts, host.spans
        device = integers[1].device
        rows = torch.where(parts[..., layout.BASE] >= 0, parts[..., layout.SIZE], 0).flatten()
        claimed = rows > reads
        count = torch.where(claimed, reads, rows)
        copies = torch.where(claimed | (rows > 4096), 1, torch.where(rows > 256, 8, 32))
        copies = copies.clamp(max=max(1, reads // 256))
        length = count * copies
        first = length.cumsum(0) - length
        bounds = [0, len(rows)]
        if not jagged:
            bounds = boundaries(length.view(len(slots), -1).sum(1), max(1, reads // READS_OF_A_PASS))
            bounds = [slot * parts.shape[1] for slot in bounds]
            for begin in bounds[1:-1]:
                first[begin:] -= int(first[begin])
        else:  # an id is of one feature, so the claimed places of all features are the same ones
            alone = torch.where(claimed, 0, length)
            nth_slot = torch.arange(len(slots)) - spans[slots[:, layout.FEATURE], 0]
            nth = (nth_slot[:, None] * parts.shape[1] + torch.arange(parts.shape[1])).flatten()
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
        table = torch.stack([first, count, copies, marks], 1)
        found = host.places[reads, jagged] = Places(table.to(device), passes, int(count.max()))
    return found


def boundaries(lengths: Tensor, parts: int) -> list[int]:
    """Where to cut ``lengths`` into runs of about equal sums, ``parts`` at most; first and last are its ends.

    >>> boundaries(torch.tensor([4, 1, 1, 2, 4]), 2), boundaries(torch.tensor([0, 9, 0]), 3)
    ([0, 3, 5], [0, 2, 3])
    """
    ends = lengths.cumsum(0)
    wanted = torch.arange(1, parts) * int(ends[-1]) / parts
    cuts = torch.searchsorted(ends, wanted.ceil().long()) + 1
    return sorted({0, *cuts.clamp(max=len(lengths)).tolist(), len(lengths)})


def one_row_each(*integers: Tensor) -> bool:
    """Whether every table's row is one row of the weight."""
    return bool((on_host(*integers).parts[..., layout.PITCH] == 1).all())


def on_host(*integers: Tensor) -> Host:
    """What is known of a layout without asking the GPU."""
    slots, parts, _, spans = integers
    found: Host | None = _layouts.get(parts)
    if found is None:
        found = _layouts[parts] = Host(slots.cpu(), parts.cpu(), spans.cpu())
    return found


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
        found = _claims[weight] = []
    if not found or found[-1].shape[0] < rows:  # smaller ones are kept: a CUDA graph may hold their address
        found.append(torch.full((max(rows, 1),), UNCLAIMED, dtype=torch.int32, device=weight.device))
    return found[-1]


@triton.jit
def run_of(places, pair):
    """A pair's row of ``Places.table``: first place, number of places, copies, and where its claims are."""
    run = places + pair * 4
    return tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)


@triton.jit
def read_ids(ids, offsets, n, slot, B, id_stride, JAGGED: tl.constexpr):
    """The n-th ids that a slot reads, -1 past the last, and their places: in the batch, or among all jagged ids."""
    feature = feature_of(slot)
    if JAGGED:
        place = tl.load(offsets + feature * B) + n
        i = tl.load(ids + place, mask=place < tl.load(offsets + (feature + 1) * B), other=-1)
    else:
        place = n
        i = tl.load(ids + n * id_stride + feature, mask=n < B, other=-1)
    return i, place


@triton.jit
def claim_kernel(
    ids, offsets, sums, claims, claimers, slots, parts, maps, B, id_stride, num_claimers, origin, clearing, numbers,
    K: tl.constexpr, T: tl.constexpr, CLEARED: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers to zero. The others, for T ids of one pair: the smallest
    place that reads a row claims it."""
    program = tl.program_id(0)
    if program < clearing:
        here = program.to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        tl.store(sums + here, tl.zeros((CLEARED,), sums.dtype.element_ty), mask=here < numbers)
    else:
        pair = tl.load(claimers + (program - clearing) % num_claimers)
        n = ((program - clearing) // num_claimers).to(tl.int64) * T + tl.arange(0, T)
        slot = slot_at(slots, pair // K)
        i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        valid = is_valid(i, slot)
        row, _ = row_of(tl.where(valid, i, 0), slot, part_at(parts, pair), maps)
        place, claim = place.to(tl.int32), claims + row - origin
        lower = valid & (tl.load(claim, mask=valid, other=-1) > place)  # most reads of a hot row stop here
        tl.atomic_min(claim, place, mask=lower, sem="relaxed")


@triton.jit
def gather_kernel(
    grad, ids, offsets, sample_weights, weight, sums, claims, places, step, slots, parts, maps, B, id_stride, S,
    first_pair, pairs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, COUNT_STEP: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one pair: the gradient of each row read, added to the row's place."""
    pair = first_pair + tl.program_id(0) % pairs
    chunk = tl.program_id(0) // pairs
    if COUNT_STEP and tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    s = pair // K
    k = pair % K
    slot = slot_at(slots, s)
    part = part_at(parts, s * K)
    if base_of(part_at(part, k)) >= 0:
        n = chunk.to(tl.int64) * T + tl.arange(0, T)
        first, count, copies, claimed = run_of(places, pair)
        first += (chunk % copies) * count
        few = (claimed == 0) & (count <= 8) & (C <= 32)  # wider rows were slower so
        if JAGGED:
            bag = feature_of(slot) * B + n
            start = tl.load(offsets + bag, mask=n < B, other=0)
            length = tl.load(offsets + bag + 1, mask=n < B, other=0) - start
            most = tl.max(length)
        else:
            most = 1
        scale = tl.full((T,), 1, ACC)
        if JAGGED and MEAN:
            pooled = tl.zeros((T,), tl.int32)
            for step_in_bag in range(0, most):
                i = tl.load(ids + start + step_in_bag, mask=step_in_bag < length, other=-1)
                pooled += is_valid(i, slot).to(tl.int32)
            scale = 1 / tl.maximum(pooled, 1).to(ACC)
        for step_in_bag in range(0, most):
            if JAGGED:
                i = tl.load(ids + start + step_in_bag, mask=step_in_bag < length, other=-1)
            else:
                i = tl.load(ids + n * id_stride + feature_of(slot), mask=n < B, other=-1)
            valid = is_valid(i, slot)
            i = tl.where(valid, i, 0)
            factor = scale
            if WEIGHTED:
                factor = scale * tl.load(sample_weights + start + step_in_bag, mask=valid, other=0).to(ACC)
            row, _ = row_of(i, slot, part_at(part, k), maps)
            if claimed != 0:
                place = tl.load(claims + row - (claimed - 1), mask=valid, other=0).to(tl.int64)
            else:
                place = (row - base_of(part_at(part, k))) // pitch_of(part_at(part, k))
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                mask = valid[:, None] & (columns < W)[None, :]
                g = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
                if JAGGED:
                    g *= factor[:, None]
                if operation_of(slot) == 1:
                    for j in tl.static_range(K):
                        if j != k:
                            other, used = row_of(i, slot, part_at(part, j), maps)
                            y = tl.load(weight + other[:, None] * W + columns[None, :], mask=mask & used, other=0)
                            g = tl.where(used, g * y.to(ACC), g)
                if few:  # sum the block's ids of each row first: a table of four rows takes four additions, not T
                    for r in range(0, count):
                        mine = tl.sum(tl.where((place == r)[:, None] & mask, g, 0), 0)
                        tl.atomic_add(sums + (first + r) * W + columns, mine, mask=columns < W, sem="relaxed")
                else:
                    there = sums + (first + place)[:, None] * W + columns[None, :]
                    tl.atomic_add(there, g, mask=mask, sem="relaxed")


@triton.jit
def rows_and_sums(
    ids, offsets, sums, claims, places, pair, slots, parts, maps, B, id_stride,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T places of one pair: their rows, which of them hold a sum, and the sums ``[T, C]``; claims are released."""
    n = tl.program_id(1).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, pair // K)
    part = part_at(parts, pair)
    first, count, copies, claimed = run_of(places, pair)
    active = n < count
    if claimed != 0:
        i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        active = active & is_valid(i, slot)
        row, _ = row_of(tl.where(active, i, 0), slot, part, maps)
        claim = claims + row - (claimed - 1)
        active = active & (tl.load(claim, mask=active, other=-1) == place)
        tl.debug_barrier()  # several threads hold the same id: all must have read the claim before one releases it
        tl.store(claim, 2147483647, mask=active)
    else:
        place = n
        row = base_of(part) + n * pitch_of(part)
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    g = tl.load(sums + (first + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    for copy in range(1, copies):
        g += tl.load(sums + (first + copy * count + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    return row, active, g


def gather(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool = False,
    step: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Places, Pass]]:
    """Launch claim and gather, pass by pass; counts ``step`` up in passing.

    Yields:
        The buffer of sums, which the next pass uses anew; the claims, the places, and which pass it is.
    """
    slots, parts, maps, _ = integers
    jagged = offsets is not None
    batch, (num_slots, k, _) = grad.shape[0], parts.shape
    reads = bucket(ids.shape[0]) if jagged else batch
    places = places_of(reads, jagged, *integers)
    claims = claims_of(weight, max(now.rows for now in places.passes))
    width = weight.shape[1]
    most = max(now.places for now in places.passes)
    sums = scratch(weight, most, width, dtype=accumulator(weight))
    stride = 1 if jagged else ids.stride(0)
    columns = min(power_of_2(width), 64)
    block = max(16, min(64, 512 // columns))
    for now in places.passes:
        numbers = now.places * width
        clearing = cdiv(numbers, CLEARED)
        launch(
            claim_kernel, (clearing + cdiv(reads, 128) * now.num_claimers,),
            ids, offsets, sums, claims, now.claimers, slots, parts, maps, batch, stride, now.num_claimers, now.origin,
            clearing, numbers, K=k, T=128, CLEARED=CLEARED, JAGGED=jagged,
        )  # fmt: skip
        counted = step if now.first == 0 else None
        launch(
            gather_kernel, (cdiv(batch, block) * now.pairs,),
            grad, ids, offsets, sample_weights, weight, sums, claims, places.table, counted, slots, parts, maps, batch,
            stride, num_slots, now.first, now.pairs, W=width, K=k, T=block, C=columns, ACC=TYPES[weight.dtype],
            JAGGED=jagged, WEIGHTED=sample_weights is not None, MEAN=mean, COUNT_STEP=counted is not None,
            num_warps=1 if columns <= 32 else 2,
        )  # fmt: skip
        yield sums, claims, places, now

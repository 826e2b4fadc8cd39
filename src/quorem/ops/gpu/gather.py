"""Sums of the gradients of equal rows, without a table-sized gradient: two launches, then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it; and a buffer of
   about ``sum(min(rows, ids))`` places is cleared.
2. *gather*: each read's gradient is added to its row's place in the buffer.

Hot rows would serialize the additions, so a small table has several *copies* of its places, which programs take in
turn; whoever uses the sums adds up the copies. ``places.py`` says where the places are, and in how many passes.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Ids are ``[B, F]``, or jagged with offsets.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from ..reference import accumulator
from .index import TYPES, base_of, feature_of, is_valid, operation_of, part_at, pitch_of, read_ids, row_of, slot_at
from .launch import cdiv, launch, power_of_2, scratch
from .places import Pass, Places, bucket, claims_of, places_of
from .replay import Times, advance

CLEARED = 1024  # numbers that a program clears
FEW_PROGRAMS = 512  # up to which a partition of a slot gets a program of its own


@triton.jit
def run_of(places, pair):
    """A pair's row of ``Places.table``: first place, number of places, copies, and where its claims are."""
    run = places + pair * 4
    return tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)


@triton.jit
def claim_kernel(
    ids, offsets, sums, claims, claimers, lr, step, lrs, moments, hyper, slots, parts, maps, B, id_stride,
    num_claimers, origin, clearing, numbers, H,
    K: tl.constexpr, T: tl.constexpr, CLEARED: tl.constexpr, JAGGED: tl.constexpr, ADVANCE: tl.constexpr,
    WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers to zero. The others, for T ids of one pair: the smallest
    place that reads a row claims it. With ADVANCE, program 0 takes the step of ``replay.advance`` as well."""
    program = tl.program_id(0)
    if ADVANCE and program == 0:
        advance(lr, step, lrs, moments, hyper, H, WINDOW, AMSGRAD, CLOSED)
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
    first_slot, programs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, COUNT_STEP: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one slot: the gradient of each row read, added to the row's place.

    With EACH, a program has one partition of the slot, else all; ``programs`` have the same ids.
    """
    turn = tl.program_id(0) % programs
    chunk = tl.program_id(0) // programs
    own = turn % K
    s = first_slot + (turn // K if EACH else turn)
    if COUNT_STEP and tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    slot = slot_at(slots, s)
    part = part_at(parts, s * K)
    n = chunk.to(tl.int64) * T + tl.arange(0, T)
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
        for c in range(0, W, C):
            columns = c + tl.arange(0, C)
            mask = valid[:, None] & (columns < W)[None, :]
            coming = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
            if JAGGED:
                coming *= factor[:, None]
            for k in tl.static_range(K):
                row, used = row_of(i, slot, part_at(part, k), maps)
                if used & ((own == k) | (EACH == 0)):
                    g = coming
                    if operation_of(slot) == 1:
                        for j in tl.static_range(K):
                            if j != k:
                                other, present = row_of(i, slot, part_at(part, j), maps)
                                there = weight + other[:, None] * W + columns[None, :]
                                y = tl.load(there, mask=mask & present, other=0).to(ACC)
                                g = tl.where(present, g * y, g)
                    first, count, copies, claimed = run_of(places, s * K + k)
                    first += (chunk % copies) * count
                    if claimed != 0:
                        place = tl.load(claims + row - (claimed - 1), mask=valid, other=0).to(tl.int64)
                    else:
                        place = (row - base_of(part_at(part, k))) // pitch_of(part_at(part, k))
                    if (claimed == 0) & (count <= 8):  # a table of four rows takes four additions, not T
                        for r in range(0, count):
                            mine = tl.sum(tl.where((place == r)[:, None] & mask, g, 0), 0)
                            tl.atomic_add(sums + (first + r) * W + columns, mine, mask=columns < W, sem="relaxed")
                    else:
                        there = sums + (first + place)[:, None] * W + columns[None, :]
                        tl.atomic_add(there, g, mask=mask, sem="relaxed")


@triton.jit
def rows_and_sums(
    ids, offsets, sums, claims, places, pair, block, slots, parts, maps, B, id_stride,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T places of one pair, the ``block``-th: their rows, which of them hold a sum, and the sums ``[T, C]``; claims are
    released."""
    n = block.to(tl.int64) * T + tl.arange(0, T)
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
    times: Times | None = None,
) -> Iterator[tuple[Tensor, Tensor, Places, Pass]]:
    """Launch claim and gather, pass by pass; counts ``step`` up in passing, or takes a step of ``times``.

    Yields:
        The buffer of sums, which the next pass uses anew; the claims, the places, and which pass it is.
    """
    slots, parts, maps, _ = integers
    jagged = offsets is not None
    batch, (num_slots, k, _) = grad.shape[0], parts.shape
    reads = bucket(ids.shape[0]) if jagged else batch
    places = places_of(weight, reads, jagged, *integers)
    claims = claims_of(weight, max(now.rows for now in places.passes))
    width = weight.shape[1]
    most = max(now.places for now in places.passes)
    sums = scratch(weight, most, width, dtype=accumulator(weight))
    stride = 1 if jagged else ids.stride(0)
    columns = min(power_of_2(width), 64)
    block = max(32, min(64, 512 // columns))
    each = cdiv(batch, block) * num_slots <= FEW_PROGRAMS
    for now in places.passes:
        numbers = now.places * width
        clearing = cdiv(numbers, CLEARED)
        advanced = times if times is not None and now.first == 0 else Times()
        launch(
            claim_kernel, (clearing + cdiv(reads, 128) * now.num_claimers,),
            ids, offsets, sums, claims, now.claimers, *advanced.tensors, slots, parts, maps, batch, stride,
            now.num_claimers, now.origin, clearing, numbers, advanced.history, K=k, T=128, CLEARED=CLEARED,
            JAGGED=jagged, ADVANCE=advanced.tensors[0] is not None, **advanced.constants,
        )  # fmt: skip
        counted = step if now.first == 0 else None
        programs = now.pairs if each else now.pairs // k
        launch(
            gather_kernel, (cdiv(batch, block) * programs,),
            grad, ids, offsets, sample_weights, weight, sums, claims, places.table, counted, slots, parts, maps, batch,
            stride, num_slots, now.first // k, programs, W=width, K=k, T=block, C=columns,
            ACC=TYPES[weight.dtype], JAGGED=jagged, WEIGHTED=sample_weights is not None, MEAN=mean,
            COUNT_STEP=counted is not None, EACH=each, num_warps=1,
        )  # fmt: skip
        yield sums, claims, places, now

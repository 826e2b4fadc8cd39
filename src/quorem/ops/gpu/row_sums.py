"""Sum gradients by row without a table-sized buffer: two launches; then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it; and a buffer of
   about ``sum(min(rows, ids))`` places is cleared.
2. *sum*: the gradient of each read is added to the place of its row in the buffer.

Rows that many ids read would serialize the additions, so a small table has several *copies* of its places, which
programs use in turn; the kernel that uses the sums adds up the copies. ``places.py`` says where the places are, and in
how many ranges of slots a batch is processed.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Pairs of different slots may read the same rows
(a pool, or a table that several features read). Then a claim stores a place among those of all pairs, so that all reads
of the row add there; and pairs with a place for each row have the same places, which the first of them handles.

If ids have rows of their own, only few ids read through some pairs, and rows take longer to compute. So the claim
kernel notes the rows of all ids of a pair, for the kernels that use the sums.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..rows import accumulator
from . import places as place_table
from .fast_launch import scratch
from .host import HostLayout, IdBatch
from .launch import cdiv, launch, power_of_2
from .places import Places, SlotRange, claims_of, places_of, rounded_up
from .replay import NO_ADVANCE, Advance, advance
from .rows import BASE, FEATURE, OPERATION, PITCH, PRODUCT, TYPES

from .rows import is_valid, mask_if, number_of, part_at, places_inside, plain_row_of, read_ids, row_of, slot_at  # isort: skip

CLEARED = 1024  # numbers that each program clears
FEW_PROGRAMS = 512  # up to so many programs, each partition of a slot gets its own
PLACE_COLUMNS = tl.constexpr(place_table.PLACE_COLUMNS)
FIRST, COUNT, COPIES, CLAIMED, UNIT, USED, NOTED = map(tl.constexpr, range(place_table.PLACE_COLUMNS))


@triton.jit
def run_of(places, pair):
    """From a pair's row of ``Places.table``: first place, number of places, copies, and where its claims are."""
    run = places + pair * PLACE_COLUMNS
    return tl.load(run + FIRST), tl.load(run + COUNT), tl.load(run + COPIES), tl.load(run + CLAIMED)


@triton.jit
def used_places(places, pair):
    """How many places of a pair are used by itself: none where a pair before it has the same."""
    return tl.load(places + pair * PLACE_COLUMNS + USED)


@triton.jit
def noted_rows(rows, places, pair):
    """Where the rows of the ids of a pair are noted, by their places; -1 for ids that read none."""
    return rows + tl.load(places + pair * PLACE_COLUMNS + NOTED)


@triton.jit
def claim_kernel(
    ids, offsets, sums, claims, claimers, places, rows, lr, step, lrs, moments, constants, slots, parts, maps, B,
    id_stride, num_claimers, first_row, clearing, numbers, H,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, CLEARED: tl.constexpr, JAGGED: tl.constexpr,
    ADVANCE: tl.constexpr, WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr, OWNED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers to zero. The others, for T ids of one pair: the smallest
    place that reads a row claims it. With ADVANCE, program 0 takes the step of ``replay.advance`` as well.

    With OWNED, an id may not read through a pair: these programs clear the places that may be claimed, and note rows.
    """
    program = tl.program_id(0)
    if ADVANCE and program == 0:
        advance(lr, step, lrs, moments, constants, H, WINDOW, AMSGRAD, CLOSED)
    if program < clearing:
        cleared = program.to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        tl.store(sums + cleared, tl.zeros((CLEARED,), sums.dtype.element_ty), mask=cleared < numbers)
    else:
        pair = tl.load(claimers + (program - clearing) % num_claimers)
        n = ((program - clearing) // num_claimers).to(tl.int64) * T + tl.arange(0, T)
        slot = slot_at(slots, pair // K)
        i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        valid = is_valid(i, slot)
        number, is_own = number_of(tl.where(valid, i, 0), slot, OWNED)
        row, used = row_of(number, is_own, slot, part_at(parts, pair), pair % K, maps, OWNED)
        if OWNED:
            valid = valid & used
            inside = places_inside(n, offsets, slot, B, JAGGED)[1]
            tl.store(noted_rows(rows, places, pair) + place, tl.where(valid, row, -1), mask=inside)
            target = sums + (run_of(places, pair)[0] + place)[:, None] * W
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                cleared = valid[:, None] & (columns < W)[None, :]
                tl.store(target + columns[None, :], tl.zeros((T, C), sums.dtype.element_ty), mask=cleared)
        if SHARED:
            place += run_of(places, pair)[0]
        place, claim = place.to(tl.int32), claims + row - first_row
        lower = valid & (tl.load(claim, mask=valid, other=-1) > place)  # most reads of a hot row stop here
        tl.atomic_min(claim, place, mask=lower, sem="relaxed")


@triton.jit
def sum_kernel(
    grad, ids, offsets, sample_weights, stored, sums, claims, places, step, slots, parts, maps, B, id_stride, S,
    first_slot, programs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, COUNT_STEP: tl.constexpr, EACH: tl.constexpr,
    PRODUCTS: tl.constexpr, OWNED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one slot: the gradient of each row read, added to the row's place.

    With EACH, a program has one partition of the slot, else all; ``programs`` have the same ids. Without PRODUCTS, no
    slot multiplies rows.
    """
    program = tl.program_id(0) % programs
    block = tl.program_id(0) // programs
    partition = program % K
    s = first_slot + (program // K if EACH else program)
    if COUNT_STEP and tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
    slot = slot_at(slots, s)
    part = part_at(parts, s * K)
    n = block.to(tl.int64) * T + tl.arange(0, T)
    if JAGGED:
        bag = tl.load(slot + FEATURE) * B + n
        start = tl.load(offsets + bag, mask=n < B, other=0)
        length = tl.load(offsets + bag + 1, mask=n < B, other=0) - start
        longest = tl.max(length)
    else:
        longest = 1
    scale = tl.full((T,), 1, ACC)
    if JAGGED and MEAN:
        pooled = tl.zeros((T,), tl.int32)
        for nth in range(0, longest):
            i = tl.load(ids + start + nth, mask=nth < length, other=-1)
            pooled += is_valid(i, slot).to(tl.int32)
        scale = 1 / tl.maximum(pooled, 1).to(ACC)
    for nth in range(0, longest):
        if JAGGED:
            i = tl.load(ids + start + nth, mask=nth < length, other=-1)
        else:
            i = tl.load(ids + n * id_stride + tl.load(slot + FEATURE), mask=n < B, other=-1)
        valid = is_valid(i, slot)
        i = tl.where(valid, i, 0)
        number, is_own = number_of(i, slot, OWNED)
        factor = scale
        if WEIGHTED:
            factor = scale * tl.load(sample_weights + start + nth, mask=valid, other=0).to(ACC)
        for c in range(0, W, C):
            columns = c + tl.arange(0, C)
            mask = valid[:, None] & (columns < W)[None, :]
            incoming = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
            if JAGGED:
                incoming *= factor[:, None]
            for k in tl.static_range(K):
                row, used = row_of(number, is_own, slot, part_at(part, k), k, maps, OWNED)
                read, readers = mask, valid
                if OWNED:
                    readers = valid & used
                    read = readers[:, None] & (columns < W)[None, :]
                    used = tl.load(part_at(part, k) + BASE) >= 0
                if used & ((partition == k) | (EACH == 0)):
                    g = incoming
                    if PRODUCTS and tl.load(slot + OPERATION) == PRODUCT:
                        for j in tl.static_range(K):
                            if j != k:
                                other, present = row_of(number, is_own, slot, part_at(part, j), j, maps, OWNED)
                                factors = stored + other[:, None] * W + columns[None, :]
                                if OWNED:
                                    some = (valid & present)[:, None]
                                    y = tl.load(factors, mask=some & (columns < W)[None, :], other=0).to(ACC)
                                    g = tl.where(some, g * y, g)
                                else:
                                    y = tl.load(factors, mask=mask_if(present, mask), other=0).to(ACC)
                                    g = tl.where(present, g * y, g)
                    first, count, copies, claimed = run_of(places, s * K + k)
                    first += (block % copies) * count
                    if claimed != 0:
                        place = tl.load(claims + row - (claimed - 1), mask=readers, other=0).to(tl.int64)
                        if SHARED:
                            first = first * 0
                    else:
                        place = (row - tl.load(part_at(part, k) + BASE)) // tl.load(part_at(part, k) + PITCH)
                    if (claimed == 0) & (count <= 8):  # a table of four rows takes four additions, not T
                        for r in range(0, count):
                            total = tl.sum(tl.where((place == r)[:, None] & read, g, 0), 0)
                            tl.atomic_add(sums + (first + r) * W + columns, total, mask=columns < W, sem="relaxed")
                    else:
                        targets = sums + (first + place)[:, None] * W + columns[None, :]
                        tl.atomic_add(targets, g, mask=read, sem="relaxed")


@triton.jit
def touched_rows(
    ids, offsets, claims, places, rows, pair, block, slots, parts, maps, B, id_stride,
    K: tl.constexpr, T: tl.constexpr, JAGGED: tl.constexpr, OWNED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """T places of one pair, the ``block``-th: their rows, their places, and which of them hold a sum. Claims are
    released."""
    n = block.to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, pair // K)
    part = part_at(parts, pair)
    run = run_of(places, pair)
    claimed = run[3]
    active = n < used_places(places, pair)
    if claimed != 0:
        if OWNED:
            place, inside = places_inside(n, offsets, slot, B, JAGGED)
            row = tl.load(noted_rows(rows, places, pair) + place, mask=active & inside, other=-1)
            active = active & (row >= 0)
        else:
            i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
            active = active & is_valid(i, slot)
            row, _ = plain_row_of(tl.where(active, i, 0), slot, part, maps)
        claim = claims + row - (claimed - 1)
        claimer = place + run[0] if SHARED else place
        active = active & (tl.load(claim, mask=active, other=-1) == claimer)
        tl.debug_barrier()  # several threads hold the same id: all must have read the claim before one releases it
        tl.store(claim, 2147483647, mask=active)
    else:
        place = n
        row = tl.load(part + BASE) + n * tl.load(part + PITCH)
    return row, place, active


@triton.jit
def sums_of(sums, places, pair, place, active, W: tl.constexpr, C: tl.constexpr):
    """The sums ``[T, C]`` of places of one pair."""
    first, count, copies, _ = run_of(places, pair)
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    g = tl.load(sums + (first + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    for copy in range(1, copies):
        g += tl.load(sums + (first + copy * count + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    return g


class Sums(NamedTuple):
    """Sums of gradients by row, in the order in which the kernels that use them take them."""

    sums: Tensor  # [places, W]
    claims: Tensor  # int32, the claims of rows
    places: Tensor  # ``Places.table``
    rows: Tensor | None  # int64, the noted rows; None unless some ids have rows of their own


def sum_by_row(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    host: HostLayout,
    step: Tensor | None = None,
    advanced: Advance = NO_ADVANCE,
) -> Iterator[tuple[Sums, Places, SlotRange]]:
    """Sum the gradients of equal rows, range by range; the launches also increment ``step``, or advance ``advanced``.

    Ids and layout are those of ``by_frequency``.

    Yields:
        The sums, whose buffers the next range overwrites; the places; and the range.
    """
    slots, parts, maps, *_ = layout
    flags = host.row_flags
    ids, offsets, sample_weights, mean = batch
    size, (num_slots, k, _), width = grad.shape[0], parts.shape, stored.shape[1]
    reads = rounded_up(ids.shape[0]) if batch.jagged else size
    places = places_of(stored, reads, batch.jagged, host)
    claims = claims_of(stored, max(r.num_rows for r in places.ranges))
    sums = scratch(stored, max(r.num_places for r in places.ranges), width, dtype=accumulator(stored))
    rows = None
    if flags["OWNED"]:
        rows = scratch(stored, max(1, *(r.num_noted for r in places.ranges)), dtype=torch.int64)
    columns = min(power_of_2(width), 64)
    block = max(32, min(64, 512 // columns))
    each = cdiv(size, block) * num_slots <= FEW_PROGRAMS
    for r in places.ranges:
        first = r.first_pair == 0
        taken = advanced if first else NO_ADVANCE
        numbers = (r.num_direct if flags["OWNED"] else r.num_places) * width
        clearing = max(cdiv(numbers, CLEARED), 1)
        launch(
            claim_kernel, (clearing + cdiv(reads, 128) * r.num_claimers,),
            ids, offsets, sums, claims, r.claimers, places.table, rows, *taken.tensors, slots, parts, maps, size,
            batch.stride, r.num_claimers, r.first_row, clearing, numbers, taken.history, W=width, K=k,
            T=128, C=min(power_of_2(width), 32), CLEARED=CLEARED, JAGGED=batch.jagged,
            ADVANCE=taken is not NO_ADVANCE, **taken.flags, **flags,
        )  # fmt: skip
        counted = step if first else None
        programs = r.num_pairs if each else r.num_pairs // k
        launch(
            sum_kernel, (cdiv(size, block) * programs,),
            grad, ids, offsets, sample_weights, stored, sums, claims, places.table, counted, slots, parts, maps, size,
            batch.stride, num_slots, r.first_pair // k, programs, W=width, K=k, T=block, C=columns,
            ACC=TYPES[stored.dtype], JAGGED=batch.jagged, WEIGHTED=sample_weights is not None, MEAN=mean,
            COUNT_STEP=counted is not None, EACH=each, PRODUCTS=host.flags["MULT"] != 0, **flags, num_warps=1,
        )  # fmt: skip
        yield Sums(sums, claims, places.table, rows), places, r

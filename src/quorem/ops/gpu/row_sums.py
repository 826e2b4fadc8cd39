"""Sum gradients by row without a table-sized buffer: two launches; then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it: the row gets the
   next free place, which is noted and cleared. The places of other tables are cleared.
2. *sum*: the gradient of each read is added to the place of its row in the buffer.

Claimed places follow each other without gaps, so the launch that uses the sums handles touched rows only. Rows that
many ids read would serialize the additions, so a small table has several *copies* of its places, which programs use in
turn; the kernel that uses the sums adds up the copies. ``places.py`` says where the places are, and in how many ranges
of slots a batch is processed.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Pairs of different slots may read the same rows (a
pool, or a table that several features read): then they have the same places.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from . import places as place_table
from .fast_launch import scratch
from .host import HostLayout
from .launch import cdiv, launch, power_of_2
from .places import SlotRange, claims_of, places_of, rounded_up
from .replay import NO_ADVANCE, Advance, advance
from .rows import BASE, FEATURE, OPERATION, PITCH, PRODUCT, TYPES, row_dtype

from .rows import if_used, is_valid, mask_if, number_of, part_at, read_ids, row_of, slot_at  # isort: skip

CLEARED = 1024  # numbers that each program clears
FEW_PROGRAMS = 512  # up to so many programs, each partition of a slot gets its own
ENOUGH_PROGRAMS = 4096  # of the kernel that claims
PLACE_COLUMNS = tl.constexpr(place_table.PLACE_COLUMNS)
FIRST, COUNT, COPIES, USED, CLAIMED, UNIT = map(tl.constexpr, range(place_table.PLACE_COLUMNS))
UNCLAIMED, CLAIMING = tl.constexpr(place_table.UNCLAIMED), tl.constexpr(place_table.CLAIMING)


@triton.jit
def claim_kernel(
    ids, offsets, sums, claims, counts, claimers, rows, pairs, lr, step, lrs, moments, constants, slots, parts, maps, B,
    id_stride, num_claimers, first_row, num_direct, clearing, numbers, H,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, CLEARED: tl.constexpr, JAGGED: tl.constexpr,
    ADVANCE: tl.constexpr, WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr, PITCHED: tl.constexpr,
    OWNED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers of direct places to zero. The others, for T ids of one pair:
    claim their rows. With ADVANCE, program 0 takes the step of ``replay.advance`` as well."""
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
        i, _ = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        valid = is_valid(i, slot)
        number, is_own = number_of(tl.where(valid, i, 0), slot, maps, OWNED, LEVELS)
        row, used = row_of(number, is_own, slot, part_at(parts, pair), pair % K, maps, OWNED)
        valid = if_used(used, valid, OWNED)
        claim = claims + row - first_row
        free = valid & (tl.load(claim, mask=valid, other=0) == UNCLAIMED)  # most reads of a hot row stop here
        if tl.max(free.to(tl.int32)) > 0:
            before = tl.atomic_min(claim, tl.full((T,), CLAIMING, tl.int32), mask=free, sem="relaxed")
            is_first = free & (before == UNCLAIMED)
            nth = tl.cumsum(is_first.to(tl.int32), 0)
            place = tl.atomic_add(counts, tl.max(nth), sem="relaxed") + nth - 1
            tl.store(rows + place, row.to(rows.dtype.element_ty), mask=is_first)
            if PITCHED:
                tl.store(pairs + place, (nth * 0 + pair).to(tl.int32), mask=is_first)
            place += num_direct
            tl.store(claim, place, mask=is_first)
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                target = sums + place.to(tl.int64)[:, None] * W + columns[None, :]
                mask = is_first[:, None] & (columns < W)[None, :]
                tl.store(target, tl.zeros((T, C), sums.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    grad, ids, offsets, sample_weights, stored, sums, claims, counts, places, step, slots, parts, maps, B, id_stride, S,
    first_slot, programs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr, COUNT_STEP: tl.constexpr, EACH: tl.constexpr,
    PRODUCTS: tl.constexpr, OWNED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one slot: the gradient of each row read, added to the row's place.

    With EACH, a program has one partition of the slot, else all; ``programs`` have the same ids. Without PRODUCTS, no
    slot multiplies rows.
    """
    program = tl.program_id(0) % programs
    block = tl.program_id(0) // programs
    partition = program % K
    s = first_slot + (program // K if EACH else program)
    if tl.program_id(0) == 0:  # the next batch counts its claims from zero
        tl.store(counts + 1, tl.load(counts))
        tl.debug_barrier()
        tl.store(counts, 0)
        if COUNT_STEP:
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
        number, is_own = number_of(i, slot, maps, OWNED, LEVELS)
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
                    run = places + (s * K + k) * PLACE_COLUMNS
                    claimed, num_direct = tl.load(run + CLAIMED), tl.load(run + COUNT)
                    first = tl.load(run + FIRST) + (block % tl.load(run + COPIES)) * num_direct
                    if claimed != 0:
                        place = tl.load(claims + row - (claimed - 1), mask=readers, other=0).to(tl.int64)
                    else:
                        place = first + (row - tl.load(part_at(part, k) + BASE)) // tl.load(part_at(part, k) + PITCH)
                    if (claimed == 0) & (num_direct <= 8):  # a table of four rows takes four additions, not T
                        for r in range(first, first + num_direct):
                            total = tl.sum(tl.where((place == r)[:, None] & read, g, 0), 0)
                            tl.atomic_add(sums + r * W + columns, total, mask=columns < W, sem="relaxed")
                    else:
                        targets = sums + place[:, None] * W + columns[None, :]
                        tl.atomic_add(targets, g, mask=read, sem="relaxed")


@triton.jit
def run_of(program, direct, claiming, counts, places, first_pair, pairs, T: tl.constexpr):
    """The pair of a program, and its blocks of T places: the first, the one after the last, and the distance between.

    The first ``direct`` programs have a block of the direct places of one pair. The other ``claiming`` ones have the
    claimed places, and the pair -1.
    """
    if program < direct:
        pair = first_pair + program % pairs
        begin = program // pairs
        used = tl.load(places + pair * PLACE_COLUMNS + USED)
        end = tl.where(begin * T < used, begin + 1, begin)
        by = end * 0 + 1
    else:
        pair = program * 0 - 1
        begin = program - direct
        used = tl.load(counts + 1).to(tl.int64)
        end = ((used + T - 1) // T).to(tl.int32)
        by = end * 0 + claiming
    return pair, begin, end, by, used


@triton.jit
def touched_rows(n, used, pair, claims, places, rows, parts, num_direct, first_row, KEPT: tl.constexpr):
    """The n-th rows of a run, and their places. Claims are released, unless KEPT."""
    if pair >= 0:
        part = part_at(parts, pair)
        row = tl.load(part + BASE) + n * tl.load(part + PITCH)
        place = tl.load(places + pair * PLACE_COLUMNS + FIRST) + n
    else:
        row = tl.load(rows + n, mask=n < used, other=0).to(tl.int64)
        place = num_direct + n
        if not KEPT:
            tl.store(claims + row - first_row, UNCLAIMED, mask=n < used)
    return row, place


@triton.jit
def release_kernel(claims, counts, rows, first_row, programs, T: tl.constexpr):
    """Release the claims of T rows after another."""
    used = tl.load(counts + 1)
    for block in range(tl.program_id(0), (used + T - 1) // T, programs):
        n = block * T + tl.arange(0, T)
        row = tl.load(rows + n, mask=n < used, other=0).to(tl.int64)
        tl.store(claims + row - first_row, UNCLAIMED, mask=n < used)


@triton.jit
def sums_of(sums, places, pair, place, active, W: tl.constexpr, C: tl.constexpr):
    """The sums ``[T, C]`` of places of one run."""
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    g = tl.load(sums + place[:, None] * W + columns[None, :], mask=mask, other=0)
    if pair >= 0:
        run = places + pair * PLACE_COLUMNS
        num_direct = tl.load(run + COUNT)
        for copy in range(1, tl.load(run + COPIES)):
            g += tl.load(sums + (copy * num_direct + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    return g


class Sums(NamedTuple):
    """Sums of gradients by row, in the order in which the kernels that use them take them."""

    sums: Tensor  # [places, W]
    claims: Tensor  # ``Claims.place``
    counts: Tensor  # ``Claims.counts``
    places: Tensor  # ``Places.table``
    rows: Tensor  # int32 or int64: the rows of the claimed places
    pairs: Tensor | None  # int32: the pairs that have claimed them; None unless rows of tables have several pieces


def sum_by_row(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    host: HostLayout,
    step: Tensor | None = None,
    advanced: Advance = NO_ADVANCE,
) -> Iterator[tuple[Sums, SlotRange]]:
    """Sum the gradients of equal rows, range by range; the launches also increment ``step``, or advance ``advanced``.

    Yields:
        The sums, whose buffers the next range overwrites; and the range.
    """
    slots, parts, maps = host.integers()
    ids, offsets, sample_weights, mean = batch
    size, (num_slots, k, _), width = grad.shape[0], parts.shape, stored.shape[1]
    reads = rounded_up(ids.shape[0]) if batch.jagged else size
    places = places_of(stored, reads, batch.jagged, host)
    claims = claims_of(stored, max(r.num_rows for r in places.ranges))
    sums = scratch(stored, max(r.num_places for r in places.ranges), width, dtype=accumulator(stored))
    num_claimed = max(1, *(r.num_places - r.num_direct for r in places.ranges))
    rows, pairs = scratch(stored, num_claimed, dtype=row_dtype(stored)), None
    if host.flags.pitched:
        pairs = scratch(stored, num_claimed, dtype=torch.int32)
    columns = min(power_of_2(width), 64)
    block = max(32, min(64, 512 // columns))
    each = cdiv(size, block) * num_slots <= FEW_PROGRAMS
    for r in places.ranges:
        first = r.first_pair == 0
        taken = advanced if first else NO_ADVANCE
        numbers = r.num_direct * width
        clearing = max(cdiv(numbers, CLEARED), 1)
        claiming = 512 if cdiv(reads, 512) * r.num_claimers >= ENOUGH_PROGRAMS else 128
        launch(
            claim_kernel, (clearing + cdiv(reads, claiming) * r.num_claimers,),
            ids, offsets, sums, *claims, r.claimers, rows, pairs, *taken.tensors, slots, parts, maps, size,
            batch.stride, r.num_claimers, r.first_row, r.num_direct, clearing, numbers, taken.history, W=width, K=k,
            T=claiming, C=min(power_of_2(width), 32), CLEARED=CLEARED, JAGGED=batch.jagged,
            ADVANCE=taken is not NO_ADVANCE, **taken.flags, PITCHED=pairs is not None, **host.row_flags,
        )  # fmt: skip
        counted = step if first else None
        programs = r.num_pairs if each else r.num_pairs // k
        launch(
            sum_kernel, (cdiv(size, block) * programs,),
            grad, ids, offsets, sample_weights, stored, sums, *claims, places.table, counted, slots, parts, maps, size,
            batch.stride, num_slots, r.first_pair // k, programs, W=width, K=k, T=block, C=columns,
            ACC=TYPES[stored.dtype], JAGGED=batch.jagged, WEIGHTED=sample_weights is not None, MEAN=mean,
            COUNT_STEP=counted is not None, EACH=each, PRODUCTS=host.product != 0, **host.row_flags, num_warps=1,
        )  # fmt: skip
        yield Sums(sums, *claims, places.table, rows, pairs), r

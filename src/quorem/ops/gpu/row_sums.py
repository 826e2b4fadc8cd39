"""Sum gradients by row without a table-sized buffer: two launches; then one more uses the sums.

1. *claim*: in tables with more rows than the batch has ids, the first id that reads a row claims it: the row gets the
   next free place, which is noted and cleared. The places of other tables are cleared.
2. *sum*: the gradient of each read is added to the place of its row in the buffer.

Claimed places follow each other without gaps, so the launch that uses the sums handles touched rows only. Rows that
many ids read would serialize the additions, so a small table has several *copies* of its places, which programs use in
turn; the kernel that uses the sums adds up the copies. ``places.py`` says where the places are.

A *pair* is a slot and one of its partitions, numbered ``s * K + k``. Pairs of different slots may read the same rows (a
pool, or a table that several features read): then they have the same places.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from . import places as place_table
from .fast_launch import scratch
from .host import HostLayout
from .launch import cdiv, launch, power_of_2
from .places import Places, claims_of, places_of, rounded_up
from .replay import History, HistoryFlags, advance
from .rows import (
    BASE,
    FEATURE,
    OPERATION,
    PITCH,
    PRODUCT,
    TYPES,
    DeviceBatch,
    bags_at,
    is_valid,
    number_of,
    part_at,
    read_ids,
    row_dtype,
    row_of,
    slot_at,
)

CLEARED = tl.constexpr(1024)  # numbers that each program clears
FEW_PROGRAMS = 512  # up to so many programs, each partition of a slot gets its own
ENOUGH_PROGRAMS = 4096  # of the kernel that claims
PLACE_COLUMNS = tl.constexpr(place_table.PLACE_COLUMNS)
FIRST, COUNT, COPIES, USED, CLAIMED = map(tl.constexpr, range(place_table.PLACE_COLUMNS))
UNCLAIMED, CLAIMING = tl.constexpr(place_table.UNCLAIMED), tl.constexpr(place_table.CLAIMING)


class Sums(NamedTuple):
    """Sums of gradients by row, as kernels take them."""

    sums: Tensor  # [places, W]
    claims: Tensor  # ``Claims.place``
    counts: Tensor  # ``Claims.counts``
    places: Tensor  # ``Places.table``
    rows: Tensor  # int32 or int64: the rows of the claimed places
    num_direct: int  # of ``Places``, as is the next
    first_row: int


@triton.jit
def claim_kernel(
    batch, sums, claimers, lr, history, layout, num_claimers, clearing, W: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, FLAGS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers of direct places to zero. The others, for T ids of one pair:
    claim their rows. If there is a ``history``, program 0 adds a step to it."""
    program = tl.program_id(0)
    if history is not None:  # noqa: SIM102  # joined by `and`, it would be compiled for other rules
        if program == 0:
            advance(lr, history, HISTORY)
    if program < clearing:
        cleared = program.to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        zeros = tl.zeros((CLEARED,), sums.sums.dtype.element_ty)
        tl.store(sums.sums + cleared, zeros, mask=cleared < tl.full((), W, tl.int64) * sums.num_direct)
    else:
        pair = tl.load(claimers + (program - clearing) % num_claimers)
        n = ((program - clearing) // num_claimers).to(tl.int64) * T + tl.arange(0, T)
        slot = slot_at(layout.slots, pair // K)
        i, _ = read_ids(batch, n, slot)
        valid = is_valid(i, slot)
        number, is_own = number_of(tl.where(valid, i, 0), slot, layout.maps, FLAGS)
        row, used = row_of(number, is_own, slot, part_at(layout.parts, pair), pair % K, layout.maps, FLAGS)
        valid = valid & used
        claim = sums.claims + row - sums.first_row
        free = valid & (tl.load(claim, mask=valid, other=0) == UNCLAIMED)  # most reads of a hot row stop here
        if tl.max(free.to(tl.int32)) > 0:
            before = tl.atomic_min(claim, tl.full((T,), CLAIMING, tl.int32), mask=free, sem="relaxed")
            is_first = free & (before == UNCLAIMED)
            nth = tl.cumsum(is_first.to(tl.int32), 0)
            place = tl.atomic_add(sums.counts, tl.max(nth), sem="relaxed") + nth - 1
            tl.store(sums.rows + place, row.to(sums.rows.dtype.element_ty), mask=is_first)
            place += sums.num_direct
            tl.store(claim, place, mask=is_first)
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                target = sums.sums + place.to(tl.int64)[:, None] * W + columns[None, :]
                mask = is_first[:, None] & (columns < W)[None, :]
                tl.store(target, tl.zeros((T, C), sums.sums.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    grad, batch, stored, sums, step, layout, S, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, MEAN: tl.constexpr, EACH: tl.constexpr, PRODUCTS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T ids (bags, if jagged) of one slot: the gradient of each row read, added to the row's place.

    With EACH, a program has one partition of the slot, else all. Without PRODUCTS, no slot multiplies rows. One more is
    added to ``step``, if there is one.
    """
    programs = S * K if EACH else S  # that have the same ids
    program = tl.program_id(0) % programs
    block = tl.program_id(0) // programs
    partition = program % K
    s = program // K if EACH else program
    if tl.program_id(0) == 0:  # the next batch counts its claims from zero
        tl.store(sums.counts + 1, tl.load(sums.counts))
        tl.debug_barrier()
        tl.store(sums.counts, 0)
        if step is not None:
            tl.store(step, tl.load(step) + 1)
    slot = slot_at(layout.slots, s)
    part = part_at(layout.parts, s * K)
    n = block.to(tl.int64) * T + tl.arange(0, T)
    JAGGED: tl.constexpr = batch.offsets is not None
    if JAGGED:
        start, length = bags_at(batch, tl.load(slot + FEATURE), n)
        longest = tl.max(length)
    else:
        longest = 1
    scale = tl.full((T,), 1, ACC)
    if JAGGED and MEAN:
        pooled = tl.zeros((T,), tl.int32)
        for nth in range(0, longest):
            i = tl.load(batch.ids + start + nth, mask=nth < length, other=-1)
            pooled += is_valid(i, slot).to(tl.int32)
        scale = 1 / tl.maximum(pooled, 1).to(ACC)
    for nth in range(0, longest):
        if JAGGED:
            i = tl.load(batch.ids + start + nth, mask=nth < length, other=-1)
        else:
            i = tl.load(batch.ids + n * batch.stride + tl.load(slot + FEATURE), mask=n < batch.size, other=-1)
        valid = is_valid(i, slot)
        i = tl.where(valid, i, 0)
        number, is_own = number_of(i, slot, layout.maps, FLAGS)
        factor = scale
        if batch.sample_weights is not None:
            factor = scale * tl.load(batch.sample_weights + start + nth, mask=valid, other=0).to(ACC)
        for c in range(0, W, C):
            columns = c + tl.arange(0, C)
            mask = valid[:, None] & (columns < W)[None, :]
            incoming = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
            if JAGGED:
                incoming *= factor[:, None]
            for k in tl.static_range(K):
                row, used = row_of(number, is_own, slot, part_at(part, k), k, layout.maps, FLAGS)
                readers = valid & used
                read = readers[:, None] & (columns < W)[None, :]
                base = tl.load(part_at(part, k) + BASE)
                if (base >= 0) & ((partition == k) | (EACH == 0)):
                    g = incoming
                    if PRODUCTS and tl.load(slot + OPERATION) == PRODUCT:
                        for j in tl.static_range(K):
                            if j != k:
                                other, present = row_of(number, is_own, slot, part_at(part, j), j, layout.maps, FLAGS)
                                factors = stored + other[:, None] * W + columns[None, :]
                                some = (valid & present)[:, None]
                                y = tl.load(factors, mask=some & (columns < W)[None, :], other=0).to(ACC)
                                g = tl.where(some, g * y, g)
                    run = sums.places + (s * K + k) * PLACE_COLUMNS
                    claimed, num_direct = tl.load(run + CLAIMED), tl.load(run + COUNT)
                    first = tl.load(run + FIRST) + (block % tl.load(run + COPIES)) * num_direct
                    if claimed != 0:
                        place = tl.load(sums.claims + row - sums.first_row, mask=readers, other=0).to(tl.int64)
                    else:
                        place = first + (row - base) // tl.load(part_at(part, k) + PITCH)
                    if (claimed == 0) & (num_direct <= 8):  # a table of four rows takes four additions, not T
                        for r in range(first, first + num_direct):
                            total = tl.sum(tl.where((place == r)[:, None] & read, g, 0), 0)
                            tl.atomic_add(sums.sums + r * W + columns, total, mask=columns < W, sem="relaxed")
                    else:
                        targets = sums.sums + place[:, None] * W + columns[None, :]
                        tl.atomic_add(targets, g, mask=read, sem="relaxed")


@triton.jit
def run_of(program, sums, num_pairs, direct, claiming, T: tl.constexpr):
    """The pair of a program, and its blocks of T places: the first, the one after the last, and the distance between;
    and how many places there are.

    The first ``direct`` programs have a block of the direct places of one pair. The other ``claiming`` ones have the
    claimed places, and the pair -1.
    """
    if program < direct:
        pair = program % num_pairs
        begin = program // num_pairs
        used = tl.load(sums.places + pair * PLACE_COLUMNS + USED)
        end = tl.where(begin * T < used, begin + 1, begin)
        by = end * 0 + 1
    else:
        pair = program * 0 - 1
        begin = program - direct
        used = tl.load(sums.counts + 1).to(tl.int64)
        end = ((used + T - 1) // T).to(tl.int32)
        by = end * 0 + claiming
    return pair, begin, end, by, used


@triton.jit
def touched_rows(n, used, pair, sums, parts):
    """The n-th rows of a run, and their places. Claims are released."""
    if pair >= 0:
        part = part_at(parts, pair)
        row = tl.load(part + BASE) + n * tl.load(part + PITCH)
        place = tl.load(sums.places + pair * PLACE_COLUMNS + FIRST) + n
    else:
        row = tl.load(sums.rows + n, mask=n < used, other=0).to(tl.int64)
        place = sums.num_direct + n
        tl.store(sums.claims + row - sums.first_row, UNCLAIMED, mask=n < used)
    return row, place


@triton.jit
def sums_of(sums, pair, place, active, W: tl.constexpr, C: tl.constexpr):
    """The sums ``[T, C]`` of places of one run."""
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    g = tl.load(sums.sums + place[:, None] * W + columns[None, :], mask=mask, other=0)
    if pair >= 0:
        run = sums.places + pair * PLACE_COLUMNS
        num_direct = tl.load(run + COUNT)
        for copy in range(1, tl.load(run + COPIES)):
            g += tl.load(sums.sums + (copy * num_direct + place)[:, None] * W + columns[None, :], mask=mask, other=0)
    return g


def sum_by_row(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    host: HostLayout,
    step: Tensor | None = None,
    lr: Tensor | None = None,
    history: tuple[History, HistoryFlags] | tuple[None, None] = (None, None),
) -> tuple[Sums, Places]:
    """Sum the gradients of equal rows in two launches, which also count ``step``, or add a step to ``history``."""
    size, (num_slots, k, _), width = grad.shape[0], layout.parts.shape, stored.shape[1]
    reads = rounded_up(batch.ids.shape[0]) if batch.jagged else size
    places = places_of(reads, batch.jagged, host)
    numbers = scratch(stored, places.num_places, width, dtype=accumulator(stored))
    rows = scratch(stored, max(1, places.num_places - places.num_direct), dtype=row_dtype(stored))
    claims = claims_of(stored, places.num_rows)
    sums = Sums(numbers, *claims, places.table, rows, places.num_direct, places.first_row)
    device_batch, device_layout = DeviceBatch.of(batch, size), host.on_device
    num_claimers = len(places.claimers)
    clearing = max(cdiv(places.num_direct * width, CLEARED.value), 1)
    claiming = 512 if cdiv(reads, 512) * num_claimers >= ENOUGH_PROGRAMS else 128
    launch(
        claim_kernel, (clearing + cdiv(reads, claiming) * num_claimers,),
        device_batch, sums, places.claimers, lr, history[0], device_layout, num_claimers, clearing,
        W=width, K=k, T=claiming, C=min(power_of_2(width), 32), FLAGS=host.row_flags, HISTORY=history[1],
    )  # fmt: skip
    columns = min(power_of_2(width), 64)
    block = max(32, min(64, 512 // columns))
    each = cdiv(size, block) * num_slots <= FEW_PROGRAMS
    launch(
        sum_kernel, (cdiv(size, block) * num_slots * (k if each else 1),),
        grad, device_batch, stored, sums, step, device_layout, num_slots,
        W=width, K=k, T=block, C=columns, ACC=TYPES[stored.dtype], MEAN=batch.mean,
        EACH=each, PRODUCTS=host.product != 0, FLAGS=host.row_flags, num_warps=1,
    )  # fmt: skip
    return sums, places

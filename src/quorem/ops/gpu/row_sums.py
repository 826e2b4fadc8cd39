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

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..rows import accumulator
from . import places as place_table
from . import rows as index
from .host import HostLayout
from .launch import cdiv, launch, power_of_2, scratch
from .places import Runs, claims_of, places_of, rounded_up
from .replay import advance
from .rows import BASE, FEATURE, OPERATION, PITCH, PRODUCT, TYPES, DeviceBatch, row_dtype

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
    parts: Tensor  # of the layout
    num_direct: int  # of ``Places``, as is the next
    first_row: int


@triton.jit
def claim_kernel(
    batch, sums, claimers, lr, state, constants, H, layout, num_claimers, clearing, S: tl.constexpr, W: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, FLAGS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The first ``clearing`` programs: set CLEARED numbers of direct places to zero. The others, for T ids of one pair:
    claim their rows. If there is an ``lr``, program 0 adds a step to the history of ``state``."""
    program = tl.program_id(0)
    if lr is not None:  # noqa: SIM102  # joined by `and`, it would be compiled for other rules
        if program == 0:
            advance(lr, state, constants, H, WINDOW)
    if program < clearing:
        cleared = program.to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
        zeros = tl.zeros((CLEARED,), sums.sums.dtype.element_ty)
        tl.store(sums.sums + cleared, zeros, mask=cleared < tl.full((), W, tl.int64) * sums.num_direct)
    else:
        pair = tl.load(claimers + (program - clearing) % num_claimers)
        n = ((program - clearing) // num_claimers).to(tl.int64) * T + tl.arange(0, T)
        slot = layout.table + pair // K
        i, _ = index.read_ids(batch, n, tl.load(slot + S * FEATURE))
        valid = index.is_valid(i, slot, S)
        i, own_row = index.place_at(i, valid, slot, layout.maps, S, FLAGS)
        row = index.row_of_part(i, own_row, valid, slot, layout.maps, pair % K, S, FLAGS)
        valid = row >= 0
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
                elements, mask = index.elements_of(place.to(tl.int64), is_first, c + tl.arange(0, C), W)
                tl.store(sums.sums + elements, tl.zeros((T, C), sums.sums.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    grad, batch, stored, sums, step, layout, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr, ACC: tl.constexpr, MEAN: tl.constexpr, EACH: tl.constexpr, PRODUCTS: tl.constexpr,
    FLAGS: tl.constexpr,
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
    slot = layout.table + s
    feature = tl.load(slot + S * FEATURE)
    n = block.to(tl.int64) * T + tl.arange(0, T)
    JAGGED: tl.constexpr = batch.offsets is not None
    longest = 1
    if JAGGED:
        start, length = index.bags_at(batch, feature, n)
        longest = tl.max(length)
    scale = tl.full((T,), 1, ACC)
    if JAGGED and MEAN:
        scale = 1 / index.divisor_of(batch, start, length, slot, S, T, ACC)
    for nth in range(0, longest):
        if JAGGED:
            i = index.nth_ids(batch, start, length, nth)
        else:
            i, _ = index.read_ids(batch, n, feature)
        valid, factor = index.is_valid(i, slot, S), scale
        i, own_row = index.place_at(i, valid, slot, layout.maps, S, FLAGS)
        if batch.sample_weights is not None:
            factor = scale * tl.load(batch.sample_weights + start + nth, mask=valid, other=0).to(ACC)
        for c in range(0, W, C):
            columns = c + tl.arange(0, C)
            elements, mask = index.elements_of(n * S + s, valid, columns, W)
            incoming = tl.load(grad + elements, mask=mask, other=0).to(ACC)
            if JAGGED:
                incoming *= factor[:, None]
            for k in tl.static_range(K):
                row = index.row_of_part(i, own_row, valid, slot, layout.maps, k, S, FLAGS)
                readers, part = row >= 0, index.part_at(sums.parts, s * K + k)
                read = readers[:, None] & (columns < W)[None, :]
                base = tl.load(part + BASE)
                if (base >= 0) & ((partition == k) | (EACH == 0)):
                    g = incoming
                    if PRODUCTS and tl.load(slot + S * OPERATION) == PRODUCT:
                        for j in tl.static_range(K):
                            if j != k:
                                other = index.row_of_part(i, own_row, valid, slot, layout.maps, j, S, FLAGS)
                                factors, some = index.elements_of(other, other >= 0, columns, W)
                                y = tl.load(stored + factors, mask=some, other=0).to(ACC)
                                g = tl.where((other >= 0)[:, None], g * y, g)
                    run = sums.places + (s * K + k) * PLACE_COLUMNS
                    claimed, num_direct = tl.load(run + CLAIMED), tl.load(run + COUNT)
                    first = tl.load(run + FIRST) + (block % tl.load(run + COPIES)) * num_direct
                    if claimed != 0:
                        place = tl.load(sums.claims + row - sums.first_row, mask=readers, other=0).to(tl.int64)
                    else:
                        place = first + (row - base) // tl.load(part + PITCH)
                    if (claimed == 0) & (num_direct <= 8):  # a table of four rows takes four additions, not T
                        for r in range(first, first + num_direct):
                            total = tl.sum(tl.where((place == r)[:, None] & read, g, 0), 0)
                            tl.atomic_add(sums.sums + r * W + columns, total, mask=columns < W, sem="relaxed")
                    else:
                        targets = sums.sums + place[:, None] * W + columns[None, :]
                        tl.atomic_add(targets, g, mask=read, sem="relaxed")


@triton.jit
def run_of(program, sums, runs, T: tl.constexpr):
    """The pair of a program, and its blocks of T places: the first, the one after the last, and the distance between;
    and how many places there are.

    The first ``direct`` programs have a block of the direct places of one pair. The other ``claiming`` ones have the
    claimed places, and the pair -1.
    """
    if program < runs.direct:
        pair = program % runs.num_pairs
        begin = program // runs.num_pairs
        used = tl.load(sums.places + pair * PLACE_COLUMNS + USED)
        end = tl.where(begin * T < used, begin + 1, begin)
        by = end * 0 + 1
    else:
        pair = program * 0 - 1
        begin = program - runs.direct
        used = tl.load(sums.counts + 1).to(tl.int64)
        end = ((used + T - 1) // T).to(tl.int32)
        by = end * 0 + runs.claiming
    return pair, begin, end, by, used


@triton.jit
def summed_rows(block, used, pair, sums, W: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The rows of a block of T places of a run, a mask of those that exist, and their sums ``[T, C]``. Claims are
    released."""
    n = tl.full((), T, tl.int64) * block + tl.arange(0, T)
    some = n < used
    if pair >= 0:
        part = index.part_at(sums.parts, pair)
        row = tl.load(part + BASE) + n * tl.load(part + PITCH)
        place = tl.load(sums.places + pair * PLACE_COLUMNS + FIRST) + n
    else:
        row = tl.load(sums.rows + n, mask=some, other=0).to(tl.int64)
        place = sums.num_direct + n
        tl.store(sums.claims + row - sums.first_row, UNCLAIMED, mask=some)
    elements, mask = index.elements_of(place, some, tl.arange(0, C), W)
    g = tl.load(sums.sums + elements, mask=mask, other=0)
    if pair >= 0:
        run = sums.places + pair * PLACE_COLUMNS
        numbers = tl.load(run + COUNT) * W
        for copy in range(1, tl.load(run + COPIES)):
            g += tl.load(sums.sums + copy * numbers + elements, mask=mask, other=0)
    return row, some, g


def sum_by_row(
    grad: Tensor,
    batch: DeviceBatch,
    stored: Tensor,
    host: HostLayout,
    mean: bool,
    run_block: int,
    step: Tensor | None = None,
    lr: Tensor | None = None,
    history: tuple[Any, ...] = (None, None, None),
    window: int = 1,
) -> tuple[Sums, Runs]:
    """Sum the gradients of equal rows in two launches, which also count ``step``, or add a step to a history.

    Returns the sums, and how programs use them, ``run_block`` at a time. With ``lr`` come ``replay.history_of`` and the
    number of steps that count, as a power of two.
    """
    (num_slots, k, _), width, layout = host.parts.shape, stored.shape[1], host.on_device
    reads = batch.size if batch.offsets is None else rounded_up(len(batch.ids))
    places = places_of(reads, batch.offsets is not None, host)
    numbers = scratch(stored, places.num_places, width, dtype=accumulator(stored))
    rows = scratch(stored, max(1, places.num_places - places.num_direct), dtype=row_dtype(stored))
    claims = claims_of(stored, places.num_rows)
    sums = Sums(numbers, *claims, places.table, rows, layout.parts, places.num_direct, places.first_row)
    num_claimers = len(places.claimers)
    clearing = max(cdiv(places.num_direct * width, CLEARED.value), 1)
    claiming = 512 if cdiv(reads, 512) * num_claimers >= ENOUGH_PROGRAMS else 128
    launch(
        claim_kernel, (clearing + cdiv(reads, claiming) * num_claimers,),
        batch, sums, places.claimers, lr, *history, layout, num_claimers, clearing,
        S=num_slots, W=width, K=k, T=claiming, C=min(power_of_2(width), 32), FLAGS=host.row_flags, WINDOW=window,
    )  # fmt: skip
    columns = min(power_of_2(width), 64)
    block = max(32, min(64, 512 // columns))
    programs = cdiv(batch.size, block) * num_slots
    each = programs <= FEW_PROGRAMS
    launch(
        sum_kernel, (programs * (k if each else 1),), grad, batch, stored, sums, step, layout,
        S=num_slots, W=width, K=k, T=block, C=columns, ACC=TYPES[stored.dtype], MEAN=mean,
        EACH=each, PRODUCTS=host.flags.product != 0, FLAGS=host.row_flags, num_warps=1,
    )  # fmt: skip
    return sums, places.runs(run_block)

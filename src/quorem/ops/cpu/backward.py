"""Row gradients, summed by row before they touch the tables.

One slot at a time, for no two slots share a row: each distinct row that the slot's ids read gets a number in order
of first appearance, and gradients are added up under that number in a buffer no larger than the batch needs. Tables
with no more rows than ids are numbered through an array, larger ones through a hash table.

A row's gradients are always added in the order of the batch, whatever the number of threads: same bits every time.

The sums of one slot lie in an *area* of scratch memory, for other kernels to take them from:

    capacity  int64 [K]          numbers N_k to give: the lesser of the slot's ids and the partition's rows
    count     int64 [K]          numbers given, hence distinct rows
    rows      int64 [K + 1, 64]  the block's rows, as ``block_rows`` gives them
    numbers   int64 [K, 64]      and their numbers
    origins   int64 [64]         where the gradient of each id in the block starts
    seen      int64 [N_k] * K    the row of each number
    places    int32 [P_k] * K    one plus the number, by row or by hash; P_k is a power of two, at least 2 N_k
    sums      [N_k, W] * K       gradients by number, float32 or float64

``areas`` is a tuple: the first area's address, the bytes from one to the next, how many there are, K and W.
"""

import numpy as np

from ..layout import BASE, FEATURE, PITCH, SIZE
from .compiled import inner, kernel
from .rows import BLOCK, block_rows, multiplies, part_item, partitions_of, rows_bytes, slot_item
from .vector import INT32, INT64, item, load, number, over_columns, prefetch, put, size_of, splat, store

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def area_bytes(n: int, k: int, width: int, number_bytes: int) -> int:
    """Size of an area for ``n`` ids, in whole cache lines; tables with fewer rows touch less of it."""
    places = 64
    while places < 2 * n:
        places *= 2
    size = 8 * (2 * k + (2 * k + 2) * BLOCK + k * n) + 4 * k * places
    return -(-size // 64) * 64 + -(-k * n * width * number_bytes // 64) * 64


@inner
def count_of(area, K, k):
    """Number of distinct rows of partition ``k``."""
    return item(INT64, area, K + k)


@inner
def _before(area, k):
    """Numbers of the partitions before ``k``."""
    numbers = 0
    for other in range(k):
        numbers += item(INT64, area, other)
    return numbers


@inner
def seen_of(area, K, k):
    """Address of ``seen`` of partition ``k``."""
    return area + (2 * K + (2 * K + 2) * BLOCK + _before(area, k)) * 8


@inner
def _places_for(n):
    places = 64
    while places < 2 * n:
        places *= 2
    return places


@inner
def _places_of(area, K, k):
    """Address of ``places`` of partition ``k``."""
    places = 0
    for other in range(k):
        places += _places_for(item(INT64, area, other))
    return seen_of(area, K, K) + places * 4


@inner
def sums_of(kind, area, K, W, k):
    """Address of ``sums`` of partition ``k``."""
    start = (_places_of(area, K, K) + 63) // 64 * 64
    return start + _before(area, k) * W * size_of(number(kind))


@over_columns
def _clear(zero, j, kind, at):
    store(number(kind), at, j, zero)


@inner
def _clear_places(area, K, k, span):
    places = _places_of(area, K, k)
    for place in range(min(span, _places_for(item(INT64, area, k)))):
        put(INT32, places, place, 0)


@inner
def _number_rows(kind, area, K, W, k, base, span, residue, shares, n):
    """Fill the area's ``numbers`` for the block's rows; -1 for no row, or one of another residue modulo ``shares``."""
    rows = area + (2 * K + k * BLOCK) * 8
    numbers = rows + (K + 1) * BLOCK * 8
    size = _places_for(item(INT64, area, k))
    seen, places, sums = seen_of(area, K, k), _places_of(area, K, k), sums_of(kind, area, K, W, k)
    count = count_of(area, K, k)
    for i in range(n):
        row = item(INT64, rows, i)
        if row < 0 or (shares > 1 and row % shares != residue):
            put(INT64, numbers, i, -1)
            continue
        if span <= size:
            place = row - base
            found = np.int64(item(INT32, places, place)) - 1
        else:
            place = np.int64((np.uint64(row) * _GOLDEN) >> np.uint64(32)) & (size - 1)
            found = np.int64(item(INT32, places, place)) - 1
            while found >= 0 and item(INT64, seen, found) != row:
                place = (place + 1) & (size - 1)
                found = np.int64(item(INT32, places, place)) - 1
        if found < 0:
            found = count
            count += 1
            put(INT32, places, place, count)
            put(INT64, seen, found, row)
            _clear(kind, W, kind, sums + found * W * size_of(number(kind)))
        put(INT64, numbers, i, found)
    put(INT64, area, K + k, count)


@inner
def _add(zero, j, numbers, sums, W, found, value):
    """Add to the sum under a number, if there is one."""
    if found >= 0:
        at = found * W + j
        store(numbers, sums, at, load(numbers, zero, sums, at) + value)


@over_columns
def _add_block(zero, j, kind, grad, origins, scale, n, table, rows, used, mult, numbers, area, sums):
    """Add the gradients of the block's ``n`` ids to the sums of the rows they read."""
    weight, W = table
    kept = number(kind)
    size = W * size_of(kept)
    pairs = used == 2 and mult  # the most common, and fastest if the compiler knows it
    sums_of_second = sums + _before(area, 1) * size
    for i in range(n):
        if item(INT64, rows, i) < 0:
            continue
        gradient = load(kind, zero, grad, item(INT64, origins, i) + j)
        if scale:
            gradient = gradient * splat(zero, item(kept, scale, i))
        if pairs:
            first, second = item(INT64, rows, i) * W + j, item(INT64, rows, BLOCK + i) * W + j
            to_first = gradient * load(kind, zero, weight, second)
            to_second = gradient * load(kind, zero, weight, first)
            _add(zero, j, kept, sums, W, item(INT64, numbers, i), to_first)
            _add(zero, j, kept, sums_of_second, W, item(INT64, numbers, BLOCK + i), to_second)
            continue
        for k in range(used):
            value = gradient
            if mult:
                for other in range(used):
                    if other != k:
                        value = value * load(kind, zero, weight, item(INT64, rows, other * BLOCK + i) * W + j)
            found = item(INT64, numbers, k * BLOCK + i)
            _add(zero, j, kept, sums + _before(area, k) * size, W, found, value)


@inner
def _span(layout, s, k):
    """Rows of the weight from a partition's first to its last."""
    return part_item(layout, s, k, SIZE) * part_item(layout, s, k, PITCH)


@inner
def _sum_slot(kind, grad, table, source, layout, bags, s, area, residue, shares):
    offsets, where, scale, B = bags
    S, K, W = layout[3], layout[4], table[1]
    f = slot_item(layout, s, FEATURE)
    begin = item(INT64, offsets, f * B) if offsets else 0
    end = item(INT64, offsets, (f + 1) * B) if offsets else B
    rows = area + 2 * K * 8
    numbers = rows + rows_bytes(layout)
    origins = numbers + K * BLOCK * 8
    used, mult = partitions_of(layout, s), multiplies(layout, s)
    for k in range(K):
        most = min(end - begin, _span(layout, s, k) // shares + 1) if k < used else 0
        put(INT64, area, k, most)
        put(INT64, area, K + k, 0)
    for k in range(used):
        _clear_places(area, K, k, _span(layout, s, k))
    sums = sums_of(kind, area, K, W, 0)
    for p in range(begin, end, BLOCK):
        n = min(BLOCK, end - p)
        block_rows(kind, source, layout, table, s, p, n, rows)
        for i in range(n):
            b = np.int64(item(INT32, where, p + i)) if where else p + i
            put(INT64, origins, i, (b * S + s) * W)
            prefetch(grad + (b * S + s) * W * size_of(kind))
        for k in range(used):
            base = part_item(layout, s, k, BASE)
            _number_rows(kind, area, K, W, k, base, _span(layout, s, k), residue, shares, n)
        factors = scale + p * size_of(number(kind)) if scale else 0
        _add_block(kind, W, kind, grad, origins, factors, n, table, rows, used, mult, numbers, area, sums)


@kernel
def sum_slots(kind, grad, table, source, layout, bags, areas, first, residue, shares):
    """Sum the gradients of the slots from ``first`` on by row, each into its area.

    ``bags`` is offsets, where and scale of ``forward.spread_bags``, all 0 for a lookup, and the batch size. Several
    threads may share a slot, each with an area of its own: one takes the rows with a ``residue`` modulo ``shares``.
    """
    address, step, slots, _, _ = areas
    for s in range(first, first + slots):
        _sum_slot(kind, grad, table, source, layout, bags, s, address + (s - first) * step, residue, shares)


@over_columns
def _add_row(zero, j, kind, total, values):
    store(number(kind), total, j, load(number(kind), zero, total, j) + load(number(kind), zero, values, j))


@kernel
def sum_rows(kind, rows, values, n, R, areas, residue, shares):
    """Sum ``values`` ``[N, W]`` by ``rows`` ``[N]``, repeated or not, below 0 for none, into one area."""
    area, _, _, K, W = areas
    put(INT64, area, 0, min(n, R // shares + 1))
    put(INT64, area, K, 0)
    _clear_places(area, K, 0, R)
    block = area + 2 * K * 8
    numbers = block + (K + 1) * BLOCK * 8
    sums = sums_of(kind, area, K, W, 0)
    for p in range(0, n, BLOCK):
        m = min(BLOCK, n - p)
        for i in range(m):
            put(INT64, block, i, item(INT64, rows, p + i))
        _number_rows(kind, area, K, W, 0, 0, R, residue, shares, m)
        for i in range(m):
            found = item(INT64, numbers, i)
            if found >= 0:
                size = W * size_of(number(kind))
                _add_row(kind, W, kind, sums + found * size, values + (p + i) * size)


@over_columns
def _copy(zero, j, kind, out, sums):
    store(kind, out, j, load(number(kind), zero, sums, j))


@kernel
def scatter(kind, out, areas):
    """Write the sums of all areas into a gradient ``[R, W]``, which is zero where no row was read."""
    address, step, slots, K, W = areas
    for a in range(slots):
        area = address + a * step
        for k in range(K):
            seen, sums = seen_of(area, K, k), sums_of(kind, area, K, W, k)
            for u in range(count_of(area, K, k)):
                at = out + item(INT64, seen, u) * W * size_of(kind)
                _copy(kind, W, kind, at, sums + u * W * size_of(number(kind)))


@kernel
def collect(kind, rows, values, areas):
    """Write rows ``[U]`` and their sums ``[U, W]`` as they are, area after area; how many."""
    address, step, slots, K, W = areas
    numbers = number(kind)
    size = W * size_of(numbers)
    written = 0
    for a in range(slots):
        area = address + a * step
        for k in range(K):
            seen, sums = seen_of(area, K, k), sums_of(kind, area, K, W, k)
            for u in range(count_of(area, K, k)):
                put(INT64, rows, written, item(INT64, seen, u))
                _copy(numbers, W, numbers, values + written * size, sums + u * size)
                written += 1
    return written

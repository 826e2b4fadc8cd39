"""Gradients of the rows that a batch reads, summed by row before they touch the tables.

One slot at a time, since no two slots share a row. Each distinct row that the slot's ids read gets an index, in order
of first appearance, and its gradients are added up under that index. So the sums take no more memory than the batch
needs. An index is found by the row itself if the table has no more rows than the batch has ids, else by a hash table.

The gradients of a row are always added in the order of the batch, whatever the number of threads: same bits every time.

The sums of one slot lie in an *area* of scratch memory, from which other kernels take them:

    capacity    int64 [K]          N_k, the most distinct rows: the lesser of the slot's ids and the partition's rows
    count       int64 [K]          distinct rows so far
    rows        int64 [K + 1, 64]  the block's rows, as ``block_rows`` gives them
    indices     int64 [K, 64]      and their indices
    starts      int64 [64]         where the gradient of each id in the block starts
    distinct    int64 [N_k] * K    the row of each index
    hash_table  int32 [P_k] * K    one plus the index, by row or by hash; P_k is a power of two, at least 2 N_k
    sums        [N_k, W] * K       gradients by index, float32 or float64
"""

from typing import NamedTuple

import numpy as np

from ..layout import BASE, FEATURE, PART_COLUMNS, PITCH, SIZE
from .compiled import inner, kernel
from .lookup import compose
from .rows import BLOCK, Source, block_rows, multiplies, part_item, partitions_of, rows_bytes, slot_item
from .vector import (
    INT32,
    INT64,
    accumulator,
    item,
    load,
    over_columns,
    prefetch,
    put,
    reserve,
    size_of,
    splat,
    store,
    total,
)

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


class Areas(NamedTuple):
    """Several areas; kernels take them as a plain tuple, for the reason that ``rows.Source`` gives."""

    address: int  # of the first
    step: int  # bytes from one to the next
    count: int
    num_partitions: int  # K
    width: int  # W
    parts: int  # the layout's, from the first area's slot on; 0 for sums of plain rows


def area_bytes(num_ids: int, num_partitions: int, width: int, float_bytes: int) -> int:
    """Size of an area for that many ids, in whole cache lines; tables with fewer rows than ids use less of it."""
    k, n = num_partitions, num_ids
    hash_size = 64
    while hash_size < 2 * n:
        hash_size *= 2
    size = 8 * (2 * k + (2 * k + 2) * BLOCK + k * n) + 4 * k * hash_size
    return -(-size // 64) * 64 + -(-k * n * width * float_bytes // 64) * 64


@inner
def pitch_of(areas, a):
    """How many areas, from ``a`` on, hold the sums of the same rows of tables, ``width`` columns each."""
    return item(INT64, areas.parts, a * areas.num_partitions * PART_COLUMNS + PITCH) if areas.parts else 1


@inner
def count_of(area, K, k):
    """Number of distinct rows of partition ``k``."""
    return item(INT64, area, K + k)


@inner
def _capacity_before(area, k):
    """Capacity of all partitions before ``k``."""
    capacity = 0
    for other in range(k):
        capacity += item(INT64, area, other)
    return capacity


@inner
def distinct_of(area, K, k):
    """Address of ``distinct`` of partition ``k``."""
    return area + (2 * K + (2 * K + 2) * BLOCK + _capacity_before(area, k)) * 8


@inner
def _hash_size(capacity):
    size = 64
    while size < 2 * capacity:
        size *= 2
    return size


@inner
def _hash_table_of(area, K, k):
    """Address of ``hash_table`` of partition ``k``."""
    entries = 0
    for other in range(k):
        entries += _hash_size(item(INT64, area, other))
    return distinct_of(area, K, K) + entries * 4


@inner
def sums_of(kind, area, K, W, k):
    """Address of ``sums`` of partition ``k``."""
    start = (_hash_table_of(area, K, K) + 63) // 64 * 64
    return start + _capacity_before(area, k) * W * size_of(accumulator(kind))


@over_columns
def _clear(zero, j, kind, sum_):
    store(accumulator(kind), sum_, j, zero)


@inner
def _clear_hash_table(area, K, k, num_rows):
    table = _hash_table_of(area, K, k)
    for position in range(min(num_rows, _hash_size(item(INT64, area, k)))):
        put(INT32, table, position, 0)


@inner
def _index_rows(kind, area, K, W, k, base, num_rows, share, num_shares, n):
    """Fill the area's ``indices`` for the block's rows; -1 for no row, or for a row of another thread's share.

    The partition's rows lie between ``base`` and ``base + num_rows``.
    """
    rows = area + (2 * K + k * BLOCK) * 8
    indices = rows + (K + 1) * BLOCK * 8
    size = _hash_size(item(INT64, area, k))
    distinct, table, sums = distinct_of(area, K, k), _hash_table_of(area, K, k), sums_of(kind, area, K, W, k)
    count = count_of(area, K, k)
    for i in range(n):
        row = item(INT64, rows, i)
        if row < 0 or (num_shares > 1 and row % num_shares != share):
            put(INT64, indices, i, -1)
            continue
        if num_rows <= size:
            position = row - base
            index = np.int64(item(INT32, table, position)) - 1
        else:
            position = np.int64((np.uint64(row) * _GOLDEN_RATIO) >> np.uint64(32)) & (size - 1)
            index = np.int64(item(INT32, table, position)) - 1
            while index >= 0 and item(INT64, distinct, index) != row:
                position = (position + 1) & (size - 1)
                index = np.int64(item(INT32, table, position)) - 1
        if index < 0:
            index = count
            count += 1
            put(INT32, table, position, count)
            put(INT64, distinct, index, row)
            _clear(kind, W, kind, sums + index * W * size_of(accumulator(kind)))
        put(INT64, indices, i, index)
    put(INT64, area, K + k, count)


@inner
def _add(zero, j, float_kind, sums, W, index, value):
    """Add to the sum under an index, if there is one."""
    if index >= 0:
        column = index * W + j
        store(float_kind, sums, column, load(float_kind, zero, sums, column) + value)


@over_columns
def _add_block(zero, j, kind, source, grad, starts, factors, n, rows, num_parts, mult, indices, area, sums):
    """Add the gradients of the block's ``n`` ids to the sums of the rows they read."""
    stored, W = source.stored, source.width
    float_kind = accumulator(kind)
    size = W * size_of(float_kind)
    pair_product = num_parts == 2 and mult  # the most common case, and fastest if the compiler knows it
    second_sums = sums + _capacity_before(area, 1) * size
    for i in range(n):
        if item(INT64, rows, i) < 0:
            continue
        gradient = load(kind, zero, grad, item(INT64, starts, i) + j)
        if factors:
            gradient = gradient * splat(zero, item(float_kind, factors, i))
        if pair_product:
            first, second = item(INT64, rows, i) * W + j, item(INT64, rows, BLOCK + i) * W + j
            to_first = gradient * load(kind, zero, stored, second)
            to_second = gradient * load(kind, zero, stored, first)
            _add(zero, j, float_kind, sums, W, item(INT64, indices, i), to_first)
            _add(zero, j, float_kind, second_sums, W, item(INT64, indices, BLOCK + i), to_second)
            continue
        for k in range(num_parts):
            value = gradient
            if mult:
                for other in range(num_parts):
                    if other != k:
                        value = value * load(kind, zero, stored, item(INT64, rows, other * BLOCK + i) * W + j)
            index = item(INT64, indices, k * BLOCK + i)
            _add(zero, j, float_kind, sums + _capacity_before(area, k) * size, W, index, value)


@inner
def _num_rows(source, s, k):
    """Rows of ``stored`` from a partition's first to its last."""
    return part_item(source, s, k, SIZE) * part_item(source, s, k, PITCH)


@inner
def slot_ids(source, s):
    """The first and the last (excluded) id of a slot's feature, counted within the feature for a lookup."""
    f, B = slot_item(source, s, FEATURE), source.batch_size
    begin = item(INT64, source.offsets, f * B) if source.offsets else 0
    end = item(INT64, source.offsets, (f + 1) * B) if source.offsets else B
    return begin, end


@inner
def _sum_slot(kind, source, grad, s, area, share, num_shares):
    S, K, W = source.num_slots, source.num_partitions, source.width
    begin, end = slot_ids(source, s)
    rows = area + 2 * K * 8
    indices = rows + rows_bytes(source)
    starts = indices + K * BLOCK * 8
    num_parts, mult = partitions_of(source, s), multiplies(source, s)
    for k in range(K):
        capacity = min(end - begin, _num_rows(source, s, k) // num_shares + 1) if k < num_parts else 0
        put(INT64, area, k, capacity)
        put(INT64, area, K + k, 0)
    for k in range(num_parts):
        _clear_hash_table(area, K, k, _num_rows(source, s, k))
    sums = sums_of(kind, area, K, W, 0)
    for p in range(begin, end, BLOCK):
        n = min(BLOCK, end - p)
        block_rows(kind, source, s, p, n, rows)
        for i in range(n):
            b = np.int64(item(INT32, source.entries, p + i)) if source.entries else p + i
            put(INT64, starts, i, (b * S + s) * W)
            prefetch(grad + (b * S + s) * W * size_of(kind))
        for k in range(num_parts):
            base = part_item(source, s, k, BASE)
            _index_rows(kind, area, K, W, k, base, _num_rows(source, s, k), share, num_shares, n)
        factors = source.factors + p * size_of(accumulator(kind)) if source.factors else 0
        _add_block(kind, W, kind, source, grad, starts, factors, n, rows, num_parts, mult, indices, area, sums)


@kernel
def sum_slots(kind, source, grad, areas, first, share, num_shares):
    """Sum the gradients of the slots from ``first`` on by row, each into its area.

    Several threads may work on one slot, each with an area of its own: one takes the rows that leave the remainder
    ``share`` when divided by ``num_shares``.
    """
    source, areas = Source(*source), Areas(*areas)
    for a in range(areas.count):
        _sum_slot(kind, source, grad, first + a, areas.address + a * areas.step, share, num_shares)


@over_columns
def _add_row(zero, j, kind, sum_, value):
    float_kind = accumulator(kind)
    store(float_kind, sum_, j, load(float_kind, zero, sum_, j) + load(float_kind, zero, value, j))


@kernel
def sum_rows(kind, rows, values, num_values, num_rows, areas, share, num_shares):
    """Sum ``values`` ``[N, W]`` by ``rows`` ``[N]`` into one area; rows may repeat, and those below 0 are left out."""
    areas = Areas(*areas)
    area, K, W = areas.address, areas.num_partitions, areas.width
    size = W * size_of(accumulator(kind))
    put(INT64, area, 0, min(num_values, num_rows // num_shares + 1))
    put(INT64, area, K, 0)
    _clear_hash_table(area, K, 0, num_rows)
    block = area + 2 * K * 8
    indices = block + (K + 1) * BLOCK * 8
    sums = sums_of(kind, area, K, W, 0)
    for p in range(0, num_values, BLOCK):
        n = min(BLOCK, num_values - p)
        for i in range(n):
            put(INT64, block, i, item(INT64, rows, p + i))
        _index_rows(kind, area, K, W, 0, 0, num_rows, share, num_shares, n)
        for i in range(n):
            index = item(INT64, indices, i)
            if index >= 0:
                _add_row(kind, W, kind, sums + index * size, values + (p + i) * size)


@over_columns
def _copy(zero, j, kind, out, sum_):
    store(kind, out, j, load(accumulator(kind), zero, sum_, j))


@kernel
def write_dense(kind, out, areas):
    """Write the sums of all areas into a gradient ``[R, W]`` that is zero elsewhere."""
    areas = Areas(*areas)
    K, W = areas.num_partitions, areas.width
    for a in range(areas.count):
        area = areas.address + a * areas.step
        for k in range(K):
            distinct, sums = distinct_of(area, K, k), sums_of(kind, area, K, W, k)
            for u in range(count_of(area, K, k)):
                row = out + item(INT64, distinct, u) * W * size_of(kind)
                _copy(kind, W, kind, row, sums + u * W * size_of(accumulator(kind)))


@kernel
def write_sparse(kind, rows, values, areas):
    """Write the distinct rows ``[U]`` of all areas and their sums ``[U, W]``; returns U."""
    areas = Areas(*areas)
    K, W = areas.num_partitions, areas.width
    float_kind = accumulator(kind)
    size = W * size_of(float_kind)
    written = 0
    for a in range(areas.count):
        area = areas.address + a * areas.step
        for k in range(K):
            distinct, sums = distinct_of(area, K, k), sums_of(kind, area, K, W, k)
            for u in range(count_of(area, K, k)):
                put(INT64, rows, written, item(INT64, distinct, u))
                _copy(float_kind, W, float_kind, values + written * size, sums + u * size)
                written += 1
    return written


@over_columns
def _add_dot(zero, j, kind, source, sums, i, grad, rows, num_parts, mult):
    product = compose(zero, j, kind, source, rows, i, num_parts, mult) * load(kind, zero, grad, j)
    put(accumulator(kind), sums, i, item(accumulator(kind), sums, i) + total(product))


@kernel
def sample_weights(kind, source, out, grad, f, first, last):
    """Write the gradient of the sample weights of ids ``first`` to ``last``, all of feature ``f``."""
    source = Source(*source)
    S, W = source.num_slots, source.width
    float_kind = accumulator(kind)
    rows = reserve(rows_bytes(source))
    first_slot, num_slots = item(INT64, source.spans, 2 * f), item(INT64, source.spans, 2 * f + 1)
    for p in range(first, last, BLOCK):
        n = min(BLOCK, last - p)
        sums = out + p * size_of(float_kind)
        for i in range(n):
            put(float_kind, sums, i, 0)
        for s in range(first_slot, first_slot + num_slots):
            block_rows(kind, source, s, p, n, rows)
            num_parts, mult = partitions_of(source, s), multiplies(source, s)
            for i in range(n):
                if item(INT64, rows, i) >= 0:
                    vector = grad + (item(INT32, source.entries, p + i) * S + s) * W * size_of(kind)
                    _add_dot(kind, W, kind, source, sums, i, vector, rows, num_parts, mult)
        for i in range(n):
            put(float_kind, sums, i, item(float_kind, sums, i) * item(float_kind, source.factors, p + i))

"""Gradients of the rows that a batch reads, summed by row before they touch the tables.

One slot at a time. Each distinct row that the slot's ids read gets an index, in order of first appearance, and its
gradients are added up under that index. So the sums take no more memory than the batch needs. An index is found by the
row itself if the table has no more rows than the batch has ids, else by a hash table.

The gradients of a row are always added in the same order: slot by slot, and within a slot in the order of the batch. So
the bits do not depend on the number of threads.
"""

import numpy as np

from ..layout import BASE, PITCH
from .areas import (
    CAPACITY,
    COUNT,
    DISTINCT,
    ENTRIES,
    HEADER,
    SUMS,
    TABLE,
    Areas,
    area_of,
    header,
    init_areas,
    init_part,
    num_rows_of,
    owner_area,
    slot_ids,
    slot_of,
)
from .codes import load_row
from .compiled import helper, inner, kernel
from .lookup import compose
from .memory import INT32, INT64, item, prefetch, put, reserve, size_of
from .rows import block_rows, prefetch_words, rows_bytes
from .source import BLOCK, Source, has_both, layout_item, multiplies, part_item, partitions_of
from .vector import accumulator, load, over_columns, splat, store, total

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


@helper
def _positions(rows, n, positions):
    """Fill ``positions`` with the positions of the block's ``n`` rows that are not -1; returns how many there are."""
    count = 0
    for i in range(n):  # without branches, which could not be predicted
        put(INT64, positions, count, i)
        count += 1 if item(INT64, rows, i) >= 0 else 0
    return count


@over_columns
def _clear(zero, j, kind, W, sum_):
    store(accumulator(kind), sum_, j, zero)


@helper
def _index_rows(kind, W, area, K, k, base, num_rows, pitch, share, num_shares, positions, num_ids, rows, indices):
    """Fill ``indices`` for the block's rows at ``positions``; -1 for a row of another thread's share.

    The rows of part ``k`` of ``area`` lie between ``base`` and ``base + num_rows``, ``pitch`` to a row of a table.
    """
    entries, distinct = header(area, K, ENTRIES, k), header(area, K, DISTINCT, k)
    table, sums, count = header(area, K, TABLE, k), header(area, K, SUMS, k), header(area, K, COUNT, k)
    size = W * size_of(accumulator(kind))
    for p in range(num_ids):
        row = item(INT64, rows, item(INT64, positions, p))
        hashed = np.int64((np.uint64(row) * _GOLDEN_RATIO) >> np.uint64(32)) & (entries - 1)
        put(INT64, indices, p, row - base if num_rows <= entries else hashed)
        prefetch(table + item(INT64, indices, p) * 4)
    for p in range(num_ids):
        row, position = item(INT64, rows, item(INT64, positions, p)), item(INT64, indices, p)
        if num_shares > 1 and (row - base) // pitch % num_shares != share:
            put(INT64, indices, p, -1)
            continue
        index = np.int64(item(INT32, table, position)) - 1
        while num_rows > entries and index >= 0 and item(INT64, distinct, index) != row:
            position = (position + 1) & (entries - 1)
            index = np.int64(item(INT32, table, position)) - 1
        if index < 0:
            index = count
            count += 1
            put(INT32, table, position, count)
            put(INT64, distinct, index, row)
            _clear(kind, W, sums + index * size)
        put(INT64, indices, p, index)
        prefetch(sums + index * size)
    put(INT64, area, COUNT * K + k, count)


@inner
def _add_id(zero, j, kind, W, stored, row_size, grad, starts, factors, p, i, rows, num_parts, mult, indices, sums):
    """Add the gradient of the ``p``-th id, which is the block's ``i``-th, to the sums of its rows."""
    float_kind = accumulator(kind)
    gradient = load(kind, zero, grad, item(INT64, starts, p) + j)
    if factors:
        gradient = gradient * splat(zero, item(float_kind, factors, i))
    for k in range(num_parts):
        value = gradient
        if mult:
            for other in range(num_parts):
                if other != k:
                    value = value * load_row(kind, zero, stored, row_size, item(INT64, rows, other * BLOCK + i), j)
        index = item(INT64, indices, k * BLOCK + p)
        if index >= 0:
            sum_, column = item(INT64, sums, k), index * W + j
            store(float_kind, sum_, column, load(float_kind, zero, sum_, column) + value)


@over_columns
def _add_block(
    zero, j, kind, W, stored, row_size, grad, starts, factors, positions, num_ids, rows, num_parts, mult, indices, sums
):
    """Add the gradients of ids of a block to the sums of the rows they read; ``sums`` has K addresses."""
    if num_parts == 2 and mult:  # the most common case, fastest if the compiler knows it
        for p in range(num_ids):
            i = item(INT64, positions, p)
            _add_id(zero, j, kind, W, stored, row_size, grad, starts, factors, p, i, rows, 2, True, indices, sums)
    else:
        for p in range(num_ids):
            i = item(INT64, positions, p)
            _add_id(
                zero, j, kind, W, stored, row_size, grad, starts, factors, p, i, rows, num_parts, mult, indices, sums
            )


@kernel
def sum_slots(kind, W, source, grad, areas, share, num_shares):
    """Sum the gradients of the slots of ``areas`` by row.

    Several threads may work on the same slots, each with areas of its own: one takes the rows of tables that leave the
    remainder ``share`` when divided by ``num_shares``.
    """
    source, areas = Source(*source), Areas(*areas)
    S, K, row_size = source.num_slots, source.num_partitions, source.row_size
    sums, rows, indices = reserve(K * 8), reserve(rows_bytes(source)), reserve(K * BLOCK * 8)
    positions, starts = reserve(BLOCK * 8), reserve(BLOCK * 8)
    init_areas(kind, W, source, areas, num_shares)
    for a in range(areas.count):
        s = slot_of(areas, a)
        begin, end = slot_ids(source, s)
        both, mult = has_both(source, s), multiplies(source, s)
        first, last = 0, 1 if both else partitions_of(source, s)
        while first < last:  # where there are both: rows of ids' own, then composed ones
            num_parts, first_rows = last - first, rows + first * BLOCK * 8
            for k in range(num_parts):
                owner, part = owner_area(areas, a, first + k)
                put(INT64, sums, k, header(owner, K, SUMS, part))
            for p in range(begin, end, BLOCK):
                n = min(BLOCK, end - p)
                prefetch_words(source, s, p + BLOCK, min(BLOCK, end - p - n))
                block_rows(source, s, p, n, first, last, row_size if mult and num_parts > 1 else 0, rows)
                count = _positions(first_rows, n, positions)
                for q in range(count):
                    i = p + item(INT64, positions, q)
                    b = np.int64(item(INT32, source.entries, i)) if source.entries else i
                    put(INT64, starts, q, (b * S + s) * W)
                    prefetch(grad + (b * S + s) * row_size)
                for k in range(num_parts):
                    owner, part = owner_area(areas, a, first + k)
                    base, pitch = part_item(source, s, first + k, BASE), part_item(source, s, first + k, PITCH)
                    table = (base, num_rows_of(source, s, first + k), pitch, share, num_shares)
                    block = (positions, count, first_rows + k * BLOCK * 8, indices + k * BLOCK * 8)
                    _index_rows(kind, W, owner, K, part, *table, *block)
                factors = source.factors + p * size_of(accumulator(kind)) if source.factors else 0
                ids = (positions, count, first_rows, num_parts, mult, indices, sums)
                _add_block(kind, W, source.stored, row_size, grad, starts, factors, *ids)
            first, last = last, partitions_of(source, s)


@over_columns
def _add_row(zero, j, kind, W, sum_, value):
    float_kind = accumulator(kind)
    store(float_kind, sum_, j, load(float_kind, zero, sum_, j) + load(float_kind, zero, value, j))


@kernel
def sum_rows(kind, W, rows, values, num_values, num_rows, areas, share, num_shares):
    """Sum ``values`` ``[N, W]`` by ``rows`` ``[N]`` into one area; rows may repeat, and those below 0 are left out."""
    area, size = Areas(*areas).address, W * size_of(accumulator(kind))
    put(INT64, area, CAPACITY, min(num_values, num_rows // num_shares + 1))
    block, indices, positions = reserve(BLOCK * 8), reserve(BLOCK * 8), reserve(BLOCK * 8)
    init_part(kind, W, area, 1, 0, num_rows, area + HEADER * 8)
    sums = header(area, 1, SUMS, 0)
    for p in range(0, num_values, BLOCK):
        n = min(BLOCK, num_values - p)
        for i in range(n):
            put(INT64, block, i, item(INT64, rows, p + i))
        count = _positions(block, n, positions)
        _index_rows(kind, W, area, 1, 0, 0, num_rows, 1, share, num_shares, positions, count, block, indices)
        for q in range(count):
            index = item(INT64, indices, q)
            if index >= 0:
                _add_row(kind, W, sums + index * size, values + (p + item(INT64, positions, q)) * size)


@over_columns
def _copy(zero, j, kind, W, out, sum_):
    store(kind, out, j, load(accumulator(kind), zero, sum_, j))


@kernel
def count_rows(areas):
    """How many distinct rows all areas have."""
    areas, count = Areas(*areas), 0
    for a in range(areas.count):
        for k in range(areas.num_partitions):
            count += header(area_of(areas, a), areas.num_partitions, COUNT, k)
    return count


@kernel
def write_dense(kind, W, out, areas):
    """Write the sums of all areas into a gradient ``[R, W]`` that is zero elsewhere."""
    areas = Areas(*areas)
    K = areas.num_partitions
    for a in range(areas.count):
        area = area_of(areas, a)
        for k in range(K):
            distinct, sums = header(area, K, DISTINCT, k), header(area, K, SUMS, k)
            for u in range(header(area, K, COUNT, k)):
                row = out + item(INT64, distinct, u) * W * size_of(kind)
                _copy(kind, W, row, sums + u * W * size_of(accumulator(kind)))


@kernel
def write_sparse(kind, W, rows, values, areas):
    """Write the distinct rows ``[U]`` of all areas and their sums ``[U, W]``."""
    areas = Areas(*areas)
    K, float_kind, written = areas.num_partitions, accumulator(kind), 0
    size = W * size_of(float_kind)
    for a in range(areas.count):
        area = area_of(areas, a)
        for k in range(K):
            distinct, sums = header(area, K, DISTINCT, k), header(area, K, SUMS, k)
            for u in range(header(area, K, COUNT, k)):
                put(INT64, rows, written, item(INT64, distinct, u))
                _copy(float_kind, W, values + written * size, sums + u * size)
                written += 1


@over_columns
def _add_dot(zero, j, kind, W, stored, row_size, sums, i, grad, rows, num_parts, both, mult):
    product = compose(zero, j, kind, stored, row_size, rows, i, num_parts, both, mult) * load(kind, zero, grad, j)
    put(accumulator(kind), sums, i, item(accumulator(kind), sums, i) + total(product))


@kernel
def sample_weights(kind, W, source, out, grad, f, first, last):
    """Write the gradient of the sample weights of ids ``first`` to ``last``, all of feature ``f``."""
    source = Source(*source)
    S, float_kind, row_size = source.num_slots, accumulator(kind), source.row_size
    rows = reserve(rows_bytes(source))
    first_slot, num_slots = layout_item(source, source.spans, 2 * f), layout_item(source, source.spans, 2 * f + 1)
    for p in range(first, last, BLOCK):
        n = min(BLOCK, last - p)
        sums = out + p * size_of(float_kind)
        for i in range(n):
            put(float_kind, sums, i, 0)
        for s in range(first_slot, first_slot + num_slots):
            num_parts, both, mult = partitions_of(source, s), has_both(source, s), multiplies(source, s)
            block_rows(source, s, p, n, 0, num_parts, row_size, rows)
            for i in range(n):
                vector = grad + (item(INT32, source.entries, p + i) * S + s) * row_size
                _add_dot(kind, W, source.stored, row_size, sums, i, vector, rows, num_parts, both, mult)
        for i in range(n):
            put(float_kind, sums, i, item(float_kind, sums, i) * item(float_kind, source.factors, p + i))

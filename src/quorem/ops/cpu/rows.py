"""Which rows of ``stored`` an id reads: the formula ``p(i) = (i // stride) % size``, compiled.

The rows of a block of ids of one slot are computed together, so that choices such as "is there a permutation?" are
made once per block, not once per id.

A division by a number known only at run time costs as much as the rest of a lookup. Here it is a product with the
reciprocal in float64, corrected by looking at the remainder: exact below 2**52. Larger tables divide integers.
"""

from typing import NamedTuple

import numpy as np

from ..layout import (
    BASE,
    FEATURE,
    LIMIT,
    MAP,
    MULT,
    MULTIPLIER,
    OPERATION,
    PADDING,
    PART_COLUMNS,
    PITCH,
    SHIFT,
    SIZE,
    SLOT_COLUMNS,
    STRIDE,
)
from .compiled import inner, kernel
from .vector import INT32, INT64, item, prefetch, put, size_of

VALID, INVALID_IDS, MISFIT = range(3)  # what a kernel returns: the last if the layout names rows that do not exist
BLOCK = 64  # ids at a time: all their rows are prefetched before the first is used
_EXACT = 2**52


class Source(NamedTuple):
    """Where kernels find the ids of a batch and the rows that these read. Tensors are given by address, 0 for none.

    Numba takes a microsecond to recognize a named tuple. So kernels take the fields as a plain tuple, and start by
    naming them.
    """

    stored: int  # [R, W]
    num_rows: int  # R
    width: int  # W
    slots: int
    parts: int
    maps: int
    spans: int
    num_slots: int  # S
    num_partitions: int  # K
    num_map_entries: int  # M
    num_features: int  # F
    ids: int
    ids_are_int64: int  # else int32
    entry_stride: int  # elements from an id to the same feature's id in the next batch entry
    feature_stride: int
    batch_size: int  # B
    offsets: int = 0  # int64 [F * B + 1] of jagged ids; this and the following are 0 for a lookup
    entries: int = 0  # int32 [V]: the batch entry of each jagged id
    factors: int = 0  # [V], in the accumulator's dtype: what each jagged id's vector is multiplied by


@inner
def slot_item(source, s, column):
    """An entry of ``slots``."""
    return item(INT64, source.slots, s * SLOT_COLUMNS + column)


@inner
def part_item(source, s, k, column):
    """An entry of ``parts``."""
    return item(INT64, source.parts, (s * source.num_partitions + k) * PART_COLUMNS + column)


@inner
def partitions_of(source, s):
    """Number of partitions of a slot."""
    count = 0
    while count < source.num_partitions and part_item(source, s, count, BASE) >= 0:
        count += 1
    return count


@inner
def multiplies(source, s):
    """Whether a slot's operation is the product."""
    return slot_item(source, s, OPERATION) == MULT


@inner
def fits(source):
    """Whether every row that the layout names is one of ``stored``.

    Kernels work on plain addresses, so this is asked once by every op.
    """
    for f in range(source.num_features):
        first, count = item(INT64, source.spans, 2 * f), item(INT64, source.spans, 2 * f + 1)
        if first < 0 or count < 1 or first > source.num_slots - count:
            return False
    for s in range(source.num_slots):
        feature, limit, num_parts = slot_item(source, s, FEATURE), slot_item(source, s, LIMIT), partitions_of(source, s)
        if feature < 0 or feature >= source.num_features or limit < 1 or num_parts == 0:
            return False
        for k in range(num_parts):
            size, pitch = part_item(source, s, k, SIZE), part_item(source, s, k, PITCH)
            last, map_start = source.num_rows - 1 - part_item(source, s, k, BASE), part_item(source, s, k, MAP)
            if part_item(source, s, k, STRIDE) < 1 or size < 1 or pitch < 1 or last < 0 or size - 1 > last // pitch:
                return False
            if map_start >= 0 and map_start > source.num_map_entries - limit:
                return False
    return True


@kernel
def source_fits(source):
    """``fits``, for ops that ask before they run a kernel."""
    return fits(Source(*source))


@inner
def rows_bytes(source):
    """Memory that ``block_rows`` needs: rows ``[K, BLOCK]`` and scratch ``[BLOCK]``."""
    return (source.num_partitions + 1) * BLOCK * 8


@inner
def block_rows(kind, source, s, first, n, rows):
    """Fill ``rows`` ``[K, BLOCK]`` with what ids ``first`` to ``first + n`` of slot ``s`` read, -1 where nothing.

    Returns:
        Whether an id was out of range.
    """
    ids = rows + source.num_partitions * BLOCK * 8
    any_invalid = _read_ids(source, s, first, n, ids)
    for k in range(partitions_of(source, s)):
        _partition_rows(source, s, k, n, ids, rows + k * BLOCK * 8)
        if part_item(source, s, k, SIZE) > BLOCK:
            for i in range(n):
                row = max(item(INT64, rows, k * BLOCK + i), 0)
                prefetch(source.stored + row * source.width * size_of(kind))
    return any_invalid


@inner
def _read_ids(source, s, first, n, ids):
    """Fill ``ids`` with permuted ids, -1 for padding and for ids out of range.

    Returns:
        Whether an id was out of range.
    """
    step = source.entry_stride
    start = first * step + slot_item(source, s, FEATURE) * source.feature_stride
    limit, padding = slot_item(source, s, LIMIT), slot_item(source, s, PADDING)
    multiplier, shift = slot_item(source, s, MULTIPLIER), slot_item(source, s, SHIFT)
    if source.ids_are_int64:
        for i in range(n):
            put(INT64, ids, i, item(INT64, source.ids, start + i * step))
    else:
        for i in range(n):
            put(INT64, ids, i, item(INT32, source.ids, start + i * step))
    any_invalid = False
    for i in range(n):
        invalid = np.uint64(item(INT64, ids, i)) >= np.uint64(limit)
        any_invalid |= invalid
        put(INT64, ids, i, -1 if invalid else item(INT64, ids, i))
    if padding >= 0:
        for i in range(n):
            put(INT64, ids, i, -1 if item(INT64, ids, i) == padding else item(INT64, ids, i))
    if multiplier != 1 or shift != 0:
        for i in range(n):
            permuted = np.uint64(multiplier) * np.uint64(max(item(INT64, ids, i), 0)) + np.uint64(shift)
            put(INT64, ids, i, -1 if item(INT64, ids, i) < 0 else np.int64(permuted % np.uint64(limit)))
    return any_invalid


@inner
def _partition_rows(source, s, k, n, ids, rows):
    """Fill ``rows`` with the row of each id in partition ``k``, -1 where the id is negative."""
    stride, size = part_item(source, s, k, STRIDE), part_item(source, s, k, SIZE)
    base, pitch = part_item(source, s, k, BASE), part_item(source, s, k, PITCH)
    map_start, limit = part_item(source, s, k, MAP), slot_item(source, s, LIMIT)
    if map_start >= 0:
        for i in range(n):
            put(INT64, rows, i, item(INT64, source.maps, map_start + max(item(INT64, ids, i), 0)))
    elif stride > 1:
        _divide(ids, n, stride, limit, rows)
    else:
        for i in range(n):
            put(INT64, rows, i, item(INT64, ids, i))
    if map_start < 0 and (limit - 1) // stride >= size:
        _remainder(rows, n, size, limit)
    for i in range(n):
        put(INT64, rows, i, -1 if item(INT64, ids, i) < 0 else base + item(INT64, rows, i) * pitch)


@inner
def _divide(x, n, divisor, limit, quotient):
    """``quotient = x // divisor``; ``limit`` bounds x."""
    if limit <= _EXACT:
        reciprocal = 1.0 / divisor
        for i in range(n):
            q = np.int64(item(INT64, x, i) * reciprocal)
            rest = item(INT64, x, i) - q * divisor
            put(INT64, quotient, i, q - (1 if rest < 0 else 0) + (1 if rest >= divisor else 0))
    else:
        for i in range(n):
            put(INT64, quotient, i, np.int64(np.uint64(max(item(INT64, x, i), 0)) // np.uint64(divisor)))


@inner
def _remainder(x, n, divisor, limit):
    """``x %= divisor`` in place; ``limit`` bounds x."""
    if limit <= _EXACT:
        reciprocal = 1.0 / divisor
        for i in range(n):
            rest = item(INT64, x, i) - np.int64(item(INT64, x, i) * reciprocal) * divisor
            rest += divisor if rest < 0 else 0
            put(INT64, x, i, rest - (divisor if rest >= divisor else 0))
    else:
        for i in range(n):
            put(INT64, x, i, np.int64(np.uint64(max(item(INT64, x, i), 0)) % np.uint64(divisor)))

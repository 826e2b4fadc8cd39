"""From ids to rows of the weight, a block of ids of one slot at a time, so that choices fall per slot, not per id.

A division by a number known only at run time costs as much as the rest of a lookup. Here it is a product with the
reciprocal in float64, put right by comparing the remainder: exact below 2**52, and larger tables divide integers.

Kernels share three tuples of integers, where memory is an address:

    source  ids, whether they are int64 (else int32), and the steps from one batch entry and one feature to the next
    layout  slots, parts, maps, S, K
    table   weight, W
"""

import numpy as np

from ..layout import BASE, FEATURE, LIMIT, MAP, MULT, MULTIPLIER, OPERATION, PADDING, PITCH, SHIFT, SIZE, STRIDE
from .compiled import inner
from .vector import INT32, INT64, item, prefetch, put, size_of

BLOCK = 64  # ids at a time: their rows are asked for before the first is used
SLOT_COLUMNS, PART_COLUMNS = 6, 5
_EXACT = 2**52


@inner
def slot_item(layout, s, column):
    """An entry of ``slots``."""
    return item(INT64, layout[0], s * SLOT_COLUMNS + column)


@inner
def part_item(layout, s, k, column):
    """An entry of ``parts``."""
    return item(INT64, layout[1], (s * layout[4] + k) * PART_COLUMNS + column)


@inner
def partitions_of(layout, s):
    """Number of partitions of a slot."""
    used = 0
    while used < layout[4] and part_item(layout, s, used, BASE) >= 0:
        used += 1
    return used


@inner
def multiplies(layout, s):
    """Whether a slot's operation is the product."""
    return slot_item(layout, s, OPERATION) == MULT


@inner
def rows_bytes(layout):
    """Memory that ``block_rows`` needs: rows ``[K, BLOCK]`` and scratch ``[BLOCK]``."""
    return (layout[4] + 1) * BLOCK * 8


@inner
def block_rows(kind, source, layout, table, s, first, n, rows):
    """Fill ``rows`` ``[K, BLOCK]`` with what ids ``first`` to ``first + n`` of slot ``s`` read, -1 where nothing.

    Returns:
        Whether an id was out of range.
    """
    x = rows + layout[4] * BLOCK * 8
    outside = _read(source, layout, s, first, n, x)
    for k in range(partitions_of(layout, s)):
        _find(layout, s, k, n, x, rows + k * BLOCK * 8)
        if part_item(layout, s, k, SIZE) > BLOCK:
            for i in range(n):
                row = max(item(INT64, rows, k * BLOCK + i), 0)
                prefetch(table[0] + row * table[1] * size_of(kind))
    return outside


@inner
def _read(source, layout, s, first, n, x):
    """Fill ``x`` with ids after the slot's permutation, -1 for padding and out of range; whether any was the latter."""
    ids, wide, step, column = source
    start = first * step + slot_item(layout, s, FEATURE) * column
    limit, padding = slot_item(layout, s, LIMIT), slot_item(layout, s, PADDING)
    multiplier, shift = slot_item(layout, s, MULTIPLIER), slot_item(layout, s, SHIFT)
    if wide:
        for i in range(n):
            put(INT64, x, i, item(INT64, ids, start + i * step))
    else:
        for i in range(n):
            put(INT64, x, i, item(INT32, ids, start + i * step))
    outside = False
    for i in range(n):
        wrong = np.uint64(item(INT64, x, i)) >= np.uint64(limit)
        outside |= wrong
        put(INT64, x, i, -1 if wrong else item(INT64, x, i))
    if padding >= 0:
        for i in range(n):
            put(INT64, x, i, -1 if item(INT64, x, i) == padding else item(INT64, x, i))
    if multiplier != 1 or shift != 0:
        for i in range(n):
            moved = np.uint64(multiplier) * np.uint64(max(item(INT64, x, i), 0)) + np.uint64(shift)
            put(INT64, x, i, -1 if item(INT64, x, i) < 0 else np.int64(moved % np.uint64(limit)))
    return outside


@inner
def _find(layout, s, k, n, x, row):
    """Fill ``row`` with the row of each id in ``x``, -1 where that is negative."""
    stride, size = part_item(layout, s, k, STRIDE), part_item(layout, s, k, SIZE)
    base, pitch = part_item(layout, s, k, BASE), part_item(layout, s, k, PITCH)
    mapped, limit = part_item(layout, s, k, MAP), slot_item(layout, s, LIMIT)
    if mapped >= 0:
        for i in range(n):
            put(INT64, row, i, item(INT64, layout[2], mapped + max(item(INT64, x, i), 0)))
    elif stride > 1:
        _divide(x, n, stride, limit, row)
    else:
        for i in range(n):
            put(INT64, row, i, item(INT64, x, i))
    if mapped < 0 and (limit - 1) // stride >= size:
        _remainder(row, n, size, limit)
    for i in range(n):
        put(INT64, row, i, -1 if item(INT64, x, i) < 0 else base + item(INT64, row, i) * pitch)


@inner
def _divide(x, n, divisor, limit, quotient):
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
    """``x %= divisor`` in place."""
    if limit <= _EXACT:
        reciprocal = 1.0 / divisor
        for i in range(n):
            rest = item(INT64, x, i) - np.int64(item(INT64, x, i) * reciprocal) * divisor
            rest += divisor if rest < 0 else 0
            put(INT64, x, i, rest - (divisor if rest >= divisor else 0))
    else:
        for i in range(n):
            put(INT64, x, i, np.int64(np.uint64(max(item(INT64, x, i), 0)) % np.uint64(divisor)))

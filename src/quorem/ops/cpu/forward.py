"""Forward kernels: rows are found, combined and pooled in one pass; nothing but the output is written."""

import numpy as np

from ..layout import FEATURE, LIMIT, PADDING
from .compiled import inner, kernel
from .rows import BLOCK, block_rows, multiplies, partitions_of, rows_bytes, slot_item
from .vector import (
    INT32,
    INT64,
    fence,
    item,
    load,
    number,
    over_columns,
    put,
    reserve,
    size_of,
    splat,
    store,
    stream,
    total,
)


@inner
def compose(zero, j, kind, table, rows, i, used, mult):
    """Columns from ``j`` on of the vector of the block's id ``i``, as many as ``zero`` has lanes."""
    weight, W = table
    vector = load(kind, zero, weight, item(INT64, rows, i) * W + j)
    for k in range(1, used):
        row = load(kind, zero, weight, item(INT64, rows, k * BLOCK + i) * W + j)
        vector = vector * row if mult else vector + row
    return vector


@over_columns
def _compose_block(zero, j, kind, out, step, n, table, rows, used, mult, streamed):
    """Vectors of the block's ``n`` ids, ``step`` elements apart; -1 in the first row gives zeros."""
    weight, W = table
    pairs = used == 2 and mult  # the most common, and fastest if the compiler knows it
    for i in range(n):
        if item(INT64, rows, i) < 0:
            vector = zero
        elif pairs:
            vector = load(kind, zero, weight, item(INT64, rows, i) * W + j)
            vector = vector * load(kind, zero, weight, item(INT64, rows, BLOCK + i) * W + j)
        else:
            vector = compose(zero, j, kind, table, rows, i, used, mult)
        if streamed:
            stream(kind, out, i * step + j, vector)
        else:
            store(kind, out, i * step + j, vector)


@kernel
def lookup(kind, out, streamed, table, source, layout, first, last):
    """Composed vectors ``[B, S, W]`` of batch entries ``first`` to ``last``; whether an id was out of range."""
    S, W = layout[3], table[1]
    rows = reserve(rows_bytes(layout))
    outside = False
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for s in range(S):
            outside |= block_rows(kind, source, layout, table, s, b, n, rows)
            used, mult = partitions_of(layout, s), multiplies(layout, s)
            at = out + (b * S + s) * W * size_of(kind)
            _compose_block(kind, W, kind, at, S * W, n, table, rows, used, mult, streamed)
    if streamed:
        fence()
    return outside


@kernel
def spread_bags(kind, where, scale, weights, offsets, source, layout, spans, B, F, V, mean):
    """Tell every jagged id its batch entry (``where``, int32 ``[V]``) and its factor (``scale``, ``[V]``).

    The factor is the sample weight (1 where ``weights`` is 0), divided by the bag's valid ids for a mean.

    Returns:
        Whether the offsets rise within the ids; if not, nothing else may be done with them.
    """
    ids, wide, _, _ = source
    numbers = number(kind)
    for f in range(F):
        s = item(INT64, spans, 2 * f)
        limit, padding = slot_item(layout, s, LIMIT), slot_item(layout, s, PADDING)
        for b in range(B):
            begin, end = item(INT64, offsets, f * B + b), item(INT64, offsets, f * B + b + 1)
            if begin < 0 or end < begin or end > V:
                return False
            valid = 0
            if mean:
                for p in range(begin, end):
                    x = item(INT64, ids, p) if wide else np.int64(item(INT32, ids, p))
                    valid += 0 <= x < limit and x != padding
            for p in range(begin, end):
                factor = item(numbers, weights, p) if weights else numbers + 1
                put(INT32, where, p, b)
                put(numbers, scale, p, factor / max(valid, 1))
    return True


@over_columns
def _pool_to(zero, j, kind, out, carry, resumed, finished, table, rows, begin, end, scale, used, mult):
    """Add ids ``begin`` to ``end`` of the block to what their bag has so far, in ``out`` when that is its last."""
    pooled = load(number(kind), zero, carry, j) if resumed else zero
    for i in range(begin, end):
        if item(INT64, rows, i) >= 0:
            factor = splat(zero, item(number(kind), scale, i))
            pooled = pooled + compose(zero, j, kind, table, rows, i, used, mult) * factor
    if finished:
        store(kind, out, j, pooled)
    else:
        store(number(kind), carry, j, pooled)


@kernel
def bag(kind, out, table, source, layout, offsets, scale, carry, B, first, last):
    """Composed and pooled vectors ``[B, S, W]`` of batch entries ``first`` to ``last``.

    Blocks run on over the bags; ``carry`` ``[W]`` keeps the sum of a bag that ends in a later block.

    Returns:
        Whether an id was out of range.
    """
    S, W = layout[3], table[1]
    rows = reserve(rows_bytes(layout))
    outside = False
    for s in range(S):
        ends = offsets + (slot_item(layout, s, FEATURE) * B + 1) * 8
        p, stop = item(INT64, ends, first - 1), item(INT64, ends, last - 1)
        used, mult = partitions_of(layout, s), multiplies(layout, s)
        b, resumed = first, False
        while b < last:
            n = min(BLOCK, stop - p)
            outside |= block_rows(kind, source, layout, table, s, p, n, rows)
            begin, finished = 0, True
            while b < last and finished:
                finished = item(INT64, ends, b) <= p + n
                end = item(INT64, ends, b) - p if finished else n
                at, factors = out + (b * S + s) * W * size_of(kind), scale + p * size_of(number(kind))
                _pool_to(kind, W, kind, at, carry, resumed, finished, table, rows, begin, end, factors, used, mult)
                begin, resumed, b = end, not finished, b + finished
            p += n
    return outside


@over_columns
def _dot_to(zero, j, kind, sums, i, grad, table, rows, used, mult):
    product = compose(zero, j, kind, table, rows, i, used, mult) * load(kind, zero, grad, j)
    put(number(kind), sums, i, item(number(kind), sums, i) + total(product))


@kernel
def bag_sample_weights_backward(kind, out, grad, table, source, layout, spans, where, scale, f, first, last):
    """Gradient of the sample weights of ids ``first`` to ``last``, all of feature ``f``; accumulated in float."""
    S, W = layout[3], table[1]
    numbers = number(kind)
    rows = reserve(rows_bytes(layout))
    slot, count = item(INT64, spans, 2 * f), item(INT64, spans, 2 * f + 1)
    for p in range(first, last, BLOCK):
        n = min(BLOCK, last - p)
        sums = out + p * size_of(numbers)
        for i in range(n):
            put(numbers, sums, i, 0)
        for s in range(slot, slot + count):
            block_rows(kind, source, layout, table, s, p, n, rows)
            used, mult = partitions_of(layout, s), multiplies(layout, s)
            for i in range(n):
                if item(INT64, rows, i) >= 0:
                    at = grad + (item(INT32, where, p + i) * S + s) * W * size_of(kind)
                    _dot_to(kind, W, kind, sums, i, at, table, rows, used, mult)
        for i in range(n):
            put(numbers, sums, i, item(numbers, sums, i) * item(numbers, scale, p + i))
    return False

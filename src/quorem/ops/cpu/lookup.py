"""Composed lookup and bag: rows are found, combined and pooled in one pass; only the output is written."""

from ..layout import FEATURE, LIMIT, PADDING
from .codes import load_row
from .compiled import inner, kernel
from .memory import INT32, INT64, item, put, reserve, size_of
from .rows import block_rows, continues, next_rows, prefetch_words, rows_bytes
from .source import (
    BLOCK,
    Source,
    has_both,
    id_item,
    layout_item,
    multiplies,
    partitions_of,
    slot_item,
)
from .vector import accumulator, choose, fence, load, over_columns, splat, store, stream


@inner
def compose(zero, j, kind, stored, row_size, rows, i, num_parts, both, mult):
    """The vector of the block's id ``i``: as many columns as ``zero`` has lanes, zeros where it reads no row.

    ``rows`` are those of ``block_rows`` for all parts.
    """
    first = 1 if both else 0
    row = item(INT64, rows, first * BLOCK + i)
    if row < 0:
        return zero
    vector = load_row(kind, zero, stored, row_size, row, j)
    for k in range(first + 1, num_parts):
        other = load_row(kind, zero, stored, row_size, item(INT64, rows, k * BLOCK + i), j)
        combined = vector * other if mult else vector + other
        vector = choose(item(INT64, rows, i) >= 0, vector, combined) if both else combined
    return vector


@inner
def _write(out_kind, out, position, vector, streamed):
    if streamed:
        stream(out_kind, out, position, vector)
    else:
        store(out_kind, out, position, vector)


@over_columns
def _compose_block(zero, j, kind, W, stored, row_size, out_kind, out, step, n, rows, num_parts, both, mult, streamed):
    """Write the vectors of the block's ``n`` ids, ``step`` elements apart."""
    if num_parts == 3 and both:  # a pool; this and the next are the most common, fastest if the compiler knows them
        for i in range(n):
            vector = compose(zero, j, kind, stored, row_size, rows, i, 3, True, mult)
            _write(out_kind, out, i * step + j, vector, streamed)
    elif num_parts == 2 and mult and not both:
        for i in range(n):
            vector = compose(zero, j, kind, stored, row_size, rows, i, 2, False, True)
            _write(out_kind, out, i * step + j, vector, streamed)
    else:
        for i in range(n):
            vector = compose(zero, j, kind, stored, row_size, rows, i, num_parts, both, mult)
            _write(out_kind, out, i * step + j, vector, streamed)


@kernel
def lookup(kind, W, source, out_kind, out, streamed, first, last):
    """Write the composed vectors ``[B, S, W]`` of batch entries ``first`` to ``last`` as numbers of ``out_kind``.

    Returns:
        Whether an id was out of range.
    """
    source = Source(*source)
    S, row_size = source.num_slots, source.row_size
    rows = reserve(rows_bytes(source))
    any_invalid = False
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for s in range(S):
            if s + 1 < S:
                prefetch_words(source, s + 1, b, n)
            num_parts, both, mult = partitions_of(source, s), has_both(source, s), multiplies(source, s)
            if s > 0 and continues(source, s, num_parts):
                next_rows(n, num_parts, rows)
            else:
                any_invalid |= block_rows(source, s, b, n, 0, num_parts, row_size, rows)
            vectors = out + (b * S + s) * W * size_of(out_kind)
            block = (vectors, S * W, n, rows, num_parts, both, mult, streamed)
            _compose_block(kind, W, source.stored, row_size, out_kind, *block)
    if streamed:
        fence()
    return any_invalid


@kernel
def fill_bags(kind, source, sample_weights, num_ids, mean):
    """Fill ``entries`` and ``factors`` of ``source``.

    An id's factor is its sample weight (1 where ``sample_weights`` is 0), for a mean divided by the bag's valid ids.

    Returns:
        Whether the offsets rise and end within the ids. If not, the batch must not be used.
    """
    source = Source(*source)
    B, float_kind = source.batch_size, accumulator(kind)
    for f in range(source.num_features):
        s = layout_item(source, source.spans, 2 * f)
        limit, padding = slot_item(source, s, LIMIT), slot_item(source, s, PADDING)
        for b in range(B):
            begin, end = item(INT64, source.offsets, f * B + b), item(INT64, source.offsets, f * B + b + 1)
            if begin < 0 or end < begin or end > num_ids:
                return False
            valid = 0
            if mean:
                for p in range(begin, end):
                    x = id_item(source, p)
                    valid += 0 <= x < limit and x != padding
            for p in range(begin, end):
                factor = item(float_kind, sample_weights, p) if sample_weights else float_kind + 1
                put(INT32, source.entries, p, b)
                put(float_kind, source.factors, p, factor / max(valid, 1))
    return True


@over_columns
def _pool(
    zero,
    j,
    kind,
    W,
    stored,
    row_size,
    out_kind,
    out,
    carry,
    resumed,
    finished,
    rows,
    begin,
    end,
    factors,
    num_parts,
    both,
    mult,
):
    """Add ids ``begin`` to ``end`` of the block to their bag; write it to ``out`` if finished, else to ``carry``."""
    pooled = load(accumulator(kind), zero, carry, j) if resumed else zero
    for i in range(begin, end):
        if item(INT64, rows, (BLOCK if both else 0) + i) >= 0:
            factor = splat(zero, item(accumulator(kind), factors, i))
            pooled = pooled + compose(zero, j, kind, stored, row_size, rows, i, num_parts, both, mult) * factor
    if finished:
        store(out_kind, out, j, pooled)
    else:
        store(accumulator(kind), carry, j, pooled)


@kernel
def bag(kind, W, source, out_kind, out, carry, first, last):
    """Write the composed, then pooled vectors ``[B, S, W]`` of batch entries ``first`` to ``last``, as ``lookup`` does.

    A block of ids may end within a bag; ``carry`` ``[W]`` then keeps the sum so far.

    Returns:
        Whether an id was out of range.
    """
    source = Source(*source)
    S, row_size = source.num_slots, source.row_size
    rows = reserve(rows_bytes(source))
    any_invalid = False
    for s in range(S):
        ends = source.offsets + (slot_item(source, s, FEATURE) * source.batch_size + 1) * 8
        p, stop = item(INT64, ends, first - 1), item(INT64, ends, last - 1)
        num_parts, both, mult = partitions_of(source, s), has_both(source, s), multiplies(source, s)
        b, resumed = first, False
        while b < last:
            n = min(BLOCK, stop - p)
            any_invalid |= block_rows(source, s, p, n, 0, num_parts, row_size, rows)
            factors = source.factors + p * size_of(accumulator(kind))
            begin, finished = 0, True
            while b < last and finished:
                finished = item(INT64, ends, b) <= p + n
                end = item(INT64, ends, b) - p if finished else n
                vector = out + (b * S + s) * W * size_of(out_kind)
                state = (resumed, finished, rows, begin, end, factors, num_parts, both, mult)
                _pool(kind, W, source.stored, row_size, out_kind, vector, carry, *state)
                begin, resumed, b = end, not finished, b + finished
            p += n
    return any_invalid

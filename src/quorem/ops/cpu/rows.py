"""Which rows of ``stored`` an id reads: ``ops.rows``, compiled.

An id becomes a number: itself, or where some ids have rows of their own, its place among the others; then permuted or
mixed. A partition divides the number, ``(number // stride) % size``, or looks it up in a map. The rows of a block of
ids of one slot are computed together, so that choices such as "is there a permutation?" are made once per block.

A division by a number known only at run time costs as much as the rest of a lookup. Here it is a product with the
reciprocal in float64, corrected by looking at the remainder: exact below 2**52. Larger tables divide integers.
"""

import numpy as np

from ...paper.renumbering import MIXING_FACTORS
from ..layout import (
    BASE,
    BITS,
    COLD,
    COMPOSED,
    FEATURE,
    HOT,
    LIMIT,
    MAP,
    MULTIPLIER,
    OFFSET,
    OWN,
    PADDING,
    PITCH,
    REST,
    SHIFT,
    SIZE,
    STRIDE,
)
from ..words import DIGIT
from .compiled import helper
from .memory import INT64, item, num_bits, prefetch, put
from .source import BLOCK, id_item, part_item, slot_item

_EXACT = 2**52
_FEW_WORDS = 512  # of a list, which are not prefetched
_FACTOR_1, _FACTOR_2, _FACTOR_3 = (np.uint64(factor) for factor in MIXING_FACTORS)


@helper
def rows_bytes(source):
    """Memory that ``block_rows`` needs: rows ``[K, BLOCK]`` and scratch ``[2, BLOCK]``."""
    return (source.num_partitions + 2) * BLOCK * 8


@helper
def block_rows(source, s, first, n, begin, end, row_size, rows):
    """Fill ``rows`` ``[K, BLOCK]`` with what ids ``first`` to ``first + n`` of slot ``s`` read, -1 where nothing.

    Only for parts ``begin`` to ``end``. If these are all parts, ids with rows of their own have these in the others
    as well, so that every id reads as many rows: no branch could predict which ids have rows of their own. The rows are
    prefetched if ``row_size``, their bytes, is not 0.

    Returns:
        Whether an id was out of range.
    """
    numbers = rows + source.num_partitions * BLOCK * 8
    any_invalid = _read_ids(source, s, first, n, numbers)
    has_own = slot_item(source, s, OWN) > 0
    if has_own:
        _find_own(source, s, n, numbers, rows)
    first_composed = max(begin, 1 if has_own else 0)
    if first_composed < end:
        _permute(source, s, n, numbers)
    for k in range(first_composed, end):
        _partition_rows(source, s, k, n, numbers, rows + k * BLOCK * 8)
        if has_own and begin == 0:
            for i in range(n):
                put(INT64, rows, k * BLOCK + i, max(item(INT64, rows, i), item(INT64, rows, k * BLOCK + i)))
    if row_size:
        for k in range(begin if first_composed == end else first_composed, end):
            _prefetch_rows(source, s, k, n, row_size, rows)
    return any_invalid


@helper
def prefetch_words(source, s, first, n):
    """Prefetch the words in which ``block_rows`` will search the same ids, unless they are few."""
    shift = DIGIT * source.levels
    if source.levels == 0 or slot_item(source, s, HOT) < 0 or slot_item(source, s, LIMIT) >> shift < _FEW_WORDS:
        return
    words = source.maps + slot_item(source, s, HOT) * 8
    step = source.entry_stride
    start = first * step + slot_item(source, s, FEATURE) * source.feature_stride
    for i in range(n):
        prefetch(words + (id_item(source, start + i * step) >> shift) * 8)


@helper
def _prefetch_rows(source, s, k, n, row_size, rows):
    """Prefetch ``n`` rows of part ``k``, unless the part is small."""
    if part_item(source, s, k, SIZE) > BLOCK:
        for i in range(n):
            row = source.stored + max(item(INT64, rows, k * BLOCK + i), 0) * row_size
            prefetch(row)
            if row_size % 64:
                prefetch(row + row_size - 1)  # it may begin in one cache line and end in the next


@helper
def _read_ids(source, s, first, n, ids):
    """Fill ``ids``, with -1 for padding and for ids out of range.

    Returns:
        Whether an id was out of range.
    """
    step = source.entry_stride
    start = first * step + slot_item(source, s, FEATURE) * source.feature_stride
    limit, padding = slot_item(source, s, LIMIT), slot_item(source, s, PADDING)
    for i in range(n):
        put(INT64, ids, i, id_item(source, start + i * step))
    any_invalid = False
    for i in range(n):  # apart from the above, so that it runs in vector instructions
        invalid = np.uint64(item(INT64, ids, i)) >= np.uint64(limit)
        any_invalid |= invalid
        put(INT64, ids, i, -1 if invalid else item(INT64, ids, i))
    if padding >= 0:
        for i in range(n):
            put(INT64, ids, i, -1 if item(INT64, ids, i) == padding else item(INT64, ids, i))
    return any_invalid


@helper
def _find_own(source, s, n, ids, rows):
    """Fill ``rows`` with rows of ids' own, -1 for other ids. Ids become numbers, negative for ids that have none.

    The places of ids in the table are those of ``ops.rows._places``. Without lists of ids, hot ids are the lowest.
    """
    limit, num_own, rest = slot_item(source, s, LIMIT), slot_item(source, s, OWN), slot_item(source, s, REST)
    base, pitch = part_item(source, s, 0, BASE), part_item(source, s, 0, PITCH)
    has_rest, start = rest < limit, slot_item(source, s, HOT)
    hot = num_own - 1 if has_rest else num_own  # ids with a row that no other id has
    if start < 0:
        for i in range(n):
            x = item(INT64, ids, i)
            place = hot if x >= rest else (x + 1 if has_rest else x)
            _put_place(x if x < hot else place, i, num_own, base, pitch, ids, rows)
        return
    in_hot, in_cold = ids + BLOCK * 8, rows
    _search(source, start, n, ids, in_hot)
    if has_rest:
        _search(source, slot_item(source, s, COLD), n, ids, in_cold)
        for i in range(n):
            x, hot_place, cold_place = item(INT64, ids, i), item(INT64, in_hot, i), item(INT64, in_cold, i)
            place = num_own + (cold_place >> 1) if cold_place & 1 else hot
            place = hot_place >> 1 if hot_place & 1 else place
            _put_place(x if x < 0 else place, i, num_own, base, pitch, ids, rows)
    else:
        for i in range(n):
            x, place = item(INT64, ids, i), item(INT64, in_hot, i)
            place = place >> 1 if place & 1 else num_own + x - (place >> 1)
            _put_place(x if x < 0 else place, i, num_own, base, pitch, ids, rows)


@helper
def _put_place(place, i, num_own, base, pitch, numbers, rows):
    put(INT64, rows, i, base + place * pitch if np.uint64(place) < np.uint64(num_own) else -1)
    put(INT64, numbers, i, place - num_own)


@helper
def _search(source, start, n, ids, places):
    """Fill ``places`` with twice how many entries of a list are below each id, plus 1 if the id is one of them.

    The words of the list are at ``start``; one is read for each level.
    """
    shift = DIGIT * (source.levels - 1)
    for i in range(n):
        put(INT64, places, i, item(INT64, source.maps, start + (max(item(INT64, ids, i), 0) >> (shift + DIGIT))))
    for i in range(n):  # apart from the above, so that it runs in vector instructions
        put(INT64, places, i, _place_in_word(item(INT64, places, i), item(INT64, ids, i) >> shift, 1))
    while shift > 0:
        shift -= DIGIT
        for i in range(n):
            place = item(INT64, places, i)
            word = item(INT64, source.maps, place >> 1)
            put(INT64, places, i, _place_in_word(word, item(INT64, ids, i) >> shift, place & 1))


@helper
def _place_in_word(word, number, stored):
    """Twice the number of entries (or stored words) before ``number``, plus 1 if ``number`` has a bit in ``word``.

    ``stored`` is 0 if the word of ``number`` is not stored, and ``word`` is the first one after it.
    """
    digit = number & 31
    return 2 * ((word >> 32) + num_bits(word & ((stored << digit) - stored))) + (stored & (word >> digit))


@helper
def _permute(source, s, n, numbers):
    """Permute or mix the numbers, as the slot says; -1 stays."""
    multiplier, shift = slot_item(source, s, MULTIPLIER), slot_item(source, s, SHIFT)
    if multiplier != 1 or shift != 0:
        count = np.uint64(slot_item(source, s, COMPOSED))
        for i in range(n):
            permuted = np.uint64(multiplier) * np.uint64(max(item(INT64, numbers, i), 0)) + np.uint64(shift)
            put(INT64, numbers, i, -1 if item(INT64, numbers, i) < 0 else np.int64(permuted % count))
    bits, offset = slot_item(source, s, BITS), slot_item(source, s, OFFSET)
    if bits > 0:  # ``renumbering.mixed_numbers``
        half, mask = np.uint64(bits // 2 + 1), np.uint64((1 << bits) - 1)
        for i in range(n):
            x = np.uint64(max(item(INT64, numbers, i), 0) + offset) & mask
            x = ((x ^ (x >> half)) * _FACTOR_1) & mask
            x = ((x ^ (x >> half)) * _FACTOR_2) & mask
            x = ((x ^ (x >> half)) * _FACTOR_3) & mask
            put(INT64, numbers, i, -1 if item(INT64, numbers, i) < 0 else np.int64(x ^ (x >> half)))


@helper
def _partition_rows(source, s, k, n, numbers, rows):
    """Fill ``rows`` with the row of each number in partition ``k``, -1 where the number is negative."""
    stride, size = part_item(source, s, k, STRIDE), part_item(source, s, k, SIZE)
    base, pitch = part_item(source, s, k, BASE), part_item(source, s, k, PITCH)
    map_start, bits = part_item(source, s, k, MAP), slot_item(source, s, BITS)
    limit = 1 << bits if bits > 0 else slot_item(source, s, COMPOSED)  # of the numbers
    if map_start >= 0:
        for i in range(n):
            put(INT64, rows, i, item(INT64, source.maps, map_start + max(item(INT64, numbers, i), 0)))
    elif limit <= _EXACT:
        for i in range(n):
            put(INT64, rows, i, item(INT64, numbers, i))
        if stride > 1:
            for i in range(n):
                put(INT64, rows, i, _quotient(item(INT64, rows, i), stride, 1.0 / stride))
        if (limit - 1) // stride >= size:
            for i in range(n):
                bucket = item(INT64, rows, i)
                put(INT64, rows, i, bucket - _quotient(bucket, size, 1.0 / size) * size)
    else:
        for i in range(n):
            number = np.uint64(max(item(INT64, numbers, i), 0))
            put(INT64, rows, i, np.int64(number // np.uint64(stride) % np.uint64(size)))
    for i in range(n):
        put(INT64, rows, i, -1 if item(INT64, numbers, i) < 0 else base + item(INT64, rows, i) * pitch)


@helper
def _quotient(number, divisor, reciprocal):
    quotient = np.int64(number * reciprocal)
    rest = number - quotient * divisor
    return quotient - (1 if rest < 0 else 0) + (1 if rest >= divisor else 0)

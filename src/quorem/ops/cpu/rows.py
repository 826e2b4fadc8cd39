"""The ids of a batch, and which rows of ``stored`` they read: ``ops.rows``, compiled.

An id becomes a number: itself, or where some ids have rows of their own, its place among the others; then mixed over
a pool. A partition divides the number, ``(number // stride) % size``, or looks it up in a map. The rows of a block of
ids of one slot are computed together, so that choices such as "is there a pool?" are made once per block.

A division by a number known only at run time costs as much as the rest of a lookup. Here it is a product with the
reciprocal in float64, corrected by looking at the remainder: exact below 2**52. Larger tables divide integers.
"""

from typing import Any, NamedTuple

import numpy as np

from ...paper.renumbering import MIXING_FACTORS
from .. import layout as column
from ..words import DIGIT
from .compiled import helper, kernel
from .vector import INT32, INT64, item, num_bits, prefetch, put, wide

BLOCK = 128  # ids at a time: all their rows are prefetched before the first is used
_EXACT = 2**52
_FEW_WORDS = 512  # of a list, which are not prefetched
_FACTOR_1, _FACTOR_2, _FACTOR_3 = (np.uint64(factor) for factor in MIXING_FACTORS)


class Source(NamedTuple):
    """Where kernels find the ids of a batch and the rows that these read. Tensors are given by address, 0 for none.

    Numba takes a microsecond to recognize a named tuple. So kernels take the fields as a plain tuple, and start by
    naming them.
    """

    stored: int  # [R, W]
    row_size: int  # bytes of a row
    slots: int  # HOT and COLD are where the words of a list begin in ``maps``
    parts: int
    maps: int  # with the words of lists of hot and cold ids (``ops.words``)
    spans: int
    levels: int  # of the words; 0 if there are none
    num_slots: int  # S
    num_partitions: int  # K
    num_features: int  # F
    integer: Any  # of the type of ``slots``, ``parts`` and ``spans``: np.int32(0) or np.int64(0)
    ids: int
    ids_are_int64: int  # else int32
    entry_stride: int  # elements from an id to the same feature's id in the next batch entry
    feature_stride: int
    batch_size: int  # B
    offsets: int = 0  # int64 [F * B + 1] of jagged ids; this and the following are 0 for a lookup
    entries: int = 0  # int32 [V]: the batch entry of each jagged id
    factors: int = 0  # [V], in the accumulator's dtype: what each jagged id's vector is multiplied by


@helper
def id_item(source, position):
    """An id of the batch."""
    return item(INT64, source.ids, position) if source.ids_are_int64 else np.int64(item(INT32, source.ids, position))


@helper
def slot_item(source, s, c):
    """An entry of ``slots``."""
    return np.int64(item(source.integer, source.slots, s * column.SLOT_COLUMNS + c))


@helper
def part_item(source, s, k, c):
    """An entry of ``parts``."""
    return np.int64(item(source.integer, source.parts, (s * source.num_partitions + k) * column.PART_COLUMNS + c))


class Composition(NamedTuple):
    """How a slot combines its rows."""

    num_parts: int
    both: bool  # whether some ids have rows of their own, which are its first part, and others are composed
    mult: bool  # whether composed rows are multiplied; else they are added


@helper
def composition_of(source, s):
    """How slot ``s`` combines its rows."""
    count = 0
    while count < source.num_partitions and part_item(source, s, count, column.BASE) >= 0:
        count += 1
    both = slot_item(source, s, column.OWN) > 0 and count > 1
    return Composition(count, both, slot_item(source, s, column.OPERATION) == column.MULT)


@helper
def slot_ids(source, s):
    """The first and the last (excluded) id of a slot's feature, counted within the feature for a lookup."""
    f, B = slot_item(source, s, column.FEATURE), source.batch_size
    begin = item(INT64, source.offsets, f * B) if source.offsets else 0
    end = item(INT64, source.offsets, (f + 1) * B) if source.offsets else B
    return begin, end


@helper
def rows_bytes(source):
    """Memory that ``block_rows`` needs: rows ``[K, BLOCK]`` and scratch ``[2, BLOCK]``."""
    return (source.num_partitions + 2) * BLOCK * 8


@helper
def block_rows(source, s, first, n, begin, end, num_bytes, rows):
    """Fill ``rows`` ``[K, BLOCK]`` with what ids ``first`` to ``first + n`` of slot ``s`` read, -1 where nothing.

    Only for parts ``begin`` to ``end``. If these are all parts, ids with rows of their own have these in the others
    as well, so that every id reads as many rows: no branch could predict which ids have rows of their own. The rows are
    prefetched, as many bytes of each as ``num_bytes``. Returns whether an id was out of range.
    """
    numbers = rows + source.num_partitions * BLOCK * 8
    any_invalid = _read_ids(source, s, first, n, numbers)
    has_own = slot_item(source, s, column.OWN) > 0
    if has_own:
        _find_own(source, s, n, numbers, rows)
    first_composed = max(begin, 1 if has_own else 0)
    if first_composed < end:
        _mix(source, s, n, numbers)
    for k in range(first_composed, end):
        _partition_rows(source, s, k, n, numbers, rows + k * BLOCK * 8)
        if has_own and begin == 0:
            for i in range(n):
                put(INT64, rows, k * BLOCK + i, max(item(INT64, rows, i), item(INT64, rows, k * BLOCK + i)))
    if num_bytes:
        for k in range(begin if first_composed == end else first_composed, end):
            _prefetch_rows(source, s, k, n, num_bytes, rows)
    return any_invalid


@helper
def run_of(source, s, num_parts):
    """How many slots, from ``s`` on, are columns of the same rows of tables, which follow one another in ``stored``."""
    run = 1
    while s + run < source.num_slots and _continues(source, s + run, num_parts):
        run += 1
    return run


@helper
def _continues(source, s, num_parts):
    if slot_item(source, s, column.FEATURE) != slot_item(source, s - 1, column.FEATURE):
        return False
    for k in range(num_parts):
        follows = part_item(source, s, k, column.BASE) == part_item(source, s - 1, k, column.BASE) + 1
        same = part_item(source, s, k, column.SIZE) == part_item(source, s - 1, k, column.SIZE)
        if not follows or not same or part_item(source, s, k, column.PITCH) == 1:
            return False
    return True


@helper
def prefetch_words(source, s, first, n):
    """Prefetch the words in which ``block_rows`` will search the same ids, unless they are few."""
    hot, shift = slot_item(source, s, column.HOT), DIGIT * source.levels
    if source.levels == 0 or hot < 0 or slot_item(source, s, column.LIMIT) >> shift < _FEW_WORDS:
        return
    words = source.maps + hot * 8
    step = source.entry_stride
    start = first * step + slot_item(source, s, column.FEATURE) * source.feature_stride
    for i in range(n):
        prefetch(words + (id_item(source, start + i * step) >> shift) * 8)


@helper
def _prefetch_rows(source, s, k, n, num_bytes, rows):
    """Prefetch ``n`` rows of part ``k``, unless the part is small."""
    if part_item(source, s, k, column.SIZE) > BLOCK:
        for i in range(n):
            row = source.stored + max(item(INT64, rows, k * BLOCK + i), 0) * source.row_size
            prefetch(row)
            if num_bytes % 64:
                prefetch(row + num_bytes - 1)  # it may begin in one cache line and end in the next


@helper
def _read_ids(source, s, first, n, ids):
    """Fill ``ids``, with -1 for padding and for ids out of range; returns whether an id was out of range."""
    step = source.entry_stride
    start = first * step + slot_item(source, s, column.FEATURE) * source.feature_stride
    limit, padding = slot_item(source, s, column.LIMIT), slot_item(source, s, column.PADDING)
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

    The places of ids in the table are those of ``ops.rows.places``. Without lists of ids, hot ids are the lowest.
    """
    num_own, rest = slot_item(source, s, column.OWN), slot_item(source, s, column.REST)
    base, pitch = part_item(source, s, 0, column.BASE), part_item(source, s, 0, column.PITCH)
    has_rest, start = rest < slot_item(source, s, column.LIMIT), slot_item(source, s, column.HOT)
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
        _search(source, slot_item(source, s, column.COLD), n, ids, in_cold)
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
def _mix(source, s, n, numbers):
    """Mix the numbers over a pool if the slot has one; -1 stays."""
    bits, offset = slot_item(source, s, column.BITS), slot_item(source, s, column.OFFSET)
    if bits > 0:  # ``renumbering.mixing_rounds``
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
    stride, size = part_item(source, s, k, column.STRIDE), part_item(source, s, k, column.SIZE)
    base, pitch = part_item(source, s, k, column.BASE), part_item(source, s, k, column.PITCH)
    map_start, bits = part_item(source, s, k, column.MAP), slot_item(source, s, column.BITS)
    limit = 1 << bits if bits > 0 else slot_item(source, s, column.COMPOSED)  # of the numbers
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


@kernel
def fill_bags(kind, source, sample_weights, num_ids, mean):
    """Fill ``entries`` and ``factors`` of ``source``.

    An id's factor is its sample weight (1 where ``sample_weights`` is 0), for a mean divided by the bag's valid ids.
    Returns whether the offsets rise and end within the ids: if not, the batch must not be used.
    """
    source = Source(*source)
    B, float_kind = source.batch_size, wide(kind)
    for f in range(source.num_features):
        s = np.int64(item(source.integer, source.spans, 2 * f))
        limit, padding = slot_item(source, s, column.LIMIT), slot_item(source, s, column.PADDING)
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

"""The layout as kernels read it, and the ids of a batch; and whether the layout's rows are all there."""

from typing import NamedTuple

import numpy as np

from ..layout import (
    BASE,
    BITS,
    COLD,
    COMPOSED,
    FEATURE,
    HOT,
    LIMIT,
    MAP,
    MULT,
    OFFSET,
    OPERATION,
    OWN,
    PART_COLUMNS,
    PITCH,
    REST,
    SIZE,
    SLOT_COLUMNS,
    STRIDE,
)
from .compiled import helper, kernel
from .memory import INT32, INT64, item

VALID, INVALID_IDS, MISFIT = range(3)  # what a kernel returns: the last if the layout names rows that do not exist
BLOCK = 128  # ids at a time: all their rows are prefetched before the first is used


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
    ranks: int
    num_slots: int  # S
    num_partitions: int  # K
    num_map_entries: int  # M
    num_features: int  # F
    num_ranks: int  # H
    ranks_are_int64: int  # else int32
    words: int  # of the lists in ``ranks`` (``ops.words``)
    word_slots: int  # ``slots``, but HOT and COLD are where the words of a list begin
    levels: int  # of the words; 0 if there are none
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
    if source.ids_are_int64:
        return item(INT64, source.ids, position)
    return np.int64(item(INT32, source.ids, position))


@helper
def slot_item(source, s, column):
    """An entry of ``slots``."""
    return item(INT64, source.slots, s * SLOT_COLUMNS + column)


@helper
def part_item(source, s, k, column):
    """An entry of ``parts``."""
    return item(INT64, source.parts, (s * source.num_partitions + k) * PART_COLUMNS + column)


@helper
def partitions_of(source, s):
    """Number of partitions of a slot."""
    count = 0
    while count < source.num_partitions and part_item(source, s, count, BASE) >= 0:
        count += 1
    return count


@helper
def multiplies(source, s):
    """Whether a slot's operation is the product."""
    return slot_item(source, s, OPERATION) == MULT


@helper
def num_numbers(source, s):
    """How many numbers the partitions of a slot divide."""
    bits = slot_item(source, s, BITS)
    return 1 << bits if bits > 0 else slot_item(source, s, COMPOSED)


@helper
def num_hot(source, s):
    """How many of a slot's ids have a row that no other id has."""
    return slot_item(source, s, OWN) - (1 if slot_item(source, s, REST) < slot_item(source, s, LIMIT) else 0)


@helper
def has_both(source, s):
    """Whether some ids of a slot have rows of their own, which are its first part, and others are composed."""
    return slot_item(source, s, OWN) > 0 and partitions_of(source, s) > 1


@helper
def fits(source):
    """Whether every row that the layout names is one of ``stored``.

    Kernels work on plain addresses, so every op checks this once.
    """
    for f in range(source.num_features):
        first, count = item(INT64, source.spans, 2 * f), item(INT64, source.spans, 2 * f + 1)
        if first < 0 or count < 1 or first > source.num_slots - count:
            return False
    for s in range(source.num_slots):
        if not _slot_fits(source, s):
            return False
        num_parts, num_own, numbers = partitions_of(source, s), slot_item(source, s, OWN), num_numbers(source, s)
        for k in range(num_parts):
            size, pitch = part_item(source, s, k, SIZE), part_item(source, s, k, PITCH)
            last, map_start = source.num_rows - 1 - part_item(source, s, k, BASE), part_item(source, s, k, MAP)
            if part_item(source, s, k, STRIDE) < 1 or size < 1 or pitch < 1 or last < 0 or size - 1 > last // pitch:
                return False
            if map_start >= 0 and map_start > source.num_map_entries - numbers:
                return False
            if k == 0 and size < num_own:
                return False
    return True


@helper
def _slot_fits(source, s):
    """``fits`` for a row of ``slots``."""
    feature, limit, num_own = slot_item(source, s, FEATURE), slot_item(source, s, LIMIT), slot_item(source, s, OWN)
    if feature < 0 or feature >= source.num_features or limit < 1 or partitions_of(source, s) == 0:
        return False
    rest, composed, bits = slot_item(source, s, REST), slot_item(source, s, COMPOSED), slot_item(source, s, BITS)
    if num_own < 0 or num_own > limit or rest < 0 or rest > limit or composed < 1 or composed > limit:
        return False
    if bits < 0 or bits > 62 or slot_item(source, s, OFFSET) < 0 or (bits == 0 and slot_item(source, s, OFFSET) > 0):
        return False
    hot, hot_start, cold_start = num_hot(source, s), slot_item(source, s, HOT), slot_item(source, s, COLD)
    if hot < 0 or rest - hot > composed:
        return False
    if hot_start < 0:
        return True
    listed = rest - hot if rest < limit else 0
    return hot_start <= source.num_ranks - hot and 0 <= cold_start <= source.num_ranks - listed


@kernel
def source_fits(source):
    """``fits``, for ops that check before they run a kernel."""
    return fits(Source(*source))

"""The layout as kernels read it, and the ids of a batch."""

from typing import Any, NamedTuple

import numpy as np

from ..layout import (
    BASE,
    MULT,
    OPERATION,
    OWN,
    PART_COLUMNS,
    SLOT_COLUMNS,
)
from .compiled import helper
from .memory import INT32, INT64, item

BLOCK = 128  # ids at a time: all their rows are prefetched before the first is used


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
    if source.ids_are_int64:
        return item(INT64, source.ids, position)
    return np.int64(item(INT32, source.ids, position))


@helper
def layout_item(source, integers, position):
    """An integer of the layout: of ``slots``, ``parts`` or ``spans``."""
    return np.int64(item(source.integer, integers, position))


@helper
def slot_item(source, s, column):
    """An entry of ``slots``."""
    return layout_item(source, source.slots, s * SLOT_COLUMNS + column)


@helper
def part_item(source, s, k, column):
    """An entry of ``parts``."""
    return layout_item(source, source.parts, (s * source.num_partitions + k) * PART_COLUMNS + column)


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
def has_both(source, s):
    """Whether some ids of a slot have rows of their own, which are its first part, and others are composed."""
    return slot_item(source, s, OWN) > 0 and partitions_of(source, s) > 1

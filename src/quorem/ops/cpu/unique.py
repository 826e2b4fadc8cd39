"""Distinct values of segments by a hash table with linear probing: ``ops.unique``, compiled."""

import numpy as np

from .compiled import kernel

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: values in steps fall far apart


@kernel
def distinct(values, bounds, cells, uniques, inverse, counts):
    """Fill ``uniques`` with the distinct values of each segment, ``inverse`` with where each value is in it.

    Args:
        values: int64 [N].
        bounds: int64 [S + 1], of the segments.
        cells: memory for the hash table, at least twice as many as the longest segment has values, a power of two;
            int32 where there are fewer than ``2**31`` values: half as much to clear for each segment.
        uniques: int64 [N].
        inverse: int64 [N].
        counts: int64 [S], distinct values of each segment.

    Returns:
        The number of distinct values.
    """
    total = 0
    for s in range(len(bounds) - 1):
        size, shift = 2, 63
        while size < 2 * (bounds[s + 1] - bounds[s]):
            size, shift = 2 * size, shift - 1
        for cell in range(size):
            cells[cell] = -1
        before = total
        for i in range(bounds[s], bounds[s + 1]):
            value = values[i]
            cell = np.int64((np.uint64(value) * _FACTOR) >> np.uint64(shift))
            position = cells[cell]
            while position >= 0 and uniques[position] != value:
                cell = (cell + 1) & (size - 1)
                position = cells[cell]
            if position < 0:
                position = total
                cells[cell] = position
                uniques[position] = value
                total += 1
            inverse[i] = position
        counts[s] = total - before
    return total

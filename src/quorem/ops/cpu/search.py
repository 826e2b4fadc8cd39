"""Positions in a rising list, within the run that an index gives: ``ops.search``, compiled."""

import numpy as np

from .compiled import kernel


@kernel
def count_below(ordered, starts, shift, ids, below, inside):
    """Fill ``below`` with how many entries of ``ordered`` are below each id, ``inside`` with whether it is there.

    Args:
        ordered: rising ids [H].
        starts: where each run of ``2**shift`` ids begins in ``ordered``, and where the last one ends.
        shift: a run has ``2**shift`` ids.
        ids: [N], none below zero.
        below: [N].
        inside: bool [N].
    """
    last, mask = len(starts) - 2, (1 << shift) - 1
    for i in range(len(ids)):
        x = ids[i]
        run = min(x >> shift, last)
        low, count = np.int64(starts[run]), np.int64(starts[run + 1]) - np.int64(starts[run])
        position = low + (((np.int64(x) & mask) * count) >> shift)  # where it is in a run that is listed as a whole
        if position >= len(ordered) or ordered[position] != x:
            while count > 1:
                half = count >> 1
                low = low + half if ordered[low + half - 1] < x else low
                count -= half
            position = low + 1 if count == 1 and ordered[low] < x else low
        below[i] = position
        inside[i] = position < len(ordered) and ordered[position] == x

"""Positions in a rising list, within the run that an index gives: ``ops.search``, compiled."""

from .compiled import kernel


@kernel
def count_below(ordered, starts, shift, ids, below, inside):
    """Fill ``below`` with how many entries of ``ordered`` are below each id, ``inside`` with whether it is there.

    Args:
        ordered: rising ids [H].
        starts: where each run of ``2**shift`` ids begins in ``ordered``, and where the last one ends.
        shift: of a run.
        ids: [N], none below zero.
        below: [N].
        inside: bool [N].
    """
    last = len(starts) - 2
    for i in range(len(ids)):
        x = ids[i]
        run = min(x >> shift, last)
        low, high = starts[run], starts[run + 1]
        while low < high:
            middle = (low + high) >> 1
            if ordered[middle] < x:
                low = middle + 1
            else:
                high = middle
        below[i] = low
        inside[i] = low < len(ordered) and ordered[low] == x

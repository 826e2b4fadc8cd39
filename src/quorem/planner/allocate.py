"""Which choice each table gets: the best that the budget allows, over all tables.

Of each table's choices only those on the lower convex hull of cost over bytes matter. From the smallest of each table
on, the steps along all hulls are taken in order of the cost they save for each byte; one that does not fit is passed
over, with those after it of the same table. So a larger budget never costs more: let a step of ``s`` bytes be the first
that only the larger budget takes. It saves ``e s``, if ``e`` is what it saves a byte; all that the smaller budget has
left at that point is less than ``s``, and spent on steps that save ``e`` a byte at most.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def hull(size: NDArray[np.int64], cost: NDArray[np.float64]) -> list[int]:
    """The positions of the choices on the lower convex hull, smallest first.

    >>> hull(np.array([10, 1, 4, 5]), np.array([0.0, 9, 8, 2]))
    [1, 3, 0]
    """
    corners: list[int] = []
    sizes, costs = size.tolist(), cost.tolist()
    for i in np.lexsort((cost, size)).tolist():
        if corners and costs[i] >= costs[corners[-1]]:
            continue
        while len(corners) > 1:
            a, b = corners[-2:]
            if (costs[b] - costs[a]) * (sizes[i] - sizes[b]) < (costs[i] - costs[b]) * (sizes[b] - sizes[a]):
                break
            corners.pop()
        corners.append(i)
    return corners


def allocate(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> list[int]:
    """The corner of each table's hull to take, so that their sizes sum to at most ``budget``.

    Args:
        sizes: of the corners of each table, rising.
        costs: of the same, falling.
        budget: at least the sum of the first corners' sizes.

    >>> allocate([[1, 5, 10], [2, 20]], [[9.0, 2.0, 0.0], [1.0, 0.0]], 24)
    [2, 0]
    """
    left = budget - sum(size[0] for size in sizes)
    steps = [len(size) - 1 for size in sizes]
    table = np.repeat(np.arange(len(sizes)), steps)
    step = np.concatenate([np.arange(1, count + 1) for count in steps]) if sizes else np.empty(0, dtype=np.int64)
    bytes_ = np.array([b - a for size in sizes for a, b in pairwise(size)], dtype=np.float64)
    saved = np.array([a - b for cost in costs for a, b in pairwise(cost)], dtype=np.float64)
    corner = [0] * len(sizes)
    stopped = bytearray(len(sizes))
    for i in np.lexsort((step, table, -saved / bytes_)).tolist():
        t, s = int(table[i]), int(step[i])
        more = sizes[t][s] - sizes[t][s - 1]
        if stopped[t] or s != corner[t] + 1 or more > left:
            stopped[t] = 1
            continue
        corner[t], left = s, left - more
    return corner

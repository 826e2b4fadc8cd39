"""Which choice each table gets: the best that the budget allows, over all tables.

Only the choices on the lower convex hull of cost over bytes matter. Every table starts with its smallest choice. The
steps along all hulls are then taken in order of the cost that they save per byte. A step that does not fit is skipped,
and so are all later steps of the same table.

So a larger budget never gives a higher cost. Let the first step that only the larger budget takes have ``s`` bytes and
save ``e`` per byte, hence ``e s`` in all. At that point the smaller budget has less than ``s`` bytes left, and it
spends them on steps that save at most ``e`` per byte.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def hulls(table: Integers, size: Integers, cost: NDArray[np.float64]) -> Integers:
    """The positions of the choices on their table's lower convex hull, table by table, the smallest choice first.

    Args:
        table: number of each choice's table: 0, 1, ... without gaps.
        size: size of each choice.
        cost: cost of each choice.

    >>> hulls(np.array([0, 0, 0, 0, 1]), np.array([10, 1, 4, 5, 3]), np.array([0.0, 9, 8, 2, 1]))
    array([1, 3, 0, 4])
    """
    order = np.lexsort((cost, size, table))
    table, size, cost = table[order], size[order], cost[order]
    # One row for each table: a scan over the columns handles all tables at once.
    column = np.arange(len(table)) - np.searchsorted(table, table)
    costs = np.full((int(table[-1]) + 1, int(column.max()) + 1), np.inf)
    costs[table, column] = cost
    is_better = np.concatenate([costs[:, :1] < np.inf, costs[:, 1:] < np.minimum.accumulate(costs, 1)[:, :-1]], axis=1)
    sizes = np.zeros(costs.shape, np.int64)
    sizes[table, column] = size
    corners = np.zeros(costs.shape, np.int64)  # for each table a stack of columns, ``depth`` of them in use
    depth = np.zeros(len(costs), np.int64)
    for c in range(costs.shape[1]):
        new = np.flatnonzero(is_better[:, c])
        above = new[depth[new] > 1]
        while len(above):
            a, b = corners[above, depth[above] - 2], corners[above, depth[above] - 1]
            before = (costs[above, b] - costs[above, a]) * (sizes[above, c] - sizes[above, b])
            after = (costs[above, c] - costs[above, b]) * (sizes[above, b] - sizes[above, a])
            above = above[~(before < after)]  # b is on or above the line from a to c
            depth[above] -= 1
            above = above[depth[above] > 1]
        corners[new, depth[new]] = c
        depth[new] += 1
    is_corner = np.arange(costs.shape[1]) < depth[:, None]
    first = np.searchsorted(table, np.arange(len(costs)))
    return order[(first[:, None] + corners)[is_corner]]


def allocate(table: Integers, size: Integers, cost: NDArray[np.float64], budget: int) -> Integers:
    """Choose one corner of each table's hull, so that the sizes sum to at most ``budget``.

    Args:
        table: number of each corner's table: 0, 1, ... without gaps.
        size: size of each corner, rising within a table.
        cost: cost of each corner, falling within a table.
        budget: at least the sum of the first corners' sizes.

    Returns:
        The positions of the chosen corners, one for each table.

    >>> allocate(np.array([0, 0, 0, 1, 1]), np.array([1, 5, 10, 2, 20]), np.array([9.0, 2.0, 0.0, 1.0, 0.0]), 24)
    array([2, 3])
    """
    taken = np.flatnonzero(np.diff(table, prepend=-1))
    left = budget - int(size[taken].sum())
    step = np.flatnonzero(np.diff(table, prepend=-1) == 0)  # corners that are reached by a step from the one before
    more, saved = size[step] - size[step - 1], cost[step - 1] - cost[step]
    order = np.lexsort((step, -saved / more))
    step, more = step[order], more[order]
    while len(step):
        # A table takes no step after one that does not fit.
        ends = np.full(len(taken), len(size))
        np.minimum.at(ends, table[step[more > left]], step[more > left])
        open_ = step < ends[table[step]]
        step, more = step[open_], more[open_]
        fits = np.searchsorted(np.cumsum(more), left, side="right")
        np.maximum.at(taken, table[step[:fits]], step[:fits])
        left -= int(more[:fits].sum())
        step, more = step[fits:], more[fits:]
    return taken

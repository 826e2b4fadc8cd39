"""Which choice each table gets: the best that the budget allows, over all tables.

Of each table's choices only those on the lower convex hull of cost over bytes matter. From the smallest of each table
on, the steps along all hulls are taken in order of the cost they save for each byte; one that does not fit is passed
over, with those after it of the same table. So a larger budget never costs more: let a step of ``s`` bytes be the first
that only the larger budget takes. It saves ``e s``, if ``e`` is what it saves a byte; all that the smaller budget has
left at that point is less than ``s``, and spent on steps that save ``e`` a byte at most.
"""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def hulls(table: Integers, size: Integers, cost: NDArray[np.float64]) -> Integers:
    """The positions of the choices on the lower convex hull of their table, tables in order, smallest first.

    Args:
        table: number of each choice's table: 0, 1, ... without gaps.
        size: of each choice.
        cost: of each choice.

    >>> hulls(np.array([0, 0, 0, 0, 1]), np.array([10, 1, 4, 5, 3]), np.array([0.0, 9, 8, 2, 1]))
    array([1, 3, 0, 4])
    """
    order = np.lexsort((cost, size, table))
    table, size, cost = table[order], size[order], cost[order]
    # One row a table: a scan over choices goes through all tables at once.
    column = np.arange(len(table)) - np.searchsorted(table, table)
    costs = np.full((int(table[-1]) + 1, int(column.max()) + 1), np.inf)
    costs[table, column] = cost
    is_better = np.concatenate([costs[:, :1] < np.inf, costs[:, 1:] < np.minimum.accumulate(costs, 1)[:, :-1]], axis=1)
    sizes = np.zeros(costs.shape, np.int64)
    sizes[table, column] = size
    corners = np.zeros(costs.shape, np.int64)  # of each table, the first ``depth``: a stack of columns
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
    """The corner of each table's hull to take, so that their sizes sum to at most ``budget``.

    Args:
        table: number of each corner's table: 0, 1, ... without gaps.
        size: of each corner, rising within a table.
        cost: of each corner, falling within a table.
        budget: at least the sum of the first corners' sizes.

    Returns:
        Positions of corners, one a table.

    >>> allocate(np.array([0, 0, 0, 1, 1]), np.array([1, 5, 10, 2, 20]), np.array([9.0, 2.0, 0.0, 1.0, 0.0]), 24)
    array([2, 3])
    """
    taken = np.flatnonzero(np.diff(table, prepend=-1))
    left = budget - int(size[taken].sum())
    step = np.flatnonzero(np.diff(table, prepend=-1) == 0)  # from the corner before it
    more, saved = size[step] - size[step - 1], cost[step - 1] - cost[step]
    order = np.lexsort((step, -saved / more))
    step, more = step[order], more[order]
    while len(step):
        # A step that does not fit ends its table.
        ends = np.full(len(taken), len(size))
        np.minimum.at(ends, table[step[more > left]], step[more > left])
        open_ = step < ends[table[step]]
        step, more = step[open_], more[open_]
        fits = np.searchsorted(np.cumsum(more), left, side="right")
        np.maximum.at(taken, table[step[:fits]], step[:fits])
        left -= int(more[:fits].sum())
        step, more = step[fits:], more[fits:]
    return taken

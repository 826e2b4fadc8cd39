"""The choices that the planner has for each table: the rows, and the expected cost in quality.

Each *means* is a function that returns the choices for all tables at once, so that ten thousand tables are planned in
a few seconds. To give the planner another kind of choice, add its function to ``MEANS``.

The cost of a choice is the share of the traffic that goes to ids which are not the most frequent id of their row in the
largest table: only the small tables tell these ids apart. Where frequencies are not known, ids are assumed to be in
order of frequency and to follow Zipf's law: the i-th id has the share 1 / (i H(n)). Then m rows have the cost
1 - H(m) / H(n), about log(n / m) / log(n), so each halving of a table adds the same cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..schemes import QR, Full, GeneralizedQR, HotCold, Scheme
from ..sizes import balanced_sizes
from .allocate import Integers

HOT_COLLISIONS = 6  # up to this number of collisions, one collision more or less is a large step in rows
HOT_SHARES = (0.25, 0.5, 0.75)  # steps between one number of collisions and the next
_HOT_COLLISIONS = np.repeat(np.arange(2, HOT_COLLISIONS + 1), len(HOT_SHARES))  # every number with every share
_HOT_SHARES = np.tile(HOT_SHARES, HOT_COLLISIONS - 1)
RATIO = 1.15  # ratio of the collisions, or the rows, of one choice to the previous one
_POWERS = RATIO ** np.arange(330)  # up to more than 2**63
EULER = 0.5772156649015329


@dataclass(frozen=True)
class PlannedTraffic:
    """The tables: their numbers of ids, how often each id occurs, and their traffic relative to the average table."""

    num_embeddings: Integers
    frequencies: Sequence[Tensor | None]
    traffic: NDArray[np.float64]

    def fewest_rows(self, k: int) -> Integers:
        """For each table, the fewest rows in ``k`` tables that cover its ids."""
        return np.array([sum(balanced_sizes(n, k)) for n in self.num_embeddings.tolist()])

    @cached_property
    def counted(self) -> list[int]:
        """Positions of the tables whose frequencies are known."""
        return [t for t, counts in enumerate(self.frequencies) if counts is not None]


@dataclass(frozen=True)
class Choices:
    """Ways to store tables, as arrays with one entry for each choice."""

    table: Integers  # position of the table that the choice is for, rising
    rows: Integers  # stored rows
    tables: Integers  # number of stored tables
    cost: NDArray[np.float64]
    scheme: Callable[[int], Scheme]  # gives the scheme of the choice at a position
    why: Callable[[int], str]  # gives the reason for it, in words


def full(tables: PlannedTraffic) -> Choices:
    """The tables as they are."""
    n = tables.num_embeddings
    each = np.arange(len(n))
    return Choices(each, n, np.ones_like(n), np.zeros(len(n)), lambda _: Full(), lambda _: "fits as it is")


def large_and_small(tables: PlannedTraffic) -> Choices:
    """One large and one small table, with 2 to sqrt(n) collisions: the fewest rows are about 2 sqrt(n)."""
    table, collisions = _steps(
        np.full(len(tables.num_embeddings), 2), np.array([math.isqrt(n) for n in tables.num_embeddings.tolist()])
    )
    n = tables.num_embeddings[table]
    large = -(-n // collisions)
    small = -(-n // large)
    return Choices(
        table,
        large + small,
        np.full(len(large), 2),
        shared_traffic(tables, table, large),
        lambda i: QR(int(collisions[i])),
        lambda i: f"{collisions[i]:,} ids share a row of the large table",
    )


def hot_rows(tables: PlannedTraffic) -> Choices:
    """Rows for the first ids and ``c`` collisions for the others: sizes between those of ``c`` and ``c - 1`` alone."""
    table = np.repeat(np.arange(len(tables.num_embeddings)), len(_HOT_SHARES))
    n = tables.num_embeddings[table]
    collisions = np.tile(_HOT_COLLISIONS, len(tables.num_embeddings))
    # h hot ids add h - h / c rows, since h / c of them have rows anyway. As many rows as c - 1 collisions alone
    # have are reached at h = n / (c - 1), of which a share is taken.
    hot = (n * np.tile(_HOT_SHARES, len(tables.num_embeddings)) / (collisions - 1)).astype(np.int64)
    cold = n - hot
    large = -(-cold // collisions)
    rows = hot + large + -(-cold // large)
    return Choices(
        table,
        rows,
        np.full(len(rows), 3),
        shared_traffic(tables, table, large, hot),
        lambda i: HotCold(int(hot[i]), cold=QR(int(collisions[i]))),
        lambda i: (
            f"{hot[i]:,} ids have rows of their own; of the others {collisions[i]} share a row of the large table"
        ),
    )


def equal_tables(tables: PlannedTraffic, k: int) -> Choices:
    """``k`` tables of equal size: from the fewest rows that cover the ids up to what ``k - 1`` tables would need."""
    fewest, fewer_tables = tables.fewest_rows(k), tables.fewest_rows(k - 1)
    table, rows = _steps(fewest, np.maximum(fewer_tables - 1, fewest))
    return Choices(
        table,
        rows,
        np.full(len(rows), k),
        shared_traffic(tables, table, -(-rows // k)),
        lambda i: GeneralizedQR(k, num_rows=None if rows[i] == fewest[table[i]] else int(rows[i])),
        lambda i: f"{k - 1} tables need {fewer_tables[table[i]]:,} rows at least, {k} need {fewest[table[i]]:,}",
    )


MEANS: tuple[Callable[[PlannedTraffic], Choices], ...] = (
    full,
    large_and_small,
    hot_rows,
    partial(equal_tables, k=3),
    partial(equal_tables, k=4),
)


def all_choices(tables: PlannedTraffic) -> Choices:
    """The choices of all ``MEANS``, table by table: first the full table, then those with fewer rows than ids."""
    parts = [means(tables) for means in MEANS]
    kept = [
        np.flatnonzero(part.rows < tables.num_embeddings[part.table]) if p else np.arange(len(part.rows))
        for p, part in enumerate(parts)
    ]
    pairs = list(zip(parts, kept, strict=True))
    table = np.concatenate([part.table[index] for part, index in pairs])
    order = np.argsort(table, kind="stable")
    means_of = np.repeat(np.arange(len(parts)), [len(index) for index in kept])[order]
    position = np.concatenate(kept)[order]
    return Choices(
        table[order],
        np.concatenate([part.rows[index] for part, index in pairs])[order],
        np.concatenate([part.tables[index] for part, index in pairs])[order],
        np.concatenate([part.cost[index] for part, index in pairs])[order],
        lambda i: parts[means_of[i]].scheme(position[i]),
        lambda i: parts[means_of[i]].why(position[i]),
    )


def shared_traffic(
    tables: PlannedTraffic, table: Integers, sizes: Integers, num_hot: Integers | None = None
) -> NDArray[np.float64]:
    """The cost of each choice: the traffic of ids that are not the most frequent id of their row in the large table.

    Args:
        tables: the tables.
        table: position of each choice's table, rising.
        sizes: rows of each choice's large table.
        num_hot: for each choice, how many of the first ids have rows of their own; none where None.
    """
    num_hot = np.zeros_like(sizes) if num_hot is None else num_hot
    cost = 1 - _harmonic(num_hot + sizes) / _harmonic(tables.num_embeddings)[table]
    for t in tables.counted:
        first, last = np.searchsorted(table, (t, t + 1))
        cost[first:last] = _counted_share(tables.frequencies[t], sizes[first:last], num_hot[first:last])
    return tables.traffic[table] * cost


def _counted_share(frequencies: Tensor | None, sizes: Integers, num_hot: Integers) -> NDArray[np.float64]:
    """``shared_traffic`` of one table with known frequencies, as a share of the table's traffic."""
    assert frequencies is not None
    frequencies = frequencies.double()
    total = float(frequencies.sum())
    if not total:
        return np.zeros(len(sizes))
    most = []
    for size, first in zip(sizes.tolist(), num_hot.tolist(), strict=True):
        hot, cold = float(frequencies[:first].sum()), frequencies[first:]
        whole = len(cold) // size * size
        highest = cold[:whole].view(-1, size).amax(0)
        rest = cold[whole:]
        highest[: len(rest)] = torch.maximum(highest[: len(rest)], rest)
        most.append(hot + float(highest.sum()))
    return 1 - np.array(most) / total


def _harmonic(n: Integers) -> NDArray[np.float64]:
    """1 + 1/2 + ... + 1/n, with an error of at most 1e-4 for n > 2."""
    count = n.astype(np.float64)
    return np.log(count) + EULER + 1 / (2 * count) - 1 / (12 * count * count)


def _steps(low: Integers, high: Integers) -> tuple[Integers, Integers]:
    """For each table, integers from its ``low`` to its ``high``, each about ``RATIO`` times the one before.

    Returns:
        For each integer the position of its table, and the integer. A table with ``high < low`` has no integers.

    >>> _steps(np.array([2, 100, 3]), np.array([7, 120, 2]))
    (array([0, 0, 0, 0, 0, 0, 1, 1, 1]), array([  2,   3,   4,   5,   6,   7, 100, 115, 120]))
    """
    is_empty = high < low
    count = 1 + (np.log(np.where(is_empty, 1.0, high / low)) / math.log(RATIO)).astype(np.int64)
    powers = _POWERS[: count.max(initial=0)]
    values = np.rint(low[:, None] * powers).astype(np.int64)
    values = np.where(np.arange(len(powers)) < count[:, None], values, high[:, None])
    values = np.concatenate([values, high[:, None]], axis=1)  # rising, with repeats
    is_new = np.concatenate([~is_empty[:, None], (values[:, 1:] > values[:, :-1]) & ~is_empty[:, None]], axis=1)
    table, column = np.nonzero(is_new)
    return table, values[table, column]

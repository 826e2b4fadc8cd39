"""The ways to store tables: rows, and what they are expected to cost in quality.

Each *means* is a function from tables to choices for all of them, so that ten thousand tables are planned in about a
second. To give the planner another one, add it to ``MEANS``.

The cost of a choice is the share of the traffic that goes to ids which are not the most frequent one of their row in
the largest table: these have to make do with what the small tables tell apart. Where frequencies are not known, ids are
taken to be in order of frequency and to follow Zipf's law, the i-th with a share of 1 / (i H(n)). Then m rows leave
1 - H(m) / H(n), about log(n / m) / log(n), so that each halving of a table costs as much as the one before.
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

HOT_COLLISIONS = 6  # below which a collision more or less is a large step
HOT_SHARES = (0.25, 0.5, 0.75)  # of the way from one number of collisions to the next
_HOT_COLLISIONS = np.repeat(np.arange(2, HOT_COLLISIONS + 1), len(HOT_SHARES))  # each with each share
_HOT_SHARES = np.tile(HOT_SHARES, HOT_COLLISIONS - 1)
STEP = 1.15  # between the collisions, or the rows, of one choice and the next
_POWERS = STEP ** np.arange(330)  # up to 2**63
EULER = 0.5772156649015329
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TablesToPlan:
    """Tables: their numbers of ids, how often each id occurs, and how often all of them, as a share of the average."""

    num_embeddings: Integers
    frequencies: Sequence[Tensor | None]
    traffic: NDArray[np.float64]

    def fewest_rows(self, k: int) -> Integers:
        """Of each table, the rows of the ``k`` smallest tables that cover its ids."""
        return np.array([sum(balanced_sizes(n, k)) for n in self.num_embeddings.tolist()])

    @cached_property
    def counted(self) -> list[int]:
        """Positions of the tables whose frequencies are known."""
        return [t for t, counts in enumerate(self.frequencies) if counts is not None]


@dataclass(frozen=True)
class Choices:
    """Ways to store tables: for each, the table, its rows, its number of stored tables, its cost and its scheme."""

    table: Integers  # position of the table that it is a choice for, rising
    rows: Integers
    tables: Integers
    cost: NDArray[np.float64]
    scheme: Callable[[int], Scheme]  # of the choice at a position
    why: Callable[[int], str]  # the same, in words


def full(tables: TablesToPlan) -> Choices:
    """The tables as they are."""
    n = tables.num_embeddings
    each = np.arange(len(n))
    return Choices(each, n, np.ones_like(n), np.zeros(len(n)), lambda _: Full(), lambda _: "fits as it is")


def quotient_remainder(tables: TablesToPlan) -> Choices:
    """One large table and one small, from 2 collisions to as many as there are rows: the fewest rows are 2 sqrt(n)."""
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


def hot_rows(tables: TablesToPlan) -> Choices:
    """Own rows for the first ids and ``c`` collisions for the others, to lie between ``c`` and ``c - 1`` collisions."""
    table = np.repeat(np.arange(len(tables.num_embeddings)), len(_HOT_SHARES))
    n = tables.num_embeddings[table]
    collisions = np.tile(_HOT_COLLISIONS, len(tables.num_embeddings))
    # Of h hot ids, h / c would have had rows in any case; with all the rows of c - 1 collisions, h is n / (c - 1).
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


def equal_tables(tables: TablesToPlan, k: int) -> Choices:
    """``k`` tables of equal size, from the fewest rows that cover the ids to what ``k - 1`` tables need at least."""
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


MEANS: tuple[Callable[[TablesToPlan], Choices], ...] = (
    full,
    quotient_remainder,
    hot_rows,
    partial(equal_tables, k=3),
    partial(equal_tables, k=4),
)


def all_choices(tables: TablesToPlan) -> Choices:
    """The choices by all means, table by table, the full table first, less those with no fewer rows than its ids."""
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
    tables: TablesToPlan, table: Integers, sizes: Integers, num_hot: Integers | None = None
) -> NDArray[np.float64]:
    """Traffic of ids that are not the most frequent of their remainder, for each size of the remainder's table.

    The first ``num_hot`` ids have rows of their own, of each size as many as it says.
    """
    num_hot = np.zeros_like(sizes) if num_hot is None else num_hot
    cost = 1 - _harmonic(num_hot + sizes) / _harmonic(tables.num_embeddings)[table]
    for t in tables.counted:
        first, last = np.searchsorted(table, (t, t + 1))
        cost[first:last] = _counted_share(tables.frequencies[t], sizes[first:last], num_hot[first:last])
    return tables.traffic[table] * cost


def _counted_share(frequencies: Tensor | None, sizes: Integers, num_hot: Integers) -> NDArray[np.float64]:
    """The share of a table's traffic that goes to such ids, by its frequencies."""
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
    """1 + 1/2 + ... + 1/n, to 1e-4."""
    x = n.astype(np.float64)
    return np.log(x) + EULER + 1 / (2 * x) - 1 / (12 * x * x)


def _steps(low: Integers, high: Integers) -> tuple[Integers, Integers]:
    """For each table, integers from its ``low`` to its ``high``, each about ``STEP`` times the one before.

    Returns:
        For each integer the position of its table, and the integer. None for a table with ``high < low``.

    >>> _steps(np.array([2, 100, 3]), np.array([7, 120, 2]))
    (array([0, 0, 0, 0, 0, 0, 1, 1, 1]), array([  2,   3,   4,   5,   6,   7, 100, 115, 120]))
    """
    is_empty = high < low
    count = 1 + (np.log(np.where(is_empty, 1.0, high / low)) / math.log(STEP)).astype(np.int64)
    powers = _POWERS[: count.max(initial=0)]
    values = np.rint(low[:, None] * powers).astype(np.int64)
    values = np.where(np.arange(len(powers)) < count[:, None], values, high[:, None])
    values = np.concatenate([values, high[:, None]], axis=1)  # rising, with repeats
    is_new = np.concatenate([~is_empty[:, None], (values[:, 1:] > values[:, :-1]) & ~is_empty[:, None]], axis=1)
    table, column = np.nonzero(is_new)
    return table, values[table, column]

"""The ways to store one table: rows, and what they are expected to cost in quality.

Each *means* is a function from a table to choices. To give the planner another one, add it to ``MEANS``.

The cost of a choice is the share of the traffic that goes to ids which are not the most frequent one of their row in
the largest table: these have to make do with what the small tables tell apart. Where frequencies are not known, ids are
taken to be in order of frequency and to follow Zipf's law, the i-th with a share of 1 / (i H(n)). Then m rows leave
1 - H(m) / H(n), about log(n / m) / log(n), so that each halving of a table costs as much as the one before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class TableToPlan:
    """A table, how often each of its ids occurs, and how often all of them, relative to the average table."""

    num_embeddings: int
    embedding_dim: int
    frequencies: Tensor | None = None
    traffic: float = 1.0


@dataclass(frozen=True)
class Choices:
    """Ways to store one table: for each, the rows and the number of its stored tables, its cost and its scheme."""

    rows: NDArray[np.int64]
    tables: NDArray[np.int64]
    cost: NDArray[np.float64]
    scheme: Callable[[int], Scheme]  # of the choice at a position
    why: Callable[[int], str]  # the same, in words


def full(table: TableToPlan) -> Choices:
    """The table as it is."""
    n = table.num_embeddings
    return Choices(np.array([n]), np.array([1]), np.array([0.0]), lambda _: Full(), lambda _: "fits as it is")


def quotient_remainder(table: TableToPlan) -> Choices:
    """One large table and one small, from 2 collisions to as many as there are rows: the fewest rows are 2 sqrt(n)."""
    n = table.num_embeddings
    collisions = _steps(2, math.isqrt(n))
    large = -(-n // collisions)
    small = -(-n // large)
    cost = shared_traffic(table, large)
    return Choices(
        large + small,
        np.full(len(large), 2),
        cost,
        lambda i: QR(int(collisions[i])),
        lambda i: f"{collisions[i]:,} ids share a row of the large table",
    )


def hot_rows(table: TableToPlan) -> Choices:
    """Own rows for the first ids and ``c`` collisions for the others, to lie between ``c`` and ``c - 1`` collisions."""
    n = table.num_embeddings
    collisions = _HOT_COLLISIONS
    # Of h hot ids, h / c would have had rows in any case; with all the rows of c - 1 collisions, h is n / (c - 1).
    hot = (n * _HOT_SHARES / (collisions - 1)).astype(np.int64)
    cold = n - hot
    large = -(-cold // collisions)
    rows = hot + large + -(-cold // large)
    return Choices(
        rows,
        np.full(len(rows), 3),
        shared_traffic(table, large, hot),
        lambda i: HotCold(int(hot[i]), cold=QR(int(collisions[i]))),
        lambda i: (
            f"{hot[i]:,} ids have rows of their own; of the others {collisions[i]} share a row of the large table"
        ),
    )


def equal_tables(table: TableToPlan, k: int) -> Choices:
    """``k`` tables of equal size, from the fewest rows that cover the ids to what ``k - 1`` tables need at least."""
    n = table.num_embeddings
    fewest, most = sum(balanced_sizes(n, k)), sum(balanced_sizes(n, k - 1)) - 1
    rows = _steps(fewest, max(most, fewest))
    return Choices(
        rows,
        np.full(len(rows), k),
        shared_traffic(table, -(-rows // k)),
        lambda i: GeneralizedQR(k, num_rows=None if i == 0 else int(rows[i])),
        lambda i: f"{k - 1} tables need {most + 1:,} rows at least, {k} need {fewest:,}",
    )


MEANS: tuple[Callable[[TableToPlan], Choices], ...] = (
    full,
    quotient_remainder,
    hot_rows,
    lambda table: equal_tables(table, 3),
    lambda table: equal_tables(table, 4),
)


def joined(parts: Sequence[Choices], n: int) -> Choices:
    """All choices together, the full table first, less those with no fewer rows than its ``n``."""
    kept = [np.flatnonzero(part.rows < n) if p else np.arange(len(part.rows)) for p, part in enumerate(parts)]
    starts = np.cumsum([0] + [len(index) for index in kept])

    def place(i: int) -> tuple[Choices, int]:
        p = int(np.searchsorted(starts, i, side="right")) - 1
        return parts[p], int(kept[p][i - starts[p]])

    pairs = list(zip(parts, kept, strict=True))
    return Choices(
        np.concatenate([part.rows[index] for part, index in pairs]),
        np.concatenate([part.tables[index] for part, index in pairs]),
        np.concatenate([part.cost[index] for part, index in pairs]),
        lambda i: (pair := place(i))[0].scheme(pair[1]),
        lambda i: (pair := place(i))[0].why(pair[1]),
    )


def shared_traffic(
    table: TableToPlan, sizes: NDArray[np.int64], num_hot: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Traffic of ids that are not the most frequent of their remainder, for each size of the remainder's table.

    The first ``num_hot`` ids have rows of their own, of each size as many as it says.
    """
    num_hot = np.zeros_like(sizes) if num_hot is None else num_hot
    if table.frequencies is None:
        return table.traffic * (1 - _harmonic(num_hot + sizes) / _harmonic(table.num_embeddings))
    frequencies = table.frequencies.double()
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
    return table.traffic * (1 - np.array(most) / total)


def _harmonic(n: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """1 + 1/2 + ... + 1/n, to 1e-4."""
    x = np.asarray(n, dtype=np.float64)
    return np.log(x) + EULER + 1 / (2 * x) - 1 / (12 * x * x)


def _steps(low: int, high: int) -> NDArray[np.int64]:
    """Integers from ``low`` to ``high``, each about ``STEP`` times the one before; empty if ``high < low``.

    >>> _steps(2, 7), _steps(100, 120), _steps(3, 2)
    (array([2, 3, 4, 5, 6, 7]), array([100, 115, 120]), array([], dtype=int64))
    """
    if high < low:
        return np.empty(0, dtype=np.int64)
    values = np.rint(low * _POWERS[: 1 + int(math.log(high / low) / math.log(STEP))]).astype(np.int64)
    values = np.append(values, high)
    return values[np.append(True, values[1:] > np.maximum.accumulate(values)[:-1])]

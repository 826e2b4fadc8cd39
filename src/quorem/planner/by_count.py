"""Tables whose ids are counted: who has a row of its own, who shares the pool, and who is the rest.

A row is worth what the traffic of its id is worth, whichever table the id is in. So one threshold on counts goes over
all tables: the most frequent ids are *hot* and have rows of their own; ids that were seen hardly ever are the *rest*,
one row a table; those between are *cold* and share one pool. Let R be the rows that the budget pays for.

1. The rest are ids seen at most ``r`` times: the least ``r >= rarely`` that leaves at most ``kept_per_row`` R ids.
2. If the others all fit, they are hot, and what is left goes to further ids by falling count.
3. Otherwise the pool takes ``pool_share`` of the rows, or less if fewer ids than that are without a row.

Everything is counted in bytes, so that tables may differ in width. ``docs/choosing.md`` has what came of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..renumbering import Mixing
from ..sizes import coprime_sizes, coprime_sizes_for_rows

PARTITIONS = 2  # rows of the pool that a cold id sums
MOST_UNSEEN = 2**40  # ids of a table that are counted: more would not change a plan, and not fit into an integer
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Rule:
    """What the budget is spent on.

    Args:
        pool_share: most of the rows that the pool takes.
        kept_per_row: most ids that are not the rest, for each row.
        rarely: where not all ids that occur twice have a row, those seen at most so often are the rest.
    """

    pool_share: float = 0.6
    kept_per_row: float = 8.0
    rarely: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 < self.pool_share < 1:
            raise ValueError(f"pool_share ({self.pool_share}) must be in (0, 1)")
        if not self.kept_per_row >= 1:
            raise ValueError(f"kept_per_row ({self.kept_per_row}) must be at least 1")
        if not self.rarely >= 1:
            raise ValueError(f"rarely ({self.rarely}) must be at least 1")


@dataclass(frozen=True, eq=False)
class CountedTable:
    """One table, and how many of its ids have each count.

    Args:
        size: number of ids.
        values: the distinct counts, falling.
        ids: how many ids have each of them.
        row: bytes of a row, with the optimizer's state.
        listed: bytes of a hot or cold id in the lists that find them; 0 where ids come by frequency.
        group: number of the pool that its cold ids would share.
    """

    size: int
    values: NDArray[np.float64]
    ids: Integers
    row: int
    listed: int
    group: int

    @classmethod
    def of(
        cls, counts: NDArray[Any], row: int, listed: int, group: int, *, in_order: bool, unseen: int = 0
    ) -> "CountedTable":
        """Of a table with so many occurrences of each id; hot ids are the first ones, if ids come by frequency.

        ``unseen`` ids more do not occur at all.
        """
        if unseen:
            seen = cls.of(counts[counts > 0], row, listed, group, in_order=in_order)
            unseen = min(unseen + len(counts) - seen.size, MOST_UNSEEN)
            values, ids = np.append(seen.values, 0.0), np.append(seen.ids, unseen)
            return cls(seen.size + unseen, values, ids, row, seen.listed, group)
        size = len(counts)
        if in_order:
            counts = np.maximum.accumulate(counts[::-1])[::-1]  # an id is hot if one after it is
        if counts.dtype.kind in "iu" and int(counts.max(initial=0)) < 4 * size + 1000:
            ids = np.bincount(counts, minlength=1)
            values = np.flatnonzero(ids)[::-1]
            return cls(size, values.astype(np.float64), ids[values], row, 0 if in_order else listed, group)
        rising, ids = np.unique(counts, return_counts=True)
        return cls(size, rising[::-1].astype(np.float64), ids[::-1], row, 0 if in_order else listed, group)

    def visits_of_first(self, number: int) -> float:
        """How often the ``number`` most frequent ids occur."""
        whole = int(np.searchsorted(np.cumsum(self.ids), number, side="right"))
        visits = float((self.values[:whole] * self.ids[:whole]).sum())
        left = number - int(self.ids[:whole].sum())
        return visits + left * float(self.values[whole]) if left else visits


@dataclass(frozen=True, eq=False)
class Division:
    """Of each table, the hot, cold and rest ids; and the rows of each pool."""

    hot: Integers
    cold: Integers
    rest: Integers
    pools: Integers

    @cached_property
    def is_full(self) -> NDArray[np.bool_]:
        """Tables that have a row for every id."""
        return (self.cold == 0) & (self.rest <= 1)

    @cached_property
    def own(self) -> Integers:
        """Rows of each table that are no pool's."""
        return np.where(self.is_full, self.hot + self.rest, self.hot + (self.rest > 0))

    @cached_property
    def listed(self) -> Integers:
        """Ids of each table that must be listed where ids do not come by frequency."""
        lists = self.hot + np.where(self.rest > 0, self.cold, 0)  # without a rest, all that is not hot is cold
        return np.where(self.is_full | (self.own == 0), 0, lists)


class CountedTables:
    """The tables of a plan as arrays, and divisions of them.

    Args:
        tables: in order.
        num_groups: number of pools there could be.
        overhead: bytes of a division that are neither rows nor lists of ids.
    """

    def __init__(self, tables: Sequence[CountedTable], num_groups: int, overhead: Callable[[Division], int]) -> None:
        self.size = np.array([table.size for table in tables])
        self.row = np.array([table.row for table in tables])
        self.listed = np.array([table.listed for table in tables])
        self.group, self.num_groups = np.array([table.group for table in tables]), num_groups
        self.group_row = np.ones(num_groups, np.int64)
        self.group_row[self.group] = self.row  # equal in all tables of a group
        self.overhead = overhead
        number = np.repeat(np.arange(len(tables)), [len(table.values) for table in tables])
        value = np.concatenate([table.values for table in tables])
        order = np.lexsort((number, -value / self.row[number]))  # traffic for a byte; of equals, the first table
        self.number, self.value = number[order], value[order]
        self.ids = np.concatenate([table.ids for table in tables])[order]
        self.ends = np.cumsum(self.ids)

    def full(self) -> Division:
        """Every table as it is."""
        none = np.zeros_like(self.size)
        return Division(self.size, none, none, np.zeros(self.num_groups, np.int64))

    def without_pool(self, num_hot: int) -> Division:
        """The first ``num_hot`` ids are hot, all others the rest."""
        hot = self._first(num_hot, self.ids, self.ends)
        return Division(hot, np.zeros_like(hot), self.size - hot, np.zeros(self.num_groups, np.int64))

    def with_pool(self, num_hot: int, threshold: float, pool_bytes: float) -> Division:
        """Of the ids with a count above ``threshold`` the first ``num_hot`` are hot, the others cold."""
        ids = np.where(self.value > threshold, self.ids, 0)
        kept = np.bincount(self.number, ids, len(self.size)).astype(np.int64)
        hot = self._first(num_hot, ids, np.cumsum(ids))
        cold = kept - hot
        pools = np.zeros(self.num_groups, np.int64)
        cold_bytes = np.bincount(self.group, cold * self.row, self.num_groups)
        for g in np.flatnonzero(cold_bytes).tolist():
            row, num_cold = int(self.group_row[g]), int(cold_bytes[g]) // int(self.group_row[g])
            rows = max(fewest_pool_rows(num_cold), int(pool_bytes * (cold_bytes[g] / cold_bytes.sum())) // row)
            if rows >= num_cold:  # then they may as well have rows of their own
                hot, cold = np.where(self.group == g, kept, hot), np.where(self.group == g, 0, cold)
            else:
                pools[g] = sum(coprime_sizes_for_rows(rows, PARTITIONS))
        return Division(hot, cold, self.size - kept, pools)

    def _first(self, number: int, ids: Integers, ends: Integers) -> Integers:
        """How many of the first ``number`` ids each table has; ``ends`` is the cumulative sum of ``ids``."""
        whole = int(np.searchsorted(ends, number, side="right"))
        first = np.bincount(self.number[:whole], ids[:whole], len(self.size)).astype(np.int64)
        if whole < len(ends):
            first[self.number[whole]] += number - (int(ends[whole - 1]) if whole else 0)
        return first

    def bytes(self, division: Division) -> int:
        """What a division takes."""
        rows = int((division.own * self.row).sum() + (division.pools * self.group_row).sum())
        return rows + int((self.listed * division.listed).sum()) + self.overhead(division)


def divide(tables: CountedTables, budget: int, rule: Rule) -> Division | None:
    """The division that a budget pays for by the rule; None if it does not pay for a row a table."""
    if tables.bytes(full := tables.full()) <= budget:
        return full
    seen = int(tables.ids[tables.value > 0].sum())
    most_hot = _largest(tables.without_pool, seen, tables, budget)
    if most_hot is None:
        return None
    levels, rows, lists = _kept(tables, float(rule.rarely) if noise(tables) else 0.0)
    space = budget - tables.overhead(tables.with_pool(0, float(levels[0]), 0.0))
    enough = np.flatnonzero((rows <= rule.kept_per_row * (space - lists)) & (lists < space))
    skip = 1
    while len(enough):
        i = int(enough[0])
        level, left = float(levels[i]), space - float(lists[i])
        kept = int(tables.ids[tables.value > level].sum())
        if rows[i] <= left or int(most_hot.hot.sum()) >= kept:
            return most_hot
        pool_bytes = min(rule.pool_share, float(rows[i]) / left - 1) * left
        division = _largest(partial(tables.with_pool, threshold=level, pool_bytes=pool_bytes), kept, tables, budget)
        if division is not None:
            return division
        enough, skip = enough[skip:], 2 * skip  # fewer cold ids need fewer rows for combinations of their own
    return most_hot


def noise(tables: CountedTables) -> float:
    """The count up to which an id is not worth a row: once, or, where counts are shares of traffic, never."""
    return 1.0 if (tables.value == np.floor(tables.value)).all() else 0.0


def gives_rows_to_all(tables: CountedTables, division: Division) -> bool:
    """Whether each id that occurs more than once has a row of its own."""
    kept = tables.with_pool(0, noise(tables), 0.0)
    return bool((division.is_full | (division.hot >= kept.hot + kept.cold)).all())


def _kept(tables: CountedTables, least: float) -> tuple[NDArray[np.float64], Integers, Integers]:
    """The counts up to which ids may be the rest, rising from ``least``; bytes of rows and lists above each."""
    levels = np.unique(np.append(tables.value[tables.value > least], least))
    order = np.argsort(tables.value)
    below = np.searchsorted(tables.value[order], levels, side="right")
    rows, lists = (
        np.concatenate([[0], np.cumsum((tables.ids * each[tables.number])[order])])
        for each in (tables.row, tables.listed)
    )
    return levels, rows[-1] - rows[below], lists[-1] - lists[below]


def _largest(
    division_with: Callable[[int], Division], most: int, tables: CountedTables, budget: int
) -> Division | None:
    """The division with the most hot ids that fits the budget; None if even that with none does not."""
    best = division_with(0)
    if tables.bytes(best) > budget:
        return None
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        division = division_with(middle)
        if tables.bytes(division) <= budget:
            low, best = middle, division
        else:
            high = middle
    return best


def smallest(tables: CountedTables) -> int:
    """The fewest bytes that any budget must have: a row for each table."""
    return tables.bytes(tables.without_pool(0))


def fewest_pool_rows(num_cold: int) -> int:
    """Rows of the smallest pool in which so many cold ids have combinations of their own.

    >>> fewest_pool_rows(10_000)
    257
    """
    return _fewest_rows(Mixing.covering(max(num_cold, 2)).bits)


@lru_cache(maxsize=64)
def _fewest_rows(bits: int) -> int:
    return sum(coprime_sizes(2**bits, PARTITIONS))

"""Tables whose ids are counted: which ids have rows of their own, which share the pool, and which are the rest.

A row is worth as much as the traffic of its id, whichever table the id is in. So the same thresholds on counts apply to
all tables. The most frequent ids are *hot* and have rows of their own. The rarest ids are the *rest* and share one row
in each table. The ids between are *cold* and share one pool. Let R be the number of rows that the budget pays for.

1. The rest are the ids seen at most ``r`` times, where ``r`` is the smallest number, at least RARELY, for which at most
   KEPT_PER_ROW * R other ids remain. Where ids seen once come back (``noise``), ``r`` may be 0.
2. If the other ids all fit, they are hot, and the remaining rows go to further ids by falling count.
3. Otherwise the pool takes POOL_SHARE of the rows, or less if fewer ids than that are without a row.

Everything is counted in bytes, so that tables may differ in width. ``docs/choosing.md`` has measured results.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ops.words import DIGIT, MOST_LEVELS
from ..paper.renumbering import Mixing
from ..paper.sizes import coprime_sizes, coprime_sizes_for_rows

Integers = NDArray[np.int64]
PARTITIONS = 2  # rows of the pool that a cold id sums
POOL_SHARE = 0.6  # the largest share of the rows that the pool may take
KEPT_PER_ROW = 8.0  # the most hot and cold ids for each row that the budget pays for
RARELY = 2  # ids seen at most this often are the rest, if not all ids that occur twice can have a row
SHARED_VISITS = 0.01  # share of visits that may go to ids seen once without a row before rows are served in fewer bits
MOST_UNSEEN = 2**40  # cap on a table's number of unseen ids: more would not change a plan, and could overflow int64


class Tally(NamedTuple):
    """How often the ids of a table occur."""

    size: int  # number of ids, of which at most MOST_UNSEEN do not occur
    counts: NDArray[Any]  # of all ids, or of those that occur
    visits: float  # sum of the counts
    values: NDArray[np.float64]  # the distinct counts, falling
    ids: Integers  # how many ids have each of them
    in_order: bool  # whether ids are in order of frequency: the hot ids are the first ones

    @classmethod
    def of(cls, counts: NDArray[Any], *, in_order: bool, unseen: int = 0) -> "Tally":
        """Make it from the counts of ids; a further ``unseen`` ids, which ``counts`` does not list, do not occur."""
        given = counts
        if unseen:  # with them count the ids that ``counts`` lists with 0
            seen = counts[counts > 0]
            unseen, counts = min(unseen + len(counts) - len(seen), MOST_UNSEEN), seen
        if in_order:
            counts = np.maximum.accumulate(counts[::-1])[::-1]  # if an id is hot, so are all ids before it
        if counts.dtype.kind in "iu" and int(counts.max(initial=0)) < 4 * len(counts) + 1000:
            of_value = np.bincount(counts, minlength=1)
            values = np.flatnonzero(of_value)[::-1]
            ids = of_value[values]
        else:
            values, ids = (array[::-1] for array in np.unique(counts, return_counts=True))
        if unseen:
            values, ids = np.append(values, 0), np.append(ids, unseen)
        return cls(int(ids.sum()), given, float(given.sum()), values.astype(np.float64), ids, in_order)

    def visits_of_first(self, number: int) -> float:
        """How often the ``number`` most frequent ids occur."""
        if self.in_order:
            return float(self.counts[:number].sum())
        whole = int(np.searchsorted(np.cumsum(self.ids), number, side="right"))
        visits = float((self.values[:whole] * self.ids[:whole]).sum())
        left = number - int(self.ids[:whole].sum())
        return visits + left * float(self.values[whole]) if left else visits


def share_up_to(count: float, values: NDArray[np.float64], ids: Integers) -> float:
    """Share of the visits that go to ids seen at most ``count`` times, where ``ids`` ids have each of the counts."""
    visits = values * ids
    return float(visits[values <= count].sum()) / (float(visits.sum()) or 1.0)


@dataclass(frozen=True, eq=False)
class Division:
    """The number of hot, cold and rest ids of each table, and the number of rows of each pool."""

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
        """Number of rows of each table outside the pools."""
        return np.where(self.is_full, self.hot + self.rest, self.hot + (self.rest > 0))


def most_index_bytes(lists: Integers, size: Integers, module_numbers: Integers) -> Integers:
    """The most bytes that indices over lists of ids take in each module (``ops.words``).

    ``lists`` are lengths ``[2, T]``, as ``CountedTables.lists`` has them; ``size`` is the number of ids of each table.
    """
    modules = int(module_numbers.max()) + 1

    def total(of_table: NDArray[Any]) -> NDArray[Any]:
        return np.bincount(module_numbers, of_table, modules).astype(np.int64)

    entries, lower = 4 * total(np.maximum(lists, 0).sum(0)), np.zeros_like(lists)
    least = np.full(modules, 2**62)
    for levels in range(1, MOST_LEVELS + 1):
        top = (size - 1 >> DIGIT * levels) + 1
        taken = total(8 * np.where(lists >= 0, lower + top + 1, 0).sum(0))
        least = np.minimum(least, taken if levels == 1 else np.maximum(taken, entries))
        lower += np.minimum(lists, top) + 1
    return np.where(entries > 0, least, 0)


class CountedTables:
    """The tables of a plan as arrays, and divisions of them."""

    def __init__(
        self,
        tables: Sequence[Tally],
        row: Integers,  # bytes of a row of each table, with the optimizer's state
        entry: Integers,  # bytes of an entry in the lists of hot and cold ids; 0 if ids are in order of frequency
        group: Integers,  # number of the pool that the cold ids of each table would share
        overhead: Callable[[Division], int],  # bytes of a division that are neither rows nor lists of ids
    ) -> None:
        self.size, self.row, self.entry, self.group = np.array([table.size for table in tables]), row, entry, group
        self.num_groups = int(group.max()) + 1
        self.group_row = np.ones(self.num_groups, np.int64)
        self.group_row[group] = row  # equal in all tables of a group
        self.overhead = overhead
        number = np.repeat(np.arange(len(tables)), [len(table.values) for table in tables])
        value = np.concatenate([table.values for table in tables])
        order = np.lexsort((number, -value / self.row[number]))  # by traffic per byte; ties go to the first table
        self.number, self.value = number[order], value[order]
        self.ids = np.concatenate([table.ids for table in tables])[order]
        self.ends = np.cumsum(self.ids)

    def visits_of_once(self) -> float:
        """Visits that an id seen once can expect in a second log of the same length."""
        once, twice = (int(self.ids[self.value == count].sum()) for count in (1, 2))
        return 2 * twice / max(once, 1)

    def without_pool(self, num_hot: int) -> Division:
        """The first ``num_hot`` ids are hot, all others the rest."""
        hot = self._first(num_hot, self.ids, self.ends)
        return self._none_grows(Division(hot, np.zeros_like(hot), self.size - hot, np.zeros_like(self.group_row)))

    def with_pool(self, num_hot: int, threshold: float, pool_bytes: float) -> Division:
        """Of the ids with a count above ``threshold`` the first ``num_hot`` are hot, the others cold."""
        ids = np.where(self.value > threshold, self.ids, 0)
        kept = np.bincount(self.number, ids, len(self.size)).astype(np.int64)
        hot = self._first(num_hot, ids, np.cumsum(ids))
        cold = kept - hot
        pools = np.zeros_like(self.group_row)
        cold_bytes = np.bincount(self.group, cold * self.row, self.num_groups)
        for g in np.flatnonzero(cold_bytes).tolist():
            row, num_cold = int(self.group_row[g]), int(cold_bytes[g]) // int(self.group_row[g])
            least = coprime_sizes(2 ** Mixing.covering(num_cold).bits, PARTITIONS)  # in which no two ids are alike
            rows = max(sum(least), int(pool_bytes * (cold_bytes[g] / cold_bytes.sum())) // row)
            if rows >= num_cold:  # then they may as well have rows of their own
                hot, cold = np.where(self.group == g, kept, hot), np.where(self.group == g, 0, cold)
            else:
                pools[g] = sum(coprime_sizes_for_rows(rows, PARTITIONS))
        return self._none_grows(Division(hot, cold, self.size - kept, pools))

    def lists(self, division: Division) -> Integers:
        """Lengths of the lists of hot and of cold ids of each table, ``[2, T]``; -1 where there is no list.

        Without a rest there is none of cold ids: all that is not hot is cold.
        """
        none = division.is_full | (division.own == 0) | (self.entry == 0)
        return np.where([none, none | (division.rest == 0)], -1, [division.hot, division.cold])

    def list_bytes(self, division: Division) -> Integers:
        """Bytes of the lists of each table."""
        return np.maximum(self.lists(division), 0).sum(0) * self.entry

    def _none_grows(self, division: Division) -> Division:
        """The division, but with a table in full where its rows and lists would take no fewer bytes."""
        listed = self.list_bytes(division)
        index = most_index_bytes(self.lists(division), self.size, np.arange(len(self.size)))
        smaller = division.own * self.row + listed + index * np.maximum(self.entry // 4, 1)
        grows = (listed > 0) & (smaller >= self.size * self.row)
        if not grows.any():
            return division
        cold = np.where(grows, 0, division.cold)
        used = np.bincount(self.group, cold, self.num_groups) > 0
        hot, rest = np.where(grows, self.size, division.hot), np.where(grows, 0, division.rest)
        return Division(hot, cold, rest, np.where(used, division.pools, 0))

    def _first(self, number: int, ids: Integers, ends: Integers) -> Integers:
        """How many of the first ``number`` ids each table has; ``ends`` is the cumulative sum of ``ids``."""
        whole = int(np.searchsorted(ends, number, side="right"))
        first = np.bincount(self.number[:whole], ids[:whole], len(self.size)).astype(np.int64)
        if whole < len(ends):
            first[self.number[whole]] += number - (int(ends[whole - 1]) if whole else 0)
        return first

    def bytes(self, division: Division) -> int:
        """Bytes that a division takes."""
        rows = int((division.own * self.row).sum() + (division.pools * self.group_row).sum())
        return rows + int(self.list_bytes(division).sum()) + self.overhead(division)


def divide(tables: CountedTables, budget: int) -> Division | None:
    """Divide the ids within a budget; None if it does not pay for one row for each table."""
    full = tables.without_pool(int(tables.size.sum()))
    if tables.bytes(full) <= budget:
        return full
    num_seen = int(tables.ids[tables.value > 0].sum())
    unpooled = _most_hot(tables.without_pool, num_seen, tables, budget)
    if unpooled is None:
        return None
    least = float(RARELY) if noise(tables) else 0.0
    space = budget - tables.overhead(tables.with_pool(0, least, 0.0))
    for threshold, row_bytes, list_bytes in _thresholds(tables, least, space):
        left = space - float(list_bytes)
        num_kept = int(tables.ids[tables.value > threshold].sum())
        if row_bytes <= left or int(unpooled.hot.sum()) >= num_kept:
            return unpooled
        pool_bytes = min(POOL_SHARE, float(row_bytes) / left - 1) * left
        with_pool = partial(tables.with_pool, threshold=threshold, pool_bytes=pool_bytes)
        division = _most_hot(with_pool, num_kept, tables, budget)
        if division is not None:
            return division
    return unpooled


def noise(tables: CountedTables) -> float:
    """The count up to which an id is not worth a row: 1 if most ids seen once will not be seen again, else 0.

    If N1 ids were seen once and N2 twice, an id seen once can expect ``2 N2 / N1`` visits in a second log of the same
    length (the estimate of Good and Turing). Where counts are fractions (shares of traffic), the result is 0.
    """
    return 1.0 if (tables.value == np.floor(tables.value)).all() and tables.visits_of_once() < 1 else 0.0


def gives_rows_to_all(tables: CountedTables, division: Division) -> bool:
    """Whether all ids with counts above ``noise`` have rows, and others expect at most SHARED_VISITS of all visits."""
    if _num_without_row(tables, division, noise(tables)):
        return False
    visits = tables.visits_of_once() * _num_without_row(tables, division, 0.0)
    return visits <= SHARED_VISITS * float((tables.value * tables.ids).sum())


def _num_without_row(tables: CountedTables, division: Division, threshold: float) -> int:
    """Number of ids with a count above ``threshold`` that have no row of their own."""
    kept = tables.with_pool(0, threshold, 0.0)
    return int(np.where(division.is_full, 0, np.maximum(kept.hot + kept.cold - division.hot, 0)).sum())


def _thresholds(tables: CountedTables, least: float, space: int) -> Iterator[tuple[float, int, int]]:
    """Counts up to which ids may be the rest, rising from ``least``, and the bytes of rows and lists of the other ids.

    There are at most KEPT_PER_ROW other ids for each row of ``space``. With fewer cold ids the pool needs fewer rows,
    so distances double: the 1st, 2nd, 4th, 8th, ... are tried.
    """
    counts = np.unique(np.append(tables.value[tables.value > least], least))
    order = np.argsort(tables.value)
    below = np.searchsorted(tables.value[order], counts, side="right")

    def bytes_above(bytes_of_id: Integers) -> Integers:
        total = np.concatenate([[0], np.cumsum((tables.ids * bytes_of_id[tables.number])[order])])
        return np.asarray(total[-1] - total[below])

    rows, lists = bytes_above(tables.row), bytes_above(tables.entry)
    fitting = np.flatnonzero((rows <= KEPT_PER_ROW * (space - lists)) & (lists < space)).tolist()
    position = 1
    while position <= len(fitting):
        i = fitting[position - 1]
        yield float(counts[i]), int(rows[i]), int(lists[i])
        position *= 2


def _most_hot(
    division_with: Callable[[int], Division], most: int, tables: CountedTables, budget: int
) -> Division | None:
    """The division with the most hot ids that fits the budget; None if not even one without hot ids fits."""

    def fits(num_hot: int) -> bool:
        return tables.bytes(division_with(num_hot)) <= budget

    return division_with(most - bisect_left(range(most, 0, -1), True, key=fits)) if fits(0) else None

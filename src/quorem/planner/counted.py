"""Plans for tables whose ids are all counted: ``by_count`` over the tables of all modules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ops.layout import SLOT_COLUMNS
from ..paper.schemes import Full, HotCold, Pool, Scheme
from ..paper.schemes.frequency import comes_by_frequency
from .by_count import (
    PARTITIONS,
    CountedTable,
    CountedTables,
    Division,
    Integers,
    Rule,
    divide,
    gives_rows_to_all,
    most_index_bytes,
)
from .footprint import StoredModules
from .planned import Candidate, PlannedPool

Shares = tuple[float, float, float]  # of a table's traffic: to hot, cold and rest ids


class _Counted(NamedTuple):
    """One table: its counts, and the same as ``by_count`` takes them."""

    counts: NDArray[np.generic]
    visits: float  # their sum
    by_count: CountedTable
    in_order: bool  # whether ids are in order of frequency


def plan_counted(stored: StoredModules, budget: int, rule: Rule) -> Candidate:
    """Plan tables whose ids are all counted.

    Args:
        stored: the tables, with frequencies of each.
        budget: bytes.
        rule: how the budget is divided.
    """
    groups = [(m, table.embedding_dim) for m, table in zip(stored.module_of.tolist(), stored.tables, strict=True)]
    number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}  # by module and width
    counted = [_counted(stored, t, number_of[group]) for t, group in enumerate(groups)]
    pool_state = np.array([stored.table_state[stored.module_of == m].max() for m, _ in number_of])

    def partitions(division: Division) -> Integers:
        return (division.own > 0) + PARTITIONS * (division.cold > 0)

    def overhead(division: Division) -> int:
        of_pools = (pool_state * PARTITIONS * (division.pools > 0)).sum()
        of_tables = (stored.table_state * (division.own > 0)).sum()
        return sum(stored.shared(partitions(division))) + int(of_tables + of_pools) + index_bytes(division)

    copies = np.array([module.tables[0].num_modules for module in stored.modules])
    slot_bytes = np.array([8 * SLOT_COLUMNS * storage.num_slots for storage in stored.storages])
    has_lists = np.array([table.by_count.listed > 0 for table in counted])

    def index_bytes(division: Division) -> int:
        """Bytes of the indices over lists that devices make at the first lookup (``ops.words``)."""
        lists = [np.where(has_lists, lengths, -1) for lengths in division.lists]
        most = most_index_bytes(lists, tables.size, stored.module_of)
        return int(((most + slot_bytes * (most > 0)) * copies).sum())  # with words go slots that point to them

    tables = CountedTables([table.by_count for table in counted], len(number_of), overhead)
    least = tables.bytes(tables.without_pool(0))  # one row for each table
    division = divide(tables, budget, rule)
    if division is None:
        return Candidate(None, least)
    pools = _pools(division)
    traffics = [_traffic(table, division, t) for t, table in enumerate(counted)]
    average = sum(table.visits for table in counted) / len(counted) or 1.0
    entries = []
    for t, (table, traffic) in enumerate(zip(counted, traffics, strict=True)):
        n, own = stored.tables[t].num_embeddings, int(division.own[t])
        hot, cold = (n, 0) if division.is_full[t] else (int(division.hot[t]), int(division.cold[t]))
        rest, list_bytes = n - hot - cold, int(table.by_count.listed * division.listed[t])
        scheme: Scheme = Full()
        if hot < n:
            scheme = HotCold(hot, cold=pools[table.by_count.group] if cold else Full(), num_rest=rest)
        entries.append(
            stored.planned_table(
                t,
                scheme,
                own,
                int(own > 0),
                list_bytes=list_bytes,
                cost=(traffic[1] + traffic[2]) * table.visits / average,
                why=_why(hot, cold, rest, traffic),
                visits=table.visits,
                traffic=traffic,
                ranked=list_bytes > 0,
            )
        )
    planned_pools = list(_planned_pools(stored, counted, division, pools, traffics))
    planned = stored.plan(entries, budget, partitions(division), planned_pools, index_bytes(division))
    return Candidate(planned, least, gives_rows_to_all(tables, division, serving=stored.optimizer is None))


def _pools(division: Division) -> dict[int, Pool]:
    """The pools by number; their names are numbered if there are several."""
    used = np.flatnonzero(division.pools).tolist()
    names = ["pool"] if len(used) == 1 else [f"pool{i}" for i in range(1, len(used) + 1)]
    return {g: Pool(int(division.pools[g]), PARTITIONS, name=name) for g, name in zip(used, names, strict=True)}


def _planned_pools(
    stored: StoredModules,
    counted: Sequence[_Counted],
    division: Division,
    pools: Mapping[int, Pool],
    traffics: Sequence[Shares],
) -> Iterator[PlannedPool]:
    visits = sum(table.visits for table in counted) or 1.0
    for number, pool in pools.items():
        members = [t for t, table in enumerate(counted) if table.by_count.group == number and division.cold[t]]
        rate = stored.rates[members[0]]
        yield PlannedPool(
            name=pool.name,
            tables=tuple(stored.tables[t].name for t in members),
            embedding_dim=stored.tables[members[0]].embedding_dim,
            num_rows=pool.num_rows,
            num_ids=int(sum(division.cold[t] for t in members)),
            bytes=pool.num_rows * rate.row,
            state_bytes=pool.num_rows * rate.row_state + PARTITIONS * rate.table_state,
            traffic=sum(traffics[t][1] * counted[t].visits for t in members) / visits,
        )


def _counted(stored: StoredModules, t: int, group: int) -> _Counted:
    table, module = stored.tables[t], stored.modules[stored.module_of[t]]
    assert table.frequencies is not None
    counts = (table.frequencies.double() if table.frequencies.is_floating_point() else table.frequencies).numpy()
    unseen = table.num_embeddings - len(counts)
    in_order = not unseen and comes_by_frequency(table.frequencies)
    # The lists of all tables of a module are stored in one tensor, so they have one dtype.
    listed = 8 if any(other.num_embeddings >= 2**31 for other in module.tables) else 4
    listed *= table.num_modules
    by_count = CountedTable.of(counts, int(stored.row[t]), listed, group, in_order=in_order, unseen=unseen)
    return _Counted(counts, float(counts.sum()), by_count, in_order)


def _traffic(table: _Counted, division: Division, t: int) -> Shares:
    """Shares of a table's traffic that go to its hot, cold and rest ids."""
    counts, total, hot, cold = table.counts, table.visits, int(division.hot[t]), int(division.cold[t])
    if not total or division.is_full[t] or hot == len(counts):
        return (1.0, 0.0, 0.0)
    if table.in_order:
        first, second = float(counts[:hot].sum()) / total, float(counts[hot : hot + cold].sum()) / total
    else:
        most_frequent = table.by_count.visits_of_first(hot)
        first, second = most_frequent / total, (table.by_count.visits_of_first(hot + cold) - most_frequent) / total
    first, second = min(first, 1.0), min(second, 1.0)  # rounding may give sums above 1
    return (first, second, max(0.0, 1 - first - second))


def _why(hot: int, cold: int, rest: int, traffic: Shares) -> str:
    if not cold and not rest:
        return "every id has a row of its own"
    parts = [f"{hot:,} ids with {traffic[0]:.1%} of the traffic have rows of their own"]
    parts += [f"{cold:,} with {traffic[1]:.1%} share the pool"] if cold else []
    parts += [f"{rest:,} with {traffic[2]:.1%} share one row"] if rest else []
    return "; ".join(parts)

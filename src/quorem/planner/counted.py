"""Plans for tables whose ids are all counted: ``by_count`` over the tables of all modules."""

from collections.abc import Sequence

import numpy as np

from ..ops.layout import SLOT_COLUMNS
from ..paper.schemes import Full, HotCold, Pool, Scheme
from ..paper.schemes.frequency import comes_by_frequency
from .by_count import (
    PARTITIONS,
    REST_COST,
    CountedTables,
    Division,
    Integers,
    Rule,
    Tally,
    divide,
    gives_rows_to_all,
    most_index_bytes,
    noise,
)
from .footprint import StoredModules
from .modules import TableToPlan
from .planned import Candidate, PlannedPool

Shares = tuple[float, float, float]  # of a table's traffic: to hot, cold and rest ids


def tally(table: TableToPlan) -> Tally:
    """How often the ids of a table occur, counted by value."""
    assert table.frequencies is not None
    counts = (table.frequencies.double() if table.frequencies.is_floating_point() else table.frequencies).numpy()
    unseen = table.num_embeddings - len(counts)
    return Tally.of(counts, in_order=not unseen and comes_by_frequency(table.frequencies), unseen=unseen)


def plan_counted(stored: StoredModules, tallies: Sequence[Tally], budget: int, rule: Rule) -> Candidate:
    """Plan tables whose ids are all counted.

    Args:
        stored: the tables.
        tallies: the ``tally`` of each.
        budget: bytes.
        rule: how the budget is divided.
    """
    groups = list(zip(stored.module_of.tolist(), stored.widths, strict=True))
    number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}  # by module and width
    group_of = np.array([number_of[group] for group in groups])
    listed = np.array([_listed_bytes(stored, t, table.in_order) for t, table in enumerate(tallies)])
    pool_state = np.array([stored.table_state[stored.module_of == m].max() for m, _ in number_of])

    def partitions(division: Division) -> Integers:
        return (division.own > 0) + PARTITIONS * (division.cold > 0)

    def overhead(division: Division) -> int:
        of_pools = (pool_state * PARTITIONS * (division.pools > 0)).sum()
        of_tables = (stored.table_state * (division.own > 0)).sum()
        shared = sum(stored.shared(partitions(division))) + stored.matrix_bytes
        return shared + int(of_tables + of_pools) + index_bytes(division)

    copies = np.array([module.tables[0].num_modules for module in stored.modules])
    slot_bytes = np.array([each.integer_bytes * SLOT_COLUMNS * each.num_slots for each in stored.storages])

    def index_bytes(division: Division) -> int:
        """Bytes of the indices over lists that devices make at the first lookup (``ops.words``)."""
        lists = [np.where(listed > 0, lengths, -1) for lengths in division.lists]
        most = most_index_bytes(lists, tables.size, stored.module_of)
        return int(((most + slot_bytes * (most > 0)) * copies).sum())  # with words go slots that point to them

    tables = CountedTables(tallies, stored.row, listed, group_of, overhead)
    least = tables.bytes(tables.without_pool(0))  # one row for each table
    division = divide(tables, budget, rule)
    if division is None:
        return Candidate(None, least)
    pools = _pools(division)
    traffics = [_traffic(table, division, t) for t, table in enumerate(tallies)]
    average = sum(table.visits for table in tallies) / len(tallies) or 1.0
    entries = []
    for t, (table, traffic) in enumerate(zip(tallies, traffics, strict=True)):
        n, own = stored.tables[t].num_embeddings, int(division.own[t])
        hot, cold = (n, 0) if division.is_full[t] else (int(division.hot[t]), int(division.cold[t]))
        rest, list_bytes = n - hot - cold, int(listed[t] * division.listed[t])
        scheme: Scheme = Full()
        if hot < n:
            scheme = HotCold(hot, cold=pools[group_of[t]] if cold else Full(), num_rest=rest)
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
    visits = average * len(tallies)
    planned_pools = []
    for group, pool in pools.items():
        members = np.flatnonzero((group_of == group) & (division.cold > 0)).tolist()
        rate = stored.rates[members[0]]
        planned_pools.append(
            PlannedPool(
                name=pool.name,
                tables=tuple(stored.tables[t].name for t in members),
                width=stored.widths[members[0]],
                num_rows=pool.num_rows,
                num_ids=int(division.cold[members].sum()),
                bytes=pool.num_rows * rate.row,
                state_bytes=pool.num_rows * rate.row_state + PARTITIONS * rate.table_state,
                traffic=sum(traffics[t][1] * tallies[t].visits for t in members) / visits,
            )
        )
    planned = stored.plan(entries, budget, partitions(division), planned_pools, index_bytes(division))
    _, of_cold, of_rest = planned.traffic
    return Candidate(
        planned,
        least,
        gives_rows_to_all(tables, division),
        of_cold + REST_COST * max(0.0, of_rest - tables.share_up_to(rule.rarely if noise(tables) else 0)),
    )


def _pools(division: Division) -> dict[int, Pool]:
    """The pools by number; their names are numbered if there are several."""
    used = np.flatnonzero(division.pools).tolist()
    names = ["pool"] if len(used) == 1 else [f"pool{i}" for i in range(1, len(used) + 1)]
    return {g: Pool(int(division.pools[g]), PARTITIONS, name=name) for g, name in zip(used, names, strict=True)}


def _listed_bytes(stored: StoredModules, t: int, in_order: bool) -> int:
    """Bytes of an entry in the lists of table ``t``; 0 if it has none."""
    module = stored.modules[stored.module_of[t]]
    # The lists of all tables of a module are stored in one tensor, so they have one dtype.
    entry = 8 if any(table.num_embeddings >= 2**31 for table in module.tables) else 4
    return 0 if in_order else entry * stored.tables[t].num_modules


def _traffic(table: Tally, division: Division, t: int) -> Shares:
    """Shares of a table's traffic that go to its hot, cold and rest ids."""
    hot, cold = int(division.hot[t]), int(division.cold[t])
    if not table.visits or division.is_full[t] or hot == len(table.counts):
        return (1.0, 0.0, 0.0)
    of_hot = table.visits_of_first(hot)
    first = min(of_hot / table.visits, 1.0)  # rounding may give sums above 1
    second = min((table.visits_of_first(hot + cold) - of_hot) / table.visits, 1.0)
    return (first, second, max(0.0, 1 - first - second))


def _why(hot: int, cold: int, rest: int, traffic: Shares) -> str:
    if not cold and not rest:
        return "every id has a row of its own"
    parts = [f"{hot:,} ids with {traffic[0]:.1%} of the traffic have rows of their own"]
    parts += [f"{cold:,} with {traffic[1]:.1%} share the pool"] if cold else []
    parts += [f"{rest:,} with {traffic[2]:.1%} share one row"] if rest else []
    return "; ".join(parts)

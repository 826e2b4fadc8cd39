"""Plans for tables whose ids are all counted: ``by_count`` over the tables of all modules."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..modules.collection import Table
from ..paper.schemes import Full, HotCold, Pool, RawCounts, Scheme
from ..paper.schemes.frequency import comes_by_frequency, counts_by_id
from . import by_count
from .by_count import PARTITIONS, CountedTables, Division, Tally, divide, most_index_bytes, noise
from .footprint import StoredModules
from .planned import Candidate, Plan, PlannedPool

REST_COST = 2.0  # cost of a visit to an id of the rest that is not rare; a visit to an id of the pool costs 1
Shares = tuple[float, float, float]  # of a table's traffic: to hot, cold and rest ids


def tally(table: Table) -> Tally:
    """How often the ids of a table occur, counted by value; of raw ids only those that occur are listed."""
    counts = table.frequencies
    if isinstance(counts, RawCounts):
        counts = counts_by_id(counts, table.num_embeddings)[1]
    assert isinstance(counts, Tensor)
    unseen = table.num_embeddings - len(counts)
    wide = counts.double() if counts.is_floating_point() else counts
    return Tally.of(wide.numpy(), in_order=not unseen and comes_by_frequency(counts), unseen=unseen)


def plan_counted(stored: StoredModules, tallies: Sequence[Tally], budget: int) -> Candidate:
    """Plan tables whose ids are all counted; ``tallies`` has the ``tally`` of each."""
    groups = list(zip(stored.module_numbers.tolist(), stored.widths, strict=True))
    number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}  # by module and width
    group_of = np.array([number_of[group] for group in groups])
    first = np.unique(group_of, return_index=True)[1]  # a table of each group
    pieces = np.array([width // module.width for module, width in zip(stored.of_table, stored.widths, strict=True)])
    # The lists of all tables of a module are stored in one tensor, so they have one dtype.
    most_ids = [max(table.num_embeddings for table in each.module.tables) for each in stored.stored]
    of_module = np.where(np.array(most_ids) >= 2**31, 8, 4) * stored.copies
    entry = np.where([table.in_order for table in tallies], 0, of_module[stored.module_numbers])
    slot_bytes = np.array([each.slot_bytes for each in stored.stored])

    def bytes_shared(division: Division) -> tuple[int, int]:
        partitions = (division.own > 0) + PARTITIONS * (division.cold > 0)
        rows = np.bincount(stored.module_numbers, division.own * pieces)
        rows += np.bincount(stored.module_numbers[first], division.pools * pieces[first], len(rows))
        return stored.shared(partitions, rows.astype(np.int64).tolist())

    def overhead(division: Division) -> int:
        of_pools = (stored.table_state[first] * PARTITIONS * (division.pools > 0)).sum()
        of_tables = (stored.table_state * (division.own > 0)).sum()
        return sum(bytes_shared(division)) + stored.matrix_bytes + int(of_tables + of_pools) + index_bytes(division)

    def index_bytes(division: Division) -> int:
        """Bytes of the indices over lists that devices make at the first lookup (``ops.words``)."""
        most = most_index_bytes(tables.lists(division), tables.size, stored.module_numbers)
        return int(((most + slot_bytes * (most > 0)) * stored.copies).sum())  # with words go slots that point to them

    tables = CountedTables(tallies, stored.row, entry, group_of, overhead)
    least = tables.bytes(tables.without_pool(0))  # one row for each table
    division = divide(tables, budget)
    if division is None:
        return Candidate(None, least)
    used = np.flatnonzero(division.pools).tolist()
    names = ["pool"] if len(used) == 1 else [f"pool{i}" for i in range(1, len(used) + 1)]
    pools = {g: Pool(int(division.pools[g]), PARTITIONS, name=name) for g, name in zip(used, names, strict=True)}
    traffics = [_traffic(table, division, t) for t, table in enumerate(tallies)]
    list_bytes = tables.list_bytes(division).tolist()
    average = sum(table.visits for table in tallies) / len(tallies) or 1.0
    entries = []
    for t, (table, traffic) in enumerate(zip(tallies, traffics, strict=True)):
        n, own = stored.tables[t].num_embeddings, int(division.own[t])
        hot, cold = (n, 0) if division.is_full[t] else (int(division.hot[t]), int(division.cold[t]))
        rest = n - hot - cold
        scheme: Scheme = Full()
        if hot < n:
            scheme = HotCold(hot, cold=pools[group_of[t]] if cold else Full(), num_rest=rest)
        entries.append(
            stored.planned_table(
                t,
                scheme,
                own,
                int(own > 0),
                list_bytes=list_bytes[t],
                cost=(traffic[1] + traffic[2]) * table.visits / average,
                why=_why(hot, cold, rest, traffic),
                visits=table.visits,
                traffic=traffic,
                ranked=list_bytes[t] > 0,
            )
        )
    planned_pools = []
    for g, pool in pools.items():
        members = np.flatnonzero((group_of == g) & (division.cold > 0)).tolist()
        module, width = stored.of_table[members[0]], stored.widths[members[0]]
        planned_pools.append(
            PlannedPool(
                name=pool.name,
                tables=tuple(stored.tables[t].name for t in members),
                width=width,
                num_rows=pool.num_rows,
                num_ids=int(division.cold[members].sum()),
                bytes=pool.num_rows * module.row(width),
                state_bytes=pool.num_rows * module.row_state(width) + PARTITIONS * module.state.table,
                traffic=sum(traffics[t][1] * tallies[t].visits for t in members) / (average * len(tallies)),
            )
        )
    layouts, state = bytes_shared(division)
    options = {**stored.options, "shared_bytes": layouts, "shared_state_bytes": state}
    options |= {"pools": tuple(planned_pools), "index_bytes": index_bytes(division)}
    planned = Plan(tables=tuple(entries), budget=budget, **options)
    _, of_cold, of_rest = planned.traffic
    rarely = by_count.share_up_to(by_count.RARELY if noise(tables) else 0, tables.value, tables.ids)
    shared = of_cold + REST_COST * max(0.0, of_rest - rarely)
    return Candidate(planned, least, by_count.gives_rows_to_all(tables, division), shared)


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

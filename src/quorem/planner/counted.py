"""Plans for tables whose ids are all counted: ``by_count`` over the tables of all modules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..optimizer_names import Optimizer
from ..schemes import Full, HotCold, Pool
from ..schemes.frequency import comes_by_frequency
from .by_count import PARTITIONS, CountedTable, CountedTables, Division, Rule, divide, gives_rows_to_all, smallest
from .footprint import Rate, TrainedStorage, number_bytes
from .modules import Module, storage_of
from .planned import Candidate, Plan, PlannedPool, PlannedTable


class _Table(NamedTuple):
    """A table to plan: where it is, how often its ids occur, and what its rows cost."""

    module: int  # position of its module
    name: str
    num_embeddings: int
    embedding_dim: int
    counts: NDArray[np.generic]  # of all ids, or for raw ids of those that occur
    visits: float  # sum of the counts
    in_order: bool  # whether ids are in order of frequency
    rate: Rate
    by_count: CountedTable


def plan_counted(
    modules: Sequence[Module],
    narrowed: Sequence[Module],
    budget: int,
    optimizer: Optimizer | None,
    bits: int,
    rule: Rule,
) -> Candidate:
    """Plan with rows of the dtypes of ``narrowed``, or of ``bits`` bits.

    Args:
        modules: the modules, with frequencies of every table.
        narrowed: the same modules, with the dtypes that rows are to have.
        budget: bytes.
        optimizer: the optimizer whose state counts; None for none.
        bits: bits of a stored number after training; 0 keeps the dtypes.
        rule: how the budget is divided.
    """
    storages = [storage_of(module, optimizer, bits) for module in narrowed]
    tables = _tables_of(modules, storages)
    module_of = np.array([table.module for table in tables])
    table_state = np.array([table.rate.table_state for table in tables])
    rate_of_group = {table.by_count.group: table.rate for table in tables}

    def shared(division: Division) -> tuple[int, int]:
        """Bytes of the modules and of the state that belong to no table and no pool."""
        partitions = (division.own > 0) + PARTITIONS * (division.cold > 0)
        pairs = [storage.fixed(int(partitions[module_of == m].max())) for m, storage in enumerate(storages)]
        return sum(layout for layout, _ in pairs), sum(state for _, state in pairs)

    def overhead(division: Division) -> int:
        pools = sum(PARTITIONS * rate_of_group[g].table_state for g in np.flatnonzero(division.pools).tolist())
        return sum(shared(division)) + int(table_state[division.own > 0].sum()) + pools

    by_count = CountedTables([table.by_count for table in tables], len(rate_of_group), overhead)
    least, division = smallest(by_count), divide(by_count, budget, rule)
    if division is None:
        return Candidate(None, least)
    used = np.flatnonzero(division.pools).tolist()
    names = ["pool"] if len(used) == 1 else [f"pool{number}" for number in range(1, len(used) + 1)]
    pools = {g: Pool(int(division.pools[g]), PARTITIONS, name=name) for g, name in zip(used, names, strict=True)}
    layout, state = shared(division)
    plan = Plan(
        tables=tuple(_entries(tables, division, pools, modules, narrowed)),
        budget=budget,
        optimizer=optimizer,
        shared_bytes=layout,
        shared_state_bytes=state,
        pools=tuple(_entries_of_pools(tables, division, pools)),
        bits=bits or None,
    )
    return Candidate(plan, least, gives_rows_to_all(by_count, division))


def _tables_of(modules: Sequence[Module], storages: Sequence[TrainedStorage]) -> list[_Table]:
    tables = []
    groups: dict[tuple[int, int], int] = {}  # numbers of the possible pools, by module and width
    for m, (module, storage) in enumerate(zip(modules, storages, strict=True)):
        # The lists of all tables of a module are stored in one tensor, so they have one dtype.
        listed = 8 if any(n >= 2**31 for n, _ in module.sizes) else 4
        for name, (n, d), found in zip(module.names, module.sizes, module.frequencies, strict=True):
            assert found is not None
            counts = (found.double() if found.is_floating_point() else found).numpy()
            unseen = n - len(counts)
            in_order = not unseen and comes_by_frequency(found)
            rate, group = storage.rate(d), groups.setdefault((m, d), len(groups))
            row = rate.row + rate.row_state
            by_count = CountedTable.of(counts, row, listed, group, in_order=in_order, unseen=unseen)
            tables.append(_Table(m, name, n, d, counts, float(counts.sum()), in_order, rate, by_count))
    return tables


def _entries(
    tables: Sequence[_Table],
    division: Division,
    pools: Mapping[int, Pool],
    modules: Sequence[Module],
    narrowed: Sequence[Module],
) -> Iterator[PlannedTable]:
    average = sum(table.visits for table in tables) / len(tables) or 1.0
    for i, table in enumerate(tables):
        n, rate, own = table.num_embeddings, table.rate, int(division.own[i])
        hot, cold = (n, 0) if division.is_full[i] else (int(division.hot[i]), int(division.cold[i]))
        rest = n - hot - cold
        shared = pools[table.by_count.group] if cold else Full()
        lists = int(table.by_count.listed * division.listed[i])
        traffic = _traffic(table, hot, cold)
        yield PlannedTable(
            name=table.name,
            num_embeddings=n,
            embedding_dim=table.embedding_dim,
            scheme=Full() if hot == n else HotCold(hot, cold=shared, num_rest=rest),
            dtype=narrowed[table.module].dtype,
            bytes_before=n * table.embedding_dim * number_bytes(modules[table.module].dtype),
            bytes=own * rate.row + lists,
            state_bytes=own * rate.row_state + rate.table_state * (own > 0),
            cost=(traffic[1] + traffic[2]) * table.visits / average,
            why=_why(hot, cold, rest, traffic),
            visits=table.visits,
            traffic=traffic,
            ranked=lists > 0,
        )


def _entries_of_pools(tables: Sequence[_Table], division: Division, pools: Mapping[int, Pool]) -> Iterator[PlannedPool]:
    visits = sum(table.visits for table in tables) or 1.0
    for group, pool in pools.items():
        members = [
            (table, int(division.hot[i]), int(division.cold[i]))
            for i, table in enumerate(tables)
            if table.by_count.group == group and division.cold[i]
        ]
        first, rate = members[0][0], members[0][0].rate
        yield PlannedPool(
            name=pool.name,
            tables=tuple(table.name for table, _, _ in members),
            embedding_dim=first.embedding_dim,
            num_rows=pool.num_rows,
            num_ids=sum(cold for _, _, cold in members),
            bytes=pool.num_rows * rate.row,
            state_bytes=pool.num_rows * rate.row_state + PARTITIONS * rate.table_state,
            traffic=sum(_traffic(table, hot, cold)[1] * table.visits for table, hot, cold in members) / visits,
        )


def _traffic(table: _Table, hot: int, cold: int) -> tuple[float, float, float]:
    """Shares of a table's traffic that go to its hot, cold and rest ids."""
    if not table.visits or hot == len(table.counts):
        return (1.0, 0.0, 0.0)
    if table.in_order:
        of_hot, of_cold = float(table.counts[:hot].sum()), float(table.counts[hot : hot + cold].sum())
    else:
        of_hot = table.by_count.visits_of_first(hot)
        of_cold = table.by_count.visits_of_first(hot + cold) - of_hot
    first, second = min(of_hot / table.visits, 1.0), min(of_cold / table.visits, 1.0)  # 1: sums are rounded
    return (first, second, max(0.0, 1 - first - second))


def _why(hot: int, cold: int, rest: int, traffic: tuple[float, float, float]) -> str:
    if not cold and not rest:
        return "every id has a row of its own"
    parts = [f"{hot:,} ids with {traffic[0]:.1%} of the traffic have rows of their own"]
    parts += [f"{cold:,} with {traffic[1]:.1%} share the pool"] if cold else []
    parts += [f"{rest:,} with {traffic[2]:.1%} share one row"] if rest else []
    return "; ".join(parts)

"""Plans for tables whose ids are all counted: ``by_count`` over the tables of all modules."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..optimizer_names import Optimizer
from ..schemes import Full, HotCold, Pool, Scheme
from ..schemes.frequency import comes_by_frequency
from .by_count import PARTITIONS, CountedTable, CountedTables, Division, Rule, divide, gives_rows_to_all, smallest
from .footprint import number_bytes
from .modules import Module, storage_of
from .planned import Plan, PlannedPool, PlannedTable


class Candidate(NamedTuple):
    """A plan, and what is needed to compare it with others."""

    plan: Plan | None  # None if the budget is too small
    least: int  # bytes of the smallest possible budget
    gives_rows_to_all: bool  # whether each id seen more than once has a row of its own


class _TablePosition(NamedTuple):
    """Where a table is: the position of its module, its position there, and the pool that its cold ids would share."""

    module: int
    table: int
    group: int


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
    groups: dict[tuple[int, int], int] = {}  # by module and width
    positions = [
        _TablePosition(m, t, groups.setdefault((m, d), len(groups)))
        for m, module in enumerate(modules)
        for t, (_, d) in enumerate(module.sizes)
    ]
    counts, in_order, unseen = [], [], []
    for position in positions:
        found = modules[position.module].frequencies[position.table]
        assert found is not None
        counts.append((found.double() if found.is_floating_point() else found).numpy())
        unseen.append(modules[position.module].sizes[position.table][0] - len(found))
        in_order.append(not unseen[-1] and comes_by_frequency(found))
    # The lists of all tables of a module are stored in one tensor, so they have one dtype.
    listed = [8 if any(n >= 2**31 for n, _ in module.sizes) else 4 for module in modules]
    rates = [
        storages[position.module].rate(modules[position.module].sizes[position.table][1]) for position in positions
    ]
    counted = [
        CountedTable.of(
            count, rate.row + rate.row_state, listed[position.module], position.group, in_order=ordered, unseen=more
        )
        for position, count, rate, ordered, more in zip(positions, counts, rates, in_order, unseen, strict=True)
    ]
    module_of = np.array([position.module for position in positions])
    module_of_group = np.array([m for m, _ in groups])

    def shared(division: Division) -> tuple[int, int]:
        """Bytes of the modules and of the state that belong to no table and no pool."""
        partitions = (division.own > 0) + PARTITIONS * (division.cold > 0)
        pairs = [storage.fixed(int(partitions[module_of == m].max())) for m, storage in enumerate(storages)]
        return sum(layout for layout, _ in pairs), sum(state for _, state in pairs)

    table_state = np.array([rate.table_state for rate in rates])

    def overhead(division: Division) -> int:
        pools = np.zeros(len(storages), np.int64)
        np.add.at(pools, module_of_group, PARTITIONS * (division.pools > 0))
        per_table = np.array([table_state[module_of == m].max() for m in range(len(storages))])
        return sum(shared(division)) + int((table_state * (division.own > 0)).sum() + (per_table * pools).sum())

    tables = CountedTables(counted, len(groups), overhead)
    least = smallest(tables)
    division = divide(tables, budget, rule)
    if division is None:
        return Candidate(None, least, False)
    total = [float(count.sum()) for count in counts]
    average = sum(total) / len(total) or 1.0
    entries, traffic_of_pools = [], np.zeros(len(groups))
    for i, (position, count, rate) in enumerate(zip(positions, counts, rates, strict=True)):
        before = modules[position.module]
        n, d = before.sizes[position.table]
        hot, cold = (n, 0) if division.is_full[i] else (int(division.hot[i]), int(division.cold[i]))
        rest = n - hot - cold
        traffic = _traffic(count, counted[i], hot, cold, in_order[i])
        traffic_of_pools[position.group] += traffic[1] * total[i]
        lists = int(counted[i].listed * division.listed[i])
        own = int(division.own[i])
        entries.append(
            PlannedTable(
                name=before.names[position.table],
                num_embeddings=n,
                embedding_dim=d,
                scheme=_scheme(n, hot, cold, rest, _pool(division, position.group)),
                dtype=narrowed[position.module].dtype,
                bytes_before=n * d * number_bytes(before.dtype),
                bytes=own * rate.row + lists,
                state_bytes=own * rate.row_state + rate.table_state * (own > 0),
                cost=(traffic[1] + traffic[2]) * total[i] / average,
                why=_why(hot, cold, rest, traffic),
                visits=total[i],
                traffic=traffic,
                ranked=lists > 0,
            )
        )
    pools = []
    for (m, d), g in groups.items():
        if rows := int(division.pools[g]):
            members = [i for i, position in enumerate(positions) if position.group == g and division.cold[i]]
            rate = rates[members[0]]
            pools.append(
                PlannedPool(
                    name=_pool(division, g).name,
                    tables=tuple(modules[m].names[positions[i].table] for i in members),
                    embedding_dim=d,
                    num_rows=rows,
                    num_ids=int(sum(division.cold[i] for i in members)),
                    bytes=rows * rate.row,
                    state_bytes=rows * rate.row_state + PARTITIONS * rate.table_state,
                    traffic=float(traffic_of_pools[g] / (sum(total) or 1.0)),
                )
            )
    layout, state = shared(division)
    return Candidate(
        Plan(
            tables=tuple(entries),
            budget=budget,
            optimizer=optimizer,
            shared_bytes=layout,
            shared_state_bytes=state,
            pools=tuple(pools),
            bits=bits or None,
        ),
        least,
        gives_rows_to_all(tables, division),
    )


def _pool(division: Division, group: int) -> Pool:
    """The pool of a group; its name has a number if the plan has several pools."""
    used = np.flatnonzero(division.pools).tolist()
    name = "pool" if len(used) < 2 else f"pool{used.index(group) + 1 if group in used else 0}"
    return Pool(max(int(division.pools[group]), PARTITIONS), PARTITIONS, name=name)


def _scheme(n: int, hot: int, cold: int, rest: int, pool: Pool) -> Scheme:
    if hot == n:
        return Full()
    return HotCold(hot, cold=pool if cold else Full(), num_rest=rest)


def _traffic(
    count: NDArray[np.generic], table: CountedTable, hot: int, cold: int, in_order: bool
) -> tuple[float, float, float]:
    """Shares of a table's traffic that go to its hot, cold and rest ids."""
    total = float(count.sum())
    if not total or hot == len(count):
        return (1.0, 0.0, 0.0)
    if in_order:
        first, second = float(count[:hot].sum()) / total, float(count[hot : hot + cold].sum()) / total
    else:
        most_frequent = table.visits_of_first(hot)
        first, second = most_frequent / total, (table.visits_of_first(hot + cold) - most_frequent) / total
    first, second = min(first, 1.0), min(second, 1.0)  # rounding may give sums above 1
    return (first, second, max(0.0, 1 - first - second))


def _why(hot: int, cold: int, rest: int, traffic: tuple[float, float, float]) -> str:
    if not cold and not rest:
        return "every id has a row of its own"
    parts = [f"{hot:,} ids with {traffic[0]:.1%} of the traffic have rows of their own"]
    parts += [f"{cold:,} with {traffic[1]:.1%} share the pool"] if cold else []
    parts += [f"{rest:,} with {traffic[2]:.1%} share one row"] if rest else []
    return "; ".join(parts)

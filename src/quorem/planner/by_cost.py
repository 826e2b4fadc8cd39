"""Plans for tables whose ids are not all counted: of the possible schemes, those that lose least within the budget."""

from collections.abc import Sequence

import numpy as np

from .allocate import allocate, hulls
from .choices import PlannedTraffic, all_choices
from .footprint import StoredModules
from .modules import TableToPlan
from .planned import Candidate

ROUNDING_COST = 1e-3  # assumed cost of storing a table in a narrower dtype, as a share of its traffic


def plan_by_cost(stored: StoredModules, budget: int) -> Candidate:
    """Plan by the estimated cost of each choice.

    Args:
        stored: the tables.
        budget: bytes.
    """
    choices = all_choices(_traffic_of(stored.tables))
    bytes_ = choices.rows * stored.row[choices.table] + choices.tables * stored.table_state[choices.table]
    leasts, fitting = [], []
    for most in np.unique(choices.tables):  # the layout grows with the most stored tables that an id reads
        allowed = np.flatnonzero(choices.tables <= most)
        corners = allowed[hulls(choices.table[allowed], bytes_[allowed], choices.cost[allowed])]
        table, sizes = choices.table[corners], bytes_[corners]
        starts = np.flatnonzero(np.diff(table, prepend=-1))
        shared = sum(stored.shared(np.maximum.reduceat(choices.tables[corners], starts)))
        leasts.append(shared + int(sizes[starts].sum()))
        if leasts[-1] <= budget:
            fitting.append(corners[allocate(table, sizes, choices.cost[corners], budget - shared)])
    if not fitting:
        return Candidate(None, min(leasts))
    taken = min(fitting, key=lambda corners: float(choices.cost[corners].sum()))
    entries = []
    for t, i in enumerate(taken.tolist()):
        m = stored.module_of[t]
        is_narrowed = stored.narrowed[m].dtype != stored.modules[m].dtype
        cost = float(choices.cost[i]) + ROUNDING_COST * is_narrowed
        size = (int(choices.rows[i]), int(choices.tables[i]))
        entries.append(stored.planned_table(t, choices.scheme(i), *size, cost=cost, why=choices.why(i)))
    return Candidate(stored.plan(entries, budget, choices.tables[taken]), min(leasts))


def _traffic_of(tables: Sequence[TableToPlan]) -> PlannedTraffic:
    frequencies = [  # counts of all ids, or None: counts of raw ids are used only where every table is counted
        table.frequencies if table.frequencies is not None and len(table.frequencies) == table.num_embeddings else None
        for table in tables
    ]
    totals = [None if counts is None else float(counts.sum()) for counts in frequencies]
    known = [total for total in totals if total is not None]
    average = (sum(known) / len(known) if known else 1.0) or 1.0
    return PlannedTraffic(
        np.array([table.num_embeddings for table in tables]),
        frequencies,
        np.array([1.0 if total is None else total / average for total in totals]),
    )

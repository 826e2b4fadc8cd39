"""Plans for tables whose ids are not all counted: every table that shrinks has the same number of collisions.

A table of n ids with c collisions is ``QR(c)`` as long as that shrinks it, up to sqrt(n) collisions. Beyond, it has
three or four tables of equal size, with n / c rows or the fewest that tell its ids apart. A table that does not shrink
stays full. So does a small one, of at most ``FEW`` ids and a twentieth of the largest table, unless the others at their
smallest leave no room for it. The number of collisions is found by bisection.
"""

import math
from typing import NamedTuple

import numpy as np

from ..paper.schemes import QR, Full, GeneralizedQR, Scheme
from ..paper.sizes import balanced_sizes
from .by_count import Integers
from .footprint import StoredModules
from .planned import Candidate

FEW = 1000  # ids of a small table, which is not worth shrinking
TIMES_SMALLER = 20  # than the largest table


class EvenSizes(NamedTuple):
    """Rows and stored tables of each table for one number of collisions."""

    collisions: Integers  # of QR, where it has two stored tables
    rows: Integers
    tables: Integers

    def scheme(self, t: int, fewest: int) -> Scheme:
        """The scheme of table ``t``; ``fewest`` rows tell its ids apart."""
        if self.tables[t] == 1:
            return Full()
        if self.tables[t] == 2:
            return QR(int(self.collisions[t]))
        rows = int(self.rows[t])
        return GeneralizedQR(int(self.tables[t]), num_rows=None if rows == fewest else rows)


def plan_evenly(stored: StoredModules, budget: int) -> Candidate:
    """Plan with the fewest collisions that fit the budget.

    Args:
        stored: the tables.
        budget: bytes.
    """
    n = np.array([table.num_embeddings for table in stored.tables])
    roots = np.array([math.isqrt(number) for number in n.tolist()])
    fewest = {k: np.array([sum(balanced_sizes(number, k)) for number in n.tolist()]) for k in (3, 4)}

    most = int(n.max())
    few = min(FEW, most // TIMES_SMALLER)

    def sizes_at(step: int) -> EvenSizes:
        """Up to step ``most`` only large tables shrink; then small ones do."""
        collisions = np.where(n > few, min(step, most), max(step - most, 1))
        of_qr = np.maximum(np.minimum(collisions, roots), 1)
        large = -(-n // of_qr)
        rows, tables = large + -(-n // large), np.full_like(n, 2)
        for k, least in fewest.items():
            equal = np.maximum(-(-n // collisions), least)
            is_smaller = (collisions > roots) & (equal < rows)
            rows, tables = np.where(is_smaller, equal, rows), np.where(is_smaller, k, tables)
        is_full = (rows >= n) | (collisions == 1)
        return EvenSizes(of_qr, np.where(is_full, n, rows), np.where(is_full, 1, tables))

    def bytes_of(sizes: EvenSizes) -> int:
        own = sizes.rows * stored.row + sizes.tables * stored.table_state
        return int(own.sum()) + sum(stored.shared(sizes.tables))

    low, high = 1, most + few + 1
    full, smallest = sizes_at(low), sizes_at(high)
    least = min(bytes_of(full), bytes_of(smallest))
    if budget < least:
        return Candidate(None, least)
    best = smallest
    if bytes_of(full) <= budget:
        best, high = full, low
    while high - low > 1:
        middle = (low + high) // 2
        sizes = sizes_at(middle)
        if bytes_of(sizes) <= budget:
            high, best = middle, sizes
        else:
            low = middle
    entries = []
    for t, number in enumerate(n.tolist()):
        rows, tables = int(best.rows[t]), int(best.tables[t])
        scheme = best.scheme(t, int(fewest[tables][t]) if tables in fewest else 0)
        large = scheme.spec(number, 1).partitions[0].size
        why = "fits as it is" if tables == 1 else f"about {number / large:,.0f} ids share a row of each large table"
        entries.append(stored.planned_table(t, scheme, rows, tables, cost=1 - large / number, why=why))
    return Candidate(stored.plan(entries, budget, best.tables), least)

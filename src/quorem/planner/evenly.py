"""Plans for tables whose ids are not all counted: every table that shrinks has the same number of collisions.

A table of n ids with c collisions is ``QR(c)`` as long as that shrinks it, up to sqrt(n) collisions. Beyond, it has
three or four tables of equal size, with n / c rows or the fewest that tell its ids apart. A table that does not shrink
stays full. So does a small one, of at most ``FEW`` ids and a twentieth of the largest table, unless the others at their
smallest leave no room for it. The number of collisions is found by bisection.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from ..paper.schemes import QR, Full, GeneralizedQR, Scheme
from ..paper.sizes import balanced_sizes, ceil_div
from .footprint import StoredModules
from .planned import Candidate, Plan

FEW = 1000  # ids of a small table, which is not worth shrinking
TIMES_SMALLER = 20  # than the largest table


class Choice(NamedTuple):
    """A scheme for a table, its rows, and the number of tables that they are stored in."""

    scheme: Scheme
    rows: int
    tables: int


def fewest_rows(n: int, collisions: int) -> Choice:
    """The scheme with the fewest rows for ``n`` ids and so many collisions.

    >>> [fewest_rows(n, collisions).scheme for n, collisions in ((3, 4), (10_000, 4), (10_000, 400))]
    [Full(), QR(num_collisions=4), GeneralizedQR(num_partitions=4)]
    """
    root = math.isqrt(n)
    of_qr = min(collisions, root)
    large = ceil_div(n, of_qr)
    choices = [Choice(Full(), n, 1), Choice(QR(of_qr), large + ceil_div(n, large), 2)]
    for k in (3, 4) if collisions > root else ():
        fewest = sum(balanced_sizes(n, k))
        rows = max(fewest, ceil_div(n, collisions))
        choices.append(Choice(GeneralizedQR(k, num_rows=None if rows == fewest else rows), rows, k))
    return min(choices, key=lambda choice: choice.rows)


def plan_evenly(stored: StoredModules, budget: int) -> Candidate:
    """Plan with the fewest collisions that fit the budget."""
    sizes = [table.num_embeddings for table in stored.tables]
    most = max(sizes)
    few = min(FEW, most // TIMES_SMALLER)
    last = most + few + 1

    def choices_at(step: int) -> list[Choice]:
        """Steps up to ``most`` shrink only large tables; later steps shrink the small ones."""
        return [fewest_rows(n, min(step, most) if n > few else max(step - most, 1)) for n in sizes]

    def bytes_at(step: int) -> int:
        rows, tables = np.array([(choice.rows, choice.tables) for choice in choices_at(step)]).T
        return int((rows * stored.row + tables * stored.table_state).sum()) + sum(stored.shared(tables))

    whole = bytes_at(1)
    least = min(whole, bytes_at(last))
    if budget < least:
        return Candidate(None, least)
    falling = range(last - 1, 1, -1)
    step = 1 if whole <= budget else last - bisect_left(falling, True, key=lambda step: bytes_at(step) > budget)
    choices, entries = choices_at(step), []
    for t, (n, (scheme, rows, tables)) in enumerate(zip(sizes, choices, strict=True)):
        large = scheme.spec(n, 1).partitions[0].size
        why = "fits as it is" if tables == 1 else f"about {n / large:,.0f} ids share a row of each large table"
        entries.append(stored.planned_table(t, scheme, rows, tables, cost=1 - large / n, why=why))
    layouts, state = stored.shared(np.array([choice.tables for choice in choices]))
    options = {**stored.options, "shared_bytes": layouts, "shared_state_bytes": state}
    return Candidate(Plan(tables=tuple(entries), budget=budget, **options), least)

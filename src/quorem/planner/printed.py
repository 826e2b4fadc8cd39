"""A plan as a table for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..checks import dtype_name
from ..paper.schemes import Full, HotCold
from .budget import show_bytes

if TYPE_CHECKING:
    from .planned import Plan, PlannedTable

SHARED = "integers that find rows, scales that narrow rows share, and optimizer state that is not by row"


def plan_text(plan: "Plan") -> str:
    """What each table gets and why; where ids are counted, also its hot, cold and rest ids, and the pools."""
    counted = any(table.traffic for table in plan.tables)
    about = ["hot", "cold", "rest", "hot %", "cold %", "rest %"] if counted else ["D"]
    rows = [["table", "ids", *about, "before", "after", "state", "" if counted else "scheme"]]
    for table in plan.tables:
        dtype = "" if table.dtype == torch.float32 else dtype_name(table.dtype)
        about = _hot_cold_rest(table) if counted else [str(table.embedding_dim)]
        if counted:
            how = [*["full"] * isinstance(table.scheme, Full), *["lists its hot and cold ids"] * table.ranked]
            how += [f"rows of {table.scheme.width} numbers"] if table.scheme.width else []
        else:
            how = [repr(table.scheme), table.why]
        sizes = [show_bytes(size) for size in (table.bytes_before, table.bytes, table.state_bytes)]
        rows.append([table.name, f"{table.num_embeddings:,}", *about, *sizes, ", ".join(filter(None, [*how, dtype]))])
    for pool in plan.pools:
        use = f"{pool.num_rows:,} rows, of which each of these ids sums two; {len(pool.tables)} tables share them"
        about = ["", f"{pool.num_ids:,}", "", "", _percent(pool.traffic), ""]
        rows.append([f"({pool.name})", "", *about, "", show_bytes(pool.bytes), show_bytes(pool.state_bytes), use])
    blank = [""] * len(about)
    shared = [show_bytes(plan.shared_bytes), show_bytes(plan.shared_state_bytes)]
    rows.append(["(shared)", "", *blank, "", *shared, SHARED])
    total = [sum(t.bytes_before for t in plan.tables), plan.bytes - plan.state_bytes, plan.state_bytes]
    whole = f"{show_bytes(plan.bytes)} of {show_bytes(plan.budget)}"
    whole += "" if plan.state_dtype == "float32" else f", with the state in {plan.state_dtype}"
    whole += f", once rows are stored in {plan.bits} bits" if plan.bits else ""
    about = ["", "", "", *map(_percent, plan.traffic)] if counted else blank
    ids = sum(table.num_embeddings for table in plan.tables)
    rows.append(["total", f"{ids:,}", *about, *map(show_bytes, total), whole])
    return aligned(rows)


def _hot_cold_rest(table: "PlannedTable") -> list[str]:
    scheme, n = table.scheme, table.num_embeddings
    hot, rest = (scheme.num_hot, scheme.num_rest) if isinstance(scheme, HotCold) else (n, 0)
    return [*(f"{number:,}" for number in (hot, n - hot - rest, rest)), *map(_percent, table.traffic or (0, 0, 0))]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines with aligned columns; columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    is_number = [j > 0 and any(cell[:1].isdigit() for cell in column) for j, column in enumerate(columns[:-1])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, [*is_number, False], strict=True)
        lines.append("  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells))
    return "\n".join(line.rstrip() for line in lines)

"""A plan as a table for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..checks import dtype_name
from ..paper.schemes import Full, HotCold
from .budget import show_bytes

if TYPE_CHECKING:
    from .planned import Plan

SHARED = "integers that find rows, and optimizer state that is not by row"


def plan_text(plan: "Plan") -> str:
    """What each table gets and why; where ids are counted, also its hot, cold and rest ids, and the pools."""
    rows = _by_count(plan) if any(table.traffic for table in plan.tables) else _by_scheme(plan)
    return aligned(rows)


def _by_scheme(plan: "Plan") -> list[list[str]]:
    rows = [["table", "ids", "D", "before", "after", "state", "scheme", "why"]]
    for table in plan.tables:
        sizes = [show_bytes(size) for size in (table.bytes_before, table.bytes, table.state_bytes)]
        dtype = "" if table.dtype == torch.float32 else f", {dtype_name(table.dtype)}"
        ids, width = f"{table.num_embeddings:,}", str(table.embedding_dim)
        rows.append([table.name, ids, width, *sizes, repr(table.scheme) + dtype, table.why])
    if plan.shared_bytes or plan.shared_state_bytes:
        shared = [show_bytes(plan.shared_bytes), show_bytes(plan.shared_state_bytes)]
        rows.append(["(shared)", "", "", "", *shared, "", SHARED])
    rows.append(["total", "", "", *_total(plan), "", _whole(plan)])
    return rows


def _by_count(plan: "Plan") -> list[list[str]]:
    rows = [["table", "ids", "hot", "cold", "rest", "hot %", "cold %", "rest %", "before", "after", "state", ""]]
    for table in plan.tables:
        scheme, n = table.scheme, table.num_embeddings
        hot, rest = (scheme.num_hot, scheme.num_rest) if isinstance(scheme, HotCold) else (n, 0)
        ids = [f"{number:,}" for number in (n, hot, n - hot - rest, rest)]
        sizes = [show_bytes(size) for size in (table.bytes_before, table.bytes, table.state_bytes)]
        about = ["full"] * isinstance(scheme, Full) + ["lists its hot and cold ids"] * table.ranked
        about += [f"rows of {scheme.width} numbers"] if scheme.width else []
        about += [] if table.dtype == torch.float32 else [dtype_name(table.dtype)]
        rows.append([table.name, *ids, *map(_percent, table.traffic or (0, 0, 0)), *sizes, ", ".join(about)])
    for pool in plan.pools:
        use = f"{pool.num_rows:,} rows, of which each of these ids sums two; {len(pool.tables)} tables share them"
        number, share = f"{pool.num_ids:,}", _percent(pool.traffic)
        sizes = [show_bytes(pool.bytes), show_bytes(pool.state_bytes)]
        rows.append([f"({pool.name})", "", "", number, "", "", share, "", "", *sizes, use])
    shared = [show_bytes(plan.shared_bytes), show_bytes(plan.shared_state_bytes)]
    rows.append(["(shared)", *[""] * 8, *shared, SHARED])
    shares = [_percent(share) for share in plan.traffic]
    whole = f"{sum(table.num_embeddings for table in plan.tables):,}"
    rows.append(["total", whole, "", "", "", *shares, *_total(plan), _whole(plan)])
    return rows


def _total(plan: "Plan") -> list[str]:
    before = sum(table.bytes_before for table in plan.tables)
    return [show_bytes(size) for size in (before, plan.bytes - plan.state_bytes, plan.state_bytes)]


def _whole(plan: "Plan") -> str:
    whole = f"{show_bytes(plan.bytes)} of {show_bytes(plan.budget)}"
    whole += "" if plan.state_dtype == "float32" else f", with the state in {plan.state_dtype}"
    return f"{whole}, once rows are stored in {plan.bits} bits" if plan.bits else whole


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

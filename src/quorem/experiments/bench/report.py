"""The rows of a benchmark as a CSV file with self-contained rows, and as tables in Markdown."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..figures import grouped


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, with everything that is needed to interpret it."""

    mode: str
    provider: str
    scheme: str
    ids: str
    batch: int
    dim: int
    graph: int  # 1 if it ran in a CUDA graph
    optimizer: str  # what updates the tables, in words; "" for a lookup
    setting: str  # for FBGEMM, "default" (exact Adagrad, ids checked) or "fastest" (row-wise Adagrad, ids not checked)
    median_us: float
    q20_us: float
    q80_us: float
    samples: int
    bytes: int  # the fewest that the op must move (``measure.bytes_to_move``)
    gbps: float  # these bytes over the median time, in 10^9 bytes per second
    floor_us: float  # the time of a copy of these bytes, at the copy bandwidth measured in the same run
    ratio_to_floor: float
    stored_bytes: int  # of the tables
    copy_gbps: float
    device: str
    torch: str
    triton: str
    numba: str
    fbgemm: str
    quorem: str
    commit: str
    date: str
    command: str


CSV_COLUMNS = tuple(f.name for f in fields(Row))


def append(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file, and make sure that they are on disk; a new file gets a header."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(vars(row) for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != CSV_COLUMNS:
            raise ValueError(f"columns of {path.name} ({reader.fieldnames}) must be {list(CSV_COLUMNS)}")
        kinds: dict[str, Any] = {f.name: f.type for f in fields(Row)}
        return [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in reader]


VALUES = {"time": "median us (times fused)", "floor": "GB/s of the bytes that must move (times the floor)"}


def tables(rows: Sequence[Row], value: str = "time") -> str:
    """Markdown text: what was measured on what, and a table for each mode, width and distribution of ids.

    The columns of the tables are batch sizes; the cells show ``value``, one of ``VALUES``.
    """
    if not rows:
        return "Nothing was measured.\n"
    first = rows[0]
    made = {"torch": first.torch, "Triton": first.triton, "Numba": first.numba, "FBGEMM": first.fbgemm}
    versions = ", ".join(f"{name} {version}" for name, version in made.items() if version)
    runs = " and ".join(dict.fromkeys(f"commit {row.commit}, {row.date[:10]}" for row in rows))
    text = [f"{first.device}; {versions}.", f"Measured at {runs}."]
    text.append(f"Copy bandwidth {_short(first.copy_gbps)} GB/s. Cells: {VALUES[value]}.")
    for mode, dim, ids in dict.fromkeys((row.mode, row.dim, row.ids) for row in rows):
        measured = [row for row in rows if (row.mode, row.dim, row.ids) == (mode, dim, ids)]
        batches = sorted({row.batch for row in measured})
        table = [[f"{mode}, D = {dim}, {ids} ids", "tables", *(f"B = {b}" for b in batches)]]
        for (name, scheme), line in grouped(measured, lambda row: (_name(row), row.scheme)).items():
            cells = {row.batch: _cell(row, measured, value) for row in line}
            table.append([name, f"`{scheme}`", *(cells.get(b, "") for b in batches)])
        head, *body = (f"| {' | '.join(line)} |" for line in table)
        text += ["", head, "|" + "---|" * len(table[0]), *body]
    return "\n".join(text) + "\n"


def _name(row: Row) -> str:
    """The provider, its setting unless the name contains it, whether it ran in a CUDA graph, and the optimizer."""
    setting = "" if row.provider.endswith(row.setting) else f"{row.setting} setting"
    return ", ".join(filter(None, (f"`{row.provider}`", setting, "CUDA graph" * row.graph, row.optimizer)))


def _cell(row: Row, rows: Sequence[Row], value: str) -> str:
    """The text of a row. A time is compared with fused kernels of the same scheme, or of the first for full tables."""
    if value == "floor":
        return f"{_short(row.gbps)} ({_short(row.ratio_to_floor)}x)"
    fused = [r for r in rows if r.provider == "fused" and (r.batch, r.graph) == (row.batch, row.graph)]
    is_full = row.provider != "fused" and row.scheme == "Full()"
    fused = [r for r in fused if is_full or r.scheme == row.scheme]
    ratio = f" ({_short(row.median_us / fused[0].median_us)}x)" if fused and fused[0] is not row else ""
    return f"{_short(row.median_us)}{ratio}"


def _short(x: float) -> str:
    """A number with three digits, or all digits before the decimal point if there are more."""
    if x == 0 or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.2f}" if abs(x) < 10 else f"{x:.1f}"

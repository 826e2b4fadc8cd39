"""Rows of a benchmark: a CSV file whose rows stand alone, tables in Markdown, and a plot."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from .grid import FULL


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, with all that is needed to read it; "" where a number is not defined.

    Args:
        optimizer: what updates the tables, in words; "" for a lookup.
        graph: 1 if in a CUDA graph.
        bytes: what the op must move at least, see ``measure.bytes_to_move``.
        gbps: those bytes over the median time, in 10^9 bytes a second.
        floor_us: the time of a copy of those bytes, at the copy bandwidth measured in the same run.
        peak_extra_bytes: most GPU memory during a step beyond tables, optimizer state, ids and upstream gradient.
        stored_bytes: of the tables.
    """

    mode: str
    provider: str
    scheme: str
    ids: str
    batch: int
    dim: int
    graph: int
    optimizer: str
    median_us: float
    q20_us: float
    q80_us: float
    samples: int
    bytes: int | str
    gbps: float | str
    floor_us: float | str
    ratio_to_floor: float | str
    peak_extra_bytes: int | str
    stored_bytes: int
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


COLUMNS = tuple(f.name for f in fields(Row))


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, which is on disk when this returns; a new file gets a header."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(vars(row) for row in rows)


def read(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: if its columns are not those of a benchmark.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"columns of {path.name} ({reader.fieldnames}) must be {list(COLUMNS)}")
        return [Row(**cast(Any, {name: _parse(name, value) for name, value in line.items()})) for line in reader]


def _parse(name: str, value: str) -> int | float | str:
    if name in ("batch", "dim", "graph", "samples", "stored_bytes"):
        return int(value)
    if name in ("bytes", "peak_extra_bytes"):
        return int(value) if value else ""
    numbers = ("median_us", "q20_us", "q80_us", "gbps", "floor_us", "ratio_to_floor", "copy_gbps")
    return float(value) if name in numbers and value else value


def _time(row: Row, fused: Row | None) -> str:
    """Median, and how many times slower than fused it is."""
    ratio = "" if fused is None or fused is row else f" ({_short(row.median_us / fused.median_us)}x)"
    return f"{_short(row.median_us)}{ratio}"


def _floor(row: Row, fused: Row | None) -> str:
    if isinstance(row.ratio_to_floor, str) or isinstance(row.gbps, str):
        return "-"
    return f"{_short(row.gbps)} ({_short(row.ratio_to_floor)}x)"


def _memory(row: Row, fused: Row | None) -> str:
    if isinstance(row.peak_extra_bytes, str):
        return "-"
    return f"{_short(row.peak_extra_bytes / 1e6)} ({_short(100 * row.peak_extra_bytes / row.stored_bytes)}%)"


VALUES: dict[str, tuple[str, Callable[[Row, Row | None], str]]] = {
    "time": ("median us (times fused)", _time),
    "floor": ("GB/s of the bytes that must move (times the floor)", _floor),
    "memory": ("extra MB of a step (share of the tables)", _memory),
}


def tables(rows: Sequence[Row], value: str = "time") -> str:
    """Markdown: what was measured, on what, and a table for each mode, width and kind of ids, with a column a batch."""
    if not rows:
        return "Nothing was measured.\n"
    words, cell = VALUES[value]
    first = rows[0]
    made = {"torch": first.torch, "Triton": first.triton, "Numba": first.numba, "FBGEMM": first.fbgemm}
    versions = ", ".join(f"{name} {version}" for name, version in made.items() if version)
    text = [
        f"{first.device}; {versions}; commit {first.commit}, {first.date[:10]}."
        f" Copy bandwidth {_short(first.copy_gbps)} GB/s. Cells: {words}."
    ]
    for mode, dim, ids in dict.fromkeys((row.mode, row.dim, row.ids) for row in rows):
        own = [row for row in rows if (row.mode, row.dim, row.ids) == (mode, dim, ids)]
        batches = sorted({row.batch for row in own})
        head = [f"{mode}, D = {dim}, {ids} ids", "tables", *(f"B = {b}" for b in batches)]
        text += ["", _line(head), _line(["---"] * len(head))]
        lines = dict.fromkeys((row.provider, row.scheme, row.graph, row.optimizer) for row in own)
        for provider, scheme, graph, optimizer in lines:
            key = (provider, scheme, graph, optimizer)
            found = {r.batch: r for r in own if (r.provider, r.scheme, r.graph, r.optimizer) == key}
            more = [part for part in ("CUDA graph" if graph else "", optimizer) if part]
            name = f"`{provider}`" + (f", {', '.join(more)}" if more else "")
            shown = [cell(found[b], _fused(own, found[b])) if b in found else "" for b in batches]
            text.append(_line([name, f"`{scheme}`", *shown]))
    return "\n".join(text) + "\n"


def _fused(rows: Sequence[Row], row: Row) -> Row | None:
    """What to compare ``row`` with: fused on the same tables, or on the first scheme for providers of full tables."""
    same = [r for r in rows if r.provider == "fused" and (r.batch, r.graph) == (row.batch, row.graph)]
    return next((r for r in same if row.provider in FULL or r.scheme == row.scheme), None)


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(cell if cell == "---" else f" {cell} " for cell in cells) + "|"


def _short(x: float) -> str:
    """Three digits, or all before the point."""
    if x == 0 or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.2f}" if abs(x) < 10 else f"{x:.1f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw time against batch size, a panel for each mode and width, a line for each provider."""
    import matplotlib.pyplot as plt

    ids = "zipf" if any(row.ids == "zipf" for row in rows) else rows[0].ids
    first = next((row.scheme for row in rows if row.provider not in FULL), "Full()")
    rows = [row for row in rows if row.ids == ids and row.scheme in (first, "Full()")]
    panels = list(dict.fromkeys((row.mode, row.dim) for row in rows))
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.6 * across, 3.6 * down), squeeze=False, layout="constrained")
    providers = list(dict.fromkeys(row.provider for row in rows))
    colours = {p: plt.get_cmap("tab10")(i) for i, p in enumerate(sorted(providers))}
    for axis, (mode, dim) in zip(axes.flat, panels, strict=False):
        for provider, graph in dict.fromkeys((row.provider, row.graph) for row in rows):
            line = [r for r in rows if (r.mode, r.dim, r.provider, r.graph) == (mode, dim, provider, graph)]
            line.sort(key=lambda row: row.batch)
            label = provider + (" (graph)" if graph else "")
            x, y = [row.batch for row in line], [row.median_us for row in line]
            below = [row.median_us - row.q20_us for row in line], [row.q80_us - row.median_us for row in line]
            style = "-" if graph or not any(row.graph for row in rows) else "--"
            if line:
                axis.errorbar(x, y, below, fmt=f"o{style}", ms=3, lw=1.2, color=colours[provider], label=label)
        axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel="us", title=f"{mode}, D = {dim}, {ids} ids")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"{first}, {rows[0].device}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)

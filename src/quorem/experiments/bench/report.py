"""The rows of a benchmark as a CSV file with self-contained rows, as tables in Markdown, and as a plot."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files.atomic import replacing
from .. import words
from ..figures import grouped
from .grid import FULL, MODES, PROVIDERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement, with everything that is needed to interpret it.

    Args:
        optimizer: what updates the tables, in words; "" for a lookup.
        setting: for FBGEMM, "default" (exact Adagrad, ids checked) or "fastest" (row-wise Adagrad, ids not checked).
        graph: 1 if it ran in a CUDA graph.
        bytes: the fewest bytes that the op must move, see ``measure.bytes_to_move``.
        gbps: these bytes over the median time, in 10^9 bytes per second.
        floor_us: the time of a copy of these bytes, at the copy bandwidth measured in the same run.
        stored_bytes: bytes of the tables.
    """

    mode: str
    provider: str
    scheme: str
    ids: str
    batch: int
    dim: int
    graph: int
    optimizer: str
    setting: str
    median_us: float
    q20_us: float
    q80_us: float
    samples: int
    bytes: int
    gbps: float
    floor_us: float
    ratio_to_floor: float
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
    """The rows of a file.

    Raises:
        ValueError: if its columns are not those of a benchmark.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != CSV_COLUMNS:
            raise ValueError(f"columns of {path.name} ({reader.fieldnames}) must be {list(CSV_COLUMNS)}")
        kinds: dict[str, Any] = {f.name: f.type for f in fields(Row)}
        return [Row(**{name: kinds[name](text) for name, text in line.items()}) for line in reader]


def _time(row: Row, fused: Row | None) -> str:
    """The median time, and its ratio to that of the fused kernels."""
    ratio = "" if fused is None or fused is row else f" ({_short(row.median_us / fused.median_us)}x)"
    return f"{_short(row.median_us)}{ratio}"


def _floor(row: Row, fused: Row | None) -> str:
    return f"{_short(row.gbps)} ({_short(row.ratio_to_floor)}x)"


VALUES: dict[str, tuple[str, Callable[[Row, Row | None], str]]] = {
    "time": ("median us (times fused)", _time),
    "floor": ("GB/s of the bytes that must move (times the floor)", _floor),
}


def tables(rows: Sequence[Row], value: str = "time") -> str:
    """Markdown text: what was measured on what, and a table for each mode, width and distribution of ids.

    The columns of the tables are batch sizes; the cells show ``value``, one of ``VALUES``.
    """
    if not rows:
        return "Nothing was measured.\n"
    what, cell = VALUES[value]
    first = rows[0]
    made = {"torch": first.torch, "Triton": first.triton, "Numba": first.numba, "FBGEMM": first.fbgemm}
    versions = ", ".join(f"{name} {version}" for name, version in made.items() if version)
    runs = " and ".join(dict.fromkeys(f"commit {row.commit}, {row.date[:10]}" for row in rows))
    text = [
        f"{first.device}; {versions}.",
        f"Measured at {runs}.",
        f"Copy bandwidth {_short(first.copy_gbps)} GB/s. Cells: {what}.",
    ]
    for mode, dim, ids in dict.fromkeys((row.mode, row.dim, row.ids) for row in rows):
        measured = [row for row in rows if (row.mode, row.dim, row.ids) == (mode, dim, ids)]
        batches = sorted({row.batch for row in measured})
        table = [[f"{mode}, D = {dim}, {ids} ids", "tables", *(f"B = {b}" for b in batches)]]
        lines: dict[tuple[str, str], dict[int, Row]] = {}
        for row in measured:
            lines.setdefault((_name(row), row.scheme), {})[row.batch] = row
        for (name, scheme), line in lines.items():
            shown = [cell(line[b], _fused(measured, line[b])) if b in line else "" for b in batches]
            table.append([name, f"`{scheme}`", *shown])
        text += ["", *words.table(table)]
    return "\n".join(text) + "\n"


def _name(row: Row) -> str:
    """The provider, its setting unless the name contains it, whether it ran in a CUDA graph, and the optimizer."""
    setting = "" if row.provider.endswith(row.setting) else f"{row.setting} setting"
    return ", ".join(filter(None, (f"`{row.provider}`", setting, "CUDA graph" * row.graph, row.optimizer)))


def _fused(rows: Sequence[Row], row: Row) -> Row | None:
    """The fused row to compare ``row`` with: of the same scheme, or of the first scheme if ``row`` has full tables."""
    same = [r for r in rows if r.provider == "fused" and (r.batch, r.graph) == (row.batch, row.graph)]
    return next((r for r in same if row.provider in FULL or r.scheme == row.scheme), None)


def _short(x: float) -> str:
    """A number with three digits, or all digits before the decimal point if there are more."""
    if x == 0 or abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.2f}" if abs(x) < 10 else f"{x:.1f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the plot of ``figure`` to a file."""
    with replacing(path) as file:
        figure(rows).savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=120)


def figure(rows: Sequence[Row]) -> "Figure":
    """Time against batch size: a panel each for lookups and steps, a colour for each provider, one legend below all.

    If there are several widths, distributions of ids or schemes, the panels show the first width, Zipf ids, and the
    first scheme beside the full tables. The tables have the rest.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    ids = "zipf" if any(row.ids == "zipf" for row in rows) else rows[0].ids
    scheme = next((row.scheme for row in rows if row.provider not in FULL), "Full()")
    rows = [row for row in rows if row.ids == ids and (row.scheme == scheme or row.provider in FULL)]
    rows = [row for row in rows if row.dim == rows[0].dim and row.provider in PROVIDERS]
    modes = [mode for mode in MODES if any(row.mode == mode for row in rows)]
    drawn = Figure(figsize=(4.4 * len(modes), 4.2), layout="constrained")
    colours = {provider: colormaps["tab10"](i) for i, provider in enumerate(PROVIDERS)}
    captured = any(row.graph for row in rows)
    styles = {1: "-", 0: "--" if captured else "-"}
    for axis, mode in zip(drawn.subplots(1, len(modes), squeeze=False).flat, modes, strict=True):
        measured = [row for row in rows if row.mode == mode]
        for (provider, graph), line in grouped(measured, lambda row: (row.provider, row.graph)).items():
            line.sort(key=lambda row: row.batch)
            x, y = [row.batch for row in line], [row.median_us for row in line]
            errors = [row.median_us - row.q20_us for row in line], [row.q80_us - row.median_us for row in line]
            width, size, above = (2.4, 5, 4) if provider == "fused" else (1.2, 3, 3)
            look = {"ls": styles[graph], "color": colours[provider], "lw": width, "elinewidth": 1, "zorder": above}
            axis.errorbar(x, y, errors, marker="o", ms=size, label=provider, **look)
        _plain_ticks(axis, sorted({row.batch for row in measured}))
        axis.set_title(f"{mode}, D = {rows[0].dim}", fontsize=10)
        axis.set_xlabel("batch size", fontsize=8)
        axis.set_ylabel("us", fontsize=8)
        axis.grid(alpha=0.3)
    labels = [provider for provider in PROVIDERS if any(row.provider == provider for row in rows)]
    handles = [Line2D([], [], color=colours[p], marker="o", ms=4, lw=2.4 if p == "fused" else 1.2) for p in labels]
    if captured:
        handles += [Line2D([], [], color="black", ls=styles[graph]) for graph in (0, 1)]
        labels += ["eager", "CUDA graph"]
    columns = min(len(labels), 5 if len(modes) > 1 else 3)
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)
    drawn.suptitle(f"{scheme}, {ids} ids, {rows[0].device}: median, 20% to 80%", fontsize=10)
    return drawn


def _plain_ticks(axis: Any, batches: Sequence[int]) -> None:
    """Logarithmic axes with plain numbers: the batch sizes themselves, and 1, 3, 10, 30, ... microseconds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axis.set(xscale="log", yscale="log")
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,.10g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=7)

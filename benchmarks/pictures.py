"""Draw the pictures of the documents from the files of results that they show.

    python benchmarks/pictures.py

writes ``docs/pictures/quality.svg`` from ``plan_quality.json``, and ``cpu.png`` and ``h200.png`` from the CSV files
beside them, in ``benchmarks/results``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from quorem.experiments.bench.grid import FULL, MODES, PROVIDERS
from quorem.experiments.bench.report import Row, read
from quorem.experiments.figures import grouped

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LINES = {  # setting: label, colour, marker
    "hash": ("hashing", "#b4532a", "s"),
    "QR": ("quotient-remainder, QR(c)", "#6b7280", "D"),
    "plan": ("plan by counts, training", "#3b5bdb", "o"),
    "plan, served": ("plan by counts, served in 4 bits", "#1c7c54", "^"),
}


def quality(network: str = "dlrm") -> Figure:
    """Log loss over that of full tables against bytes, with bars of one standard error."""
    result = json.loads((RESULTS / "plan_quality.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for setting, (label, colour, marker) in LINES.items():
        rows = [row for row in result["rows"] if row["network"] == network and row["setting"] == setting]
        rows.sort(key=lambda row: row["bytes"])
        axes.errorbar(
            [row["bytes"] for row in rows],
            [row["percent"] for row in rows],
            [row["percent_error"] for row in rows],
            label=label,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.5,
            capsize=2,
        )
    full = next(row for row in result["rows"] if row["network"] == network and row["setting"] == "full")
    axes.axhline(0, color="#9ca3af", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([1e4, 1e5, 1e6, 1e7], ["10 kB", "100 kB", "1 MB", "10 MB"])
    megabytes = full["bytes"] / 1e6
    axes.set_xlabel(f"bytes of the tables; in training with Adagrad's state (full tables: {megabytes:.0f} MB)")
    axes.set_ylabel("log loss over full tables, %")
    axes.grid(True, which="major", color="#e5e7eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def speed(rows: Sequence[Row]) -> Figure:
    """Time against batch size: a panel each for lookups and steps, a colour for each provider, one legend below all.

    If there are several widths, distributions of ids or schemes, the panels show the first width, Zipf ids, and the
    first scheme beside the full tables. The tables have the rest.
    """
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
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,.10g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=7)


def main() -> None:
    out = ROOT / "docs" / "pictures" / "quality.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "quorem", "font.family": "sans-serif"}):
        quality().savefig(out, format="svg", metadata={"Date": None}, facecolor="white")
    for name in ("cpu", "h200"):
        speed(read(RESULTS / f"{name}.csv")).savefig(RESULTS / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()

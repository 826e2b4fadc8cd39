"""Draw the picture of README.md from the file of results that it shows.

    python benchmarks/pictures.py

writes ``docs/pictures/quality.svg`` from ``benchmarks/results/plan_quality.json``.
"""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
LINES = {  # setting: label, colour, marker
    "hash": ("hashing", "#b4532a", "s"),
    "QR": ("quotient-remainder, QR(c)", "#6b7280", "D"),
    "plan": ("plan by counts, training", "#3b5bdb", "o"),
    "plan, int4": ("plan by counts, served in 4 bits", "#1c7c54", "^"),
}


def quality(network: str = "dlrm") -> Figure:
    """Log loss over that of full tables against bytes, with bars of one standard error."""
    result = json.loads((ROOT / "benchmarks" / "results" / "plan_quality.json").read_text(encoding="utf-8"))
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


def main() -> None:
    out = ROOT / "docs" / "pictures" / "quality.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "quorem", "font.family": "sans-serif"}):
        quality().savefig(out, format="svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()

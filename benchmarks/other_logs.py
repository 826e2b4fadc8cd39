"""Logs of other shapes than Criteo's as CSV files, to try plans on: few tables and many, flat counts, ids seen once.

    python benchmarks/other_logs.py logs
    quorem prepare table logs/two.csv data/two --label y --dense x --categorical a,b
    python benchmarks/plan_quality.py data/two --out benchmarks/results/other_logs/two.json --networks dlrm --seeds 6 \
        --sizes 2 4 16 60 250 --settings full plan narrow hash QR

A click depends on a number ``x`` and on an effect of each id, drawn from a normal distribution.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROWS = 30_000
LOGS = {
    "two": "two tables, counts that fall as 1 / rank",
    "giant": "a table of 100,000 ids beside three of five",
    "once": "a table whose ids all occur once beside one of 500",
    "many": "80 tables of 300 ids",
    "flat": "three tables of 4,000 ids, all as frequent",
    "rare": "three tables of 10,000 ids, each seen about three times",
}
Integers = NDArray[np.int64]


def falling(rng: np.random.Generator, n: int, power: float) -> Integers:
    """An id for each row; the id of rank r comes up in proportion to ``r ** -power``."""
    share = 1 / np.arange(1, n + 1) ** power
    return rng.permutation(n)[rng.choice(n, ROWS, p=share / share.sum())]


def columns_of(log: str, rng: np.random.Generator) -> tuple[dict[str, list[str]], NDArray[np.float64]]:
    """The columns of ids of a log, and the log-odds of a click that they give."""
    columns: dict[str, list[str]] = {}
    odds = np.zeros(ROWS)

    def add(name: str, ids: Integers, n: int, size: float) -> None:
        nonlocal odds
        effect = rng.normal(0, size, n)
        columns[name] = [f"{name}_{i}" for i in ids]
        odds = odds + effect[ids]

    if log == "two":
        add("a", falling(rng, 20_000, 1.1), 20_000, 1.0)
        add("b", falling(rng, 5_000, 1.0), 5_000, 1.0)
    elif log == "giant":
        add("g", falling(rng, 100_000, 0.9), 100_000, 1.5)
    elif log == "once":
        columns["u"] = [f"u{i}" for i in range(ROWS)]
        add("c", rng.integers(0, 500, ROWS), 500, 1.0)
    shapes = {"giant": (3, 5, 0.5), "flat": (3, 4_000, 1.0), "rare": (3, ROWS // 3, 1.5), "many": (80, 300, 0.2)}
    tables, n, size = shapes.get(log, (0, 0, 0.0))
    for k in range(tables):
        add(f"c{k}", falling(rng, n, 0.8) if log == "many" else rng.integers(0, n, ROWS), n, size)
    return columns, odds


def main() -> None:
    """Read the command line, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the CSV files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for log in LOGS:
        rng = np.random.default_rng(0)
        columns, odds = columns_of(log, rng)
        x = rng.normal(size=ROWS).round(3)
        clicks = (rng.random(ROWS) < 1 / (1 + np.exp(-odds - 0.5 * x))).astype(int)
        with open(arguments.out / f"{log}.csv", "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["y", *columns, "x"])
            lines.writerows(zip(clicks, *columns.values(), x, strict=True))


if __name__ == "__main__":
    main()

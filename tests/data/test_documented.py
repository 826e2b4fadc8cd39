"""The numbers of docs/data.md are those of the result files and the code."""

import json
from pathlib import Path

from quorem.data.shape import NUM_ROWS, day_split

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "docs" / "data.md").read_text(encoding="utf-8").split())


def test_time_and_memory_of_the_kaggle_file():
    results = json.loads((ROOT / "benchmarks" / "results" / "prepare.json").read_text(encoding="utf-8"))["results"]
    (job,) = (r for r in results if r["rows"] == NUM_ROWS and "quorem" in r["work"])
    assert f"takes {job['wall_s']:.0f} s on two cores and {job['peak_gb']:.0f} GB of memory" in TEXT


def test_split_of_the_kaggle_file():
    start, stop = day_split(NUM_ROWS)["train"]
    assert f"({stop - start:,})" in TEXT

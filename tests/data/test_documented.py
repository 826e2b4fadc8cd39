"""The numbers of docs/data.md and its appendix are those of the result files."""

import importlib.util
import json
import re
from pathlib import Path

from quorem.data.shape import NUM_ROWS, day_split

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("data.md", "appendix/data_speed.md"))
RESULTS = ROOT / "benchmarks" / "results"


def test_table_of_the_benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_prepare", ROOT / "benchmarks" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (table,) = re.findall(r"<!-- prepare -->\n(.*?)\n<!-- /prepare -->", TEXT, re.DOTALL)
    assert table == module.table(RESULTS / "prepare.json")


def test_speed_of_the_synthetic_log():
    data = json.loads((RESULTS / "synthetic_cpu.json").read_text(encoding="utf-8"))
    for name, speed in data["rows_per_second"].items():
        assert re.search(rf"\| `{name}` \| {speed:,} \| {60 * speed / 1e6:.1f} million \|", TEXT), name


def test_split_of_the_kaggle_file():
    for start, stop in day_split(NUM_ROWS).values():
        assert f"({stop - start:,})" in TEXT

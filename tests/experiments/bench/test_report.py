"""Rows of a benchmark as files and tables."""

from pathlib import Path

import pytest
from bench_rows import row

from quorem.experiments.bench import report

ROOT = Path(__file__).parents[3]


def test_a_file_of_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"columns of x\.csv \(\['a', 'b'\]\) must be"):
        report.read(tmp_path / "x.csv")


def test_rows_come_back_from_a_file(tmp_path):
    rows = [row(), row(provider="dense", scheme="Full()", dim=64)]
    report.append(tmp_path / "x.csv", rows[:1])
    report.append(tmp_path / "x.csv", rows[1:])
    assert report.read(tmp_path / "x.csv") == rows


def test_tables_compare_with_fused_on_the_same_tables():
    rows = [row(provider="dense", scheme="Full()", median_us=30.0), row(provider="loop", median_us=50.0), row()]
    rows += [row(provider="loop", scheme="ChineseRemainder(3)", median_us=70.0), row(batch=2048, median_us=1234.5)]
    lines = report.tables(rows).splitlines()[4:]
    assert lines == [
        "| step, D = 16, zipf ids | tables | B = 128 | B = 2048 |",
        "|---|---|---|---|",
        "| `dense` | `Full()` | 30.0 (3.00x) |  |",
        "| `loop` | `QR(4)` | 50.0 (5.00x) |  |",
        "| `fused` | `QR(4)` | 10.0 | 1,234 |",
        "| `loop` | `ChineseRemainder(3)` | 70.0 |  |",
    ]


def test_results_tell_where_they_come_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        for r in report.read(path):
            assert r.device and r.torch and r.quorem and r.date and r.commit not in ("", "unknown")
            assert r.command.startswith("quorem bench") and str(Path.home()) not in r.command

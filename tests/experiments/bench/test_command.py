"""``quorem bench``: what it writes, what it refuses, and how it ends; its rows as files and tables."""

from pathlib import Path

import pytest
import torch
from bench_rows import row
from commands import invoke

from quorem.cli.bench import Ids, Mode, Provider, Scheme
from quorem.experiments.bench import grid, report, run

ROOT = Path(__file__).parents[3]
TINY = ["bench", "--quick", "--device", "cpu", "--scheme", "qr", "--ids", "zipf", "--batch", "3"]
TINY += ["--dim", "4", "--provider", "loop", "--provider", "fused"]


def test_a_small_run_writes_rows_and_prints_tables(tmp_path):
    out = tmp_path / "new" / "cpu.csv"
    done = invoke(*TINY, "--mode", "forward", "--mode", "step", "--out", out)
    rows = report.read(out)
    assert [(r.mode, r.provider) for r in rows] == [(m, p) for m in ("forward", "step") for p in ("loop", "fused")]
    for r in rows:
        assert (r.scheme, r.ids, r.batch, r.dim, r.graph) == ("QR(4)", "zipf", 3, 4, 0)
        assert 0 < r.q20_us <= r.median_us <= r.q80_us
        assert r.gbps == pytest.approx(r.bytes / r.median_us / 1e3, abs=1e-3)
        assert r.ratio_to_floor == pytest.approx(r.median_us / r.floor_us, rel=2e-3, abs=1e-2)
        assert r.torch == torch.__version__ and r.device and r.commit and r.date and r.command
    assert {r.optimizer for r in rows if r.mode == "step"} == {"Adagrad", "torch Adagrad, sparse gradients"}
    assert report.tables(rows) in done.output


def test_a_provider_that_cannot_be_measured_is_said(tmp_path):
    options = ["--mode", "forward", "--scheme", "path", "--provider", "loop", "--provider", "fused"]
    done = invoke(*TINY[:4], "--ids", "zipf", "--batch", "3", "--dim", "4", *options)
    assert "skipped: loop in forward, Path(4, (64,)), D = 4: tables of QR and full ones are measured" in done.stderr
    assert "| `fused` | `Path(4, (64,))` |" in done.stdout


def test_a_file_that_cannot_be_written_is_one_line_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "rows", lambda *_, **__: pytest.fail("it was too late"))
    (tmp_path / "file").touch()
    done = invoke(*TINY, "--out", tmp_path / "file" / "new" / "x.csv", code=1)
    assert done.stderr.startswith("quorem: ") and str(tmp_path / "file" / "new") in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def measured(*_, **__):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "rows", measured)
    invoke(*TINY, "--out", tmp_path / "cpu.csv", code=130)
    assert [r.provider for r in report.read(tmp_path / "cpu.csv")] == ["fused"]


def test_the_command_offers_what_can_be_measured():
    assert (*Mode,) == grid.MODES and (*Provider,) == grid.PROVIDERS and (*Ids,) == grid.IDS
    assert (*Scheme,) == (*grid.SCHEME_OPTIONS,)


def test_options_select_the_rows_of_a_file(tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(provider="loop"), row(batch=2048)])
    table = ["bench", "--table", str(tmp_path / "x.csv")]
    done = invoke(*table, "--provider", "fused", "--batch", "128")
    assert "`fused`" in done.output and "`loop`" not in done.output and "2048" not in done.output
    assert invoke(*table, "--batch", "7").output == "Nothing was measured.\n"


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

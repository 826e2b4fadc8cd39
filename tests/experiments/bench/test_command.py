"""``quorem bench``: what it writes, what it refuses, and how it ends."""

import pytest
import torch
from bench_rows import row
from typer.testing import CliRunner

from quorem.cli import app
from quorem.experiments.bench import command, report

TINY = ["bench", "--quick", "--device", "cpu", "--scheme", "qr", "--ids", "zipf", "--batch", "3"]
TINY += ["--dim", "4", "--provider", "loop", "--provider", "fused"]


def test_a_small_run_writes_rows_a_plot_and_tables(tmp_path):
    done = CliRunner().invoke(app, [*TINY, "--mode", "forward", "--mode", "step", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = report.read(tmp_path / "cpu.csv")
    assert [(r.mode, r.provider) for r in rows] == [(m, p) for m in ("forward", "step") for p in ("loop", "fused")]
    for r in rows:
        assert (r.scheme, r.ids, r.batch, r.dim, r.graph) == ("QR(4)", "zipf", 3, 4, 0)
        assert 0 < r.q20_us <= r.median_us <= r.q80_us
        assert r.gbps == pytest.approx(r.bytes / r.median_us / 1e3, abs=1e-3)
        assert r.ratio_to_floor == pytest.approx(r.median_us / r.floor_us, rel=2e-3, abs=1e-2)
        assert r.torch == torch.__version__ and r.device and r.commit and r.date and r.command
    assert {r.optimizer for r in rows if r.mode == "step"} == {"Adagrad", "torch Adagrad, sparse gradients"}
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    assert report.tables(rows) in done.output


def test_the_dlrm_and_amsgrad_modes_run(tmp_path):
    options = ["--mode", "dlrm", "--mode", "step_amsgrad", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*TINY, *options])
    assert done.exit_code == 0, done.output
    rows = report.read(tmp_path / "cpu.csv")
    assert [(r.mode, r.provider) for r in rows] == [("dlrm", "loop"), ("dlrm", "fused"), ("step_amsgrad", "fused")]
    assert [r.bytes == "" for r in rows] == [True, True, False]
    assert "skipped: loop in step_amsgrad, QR(4), D = 4: torch.optim has no sparse AMSGrad" in done.stderr


@pytest.mark.parametrize("option", ["out", "plot"])
def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_measured(option, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measured", lambda *_, **__: pytest.fail("it was too late"))
    (tmp_path / "file").touch()
    value = tmp_path / "file" / "x.png" if option == "plot" else tmp_path / "file"
    done = CliRunner().invoke(app, [*TINY, f"--{option}", str(value)])
    folder = tmp_path / "file"
    assert (done.exit_code, done.stderr) == (
        1,
        f"quorem: {option} ({folder}) must be a folder, and {folder} is a file\n",
    )
    monkeypatch.setattr(command.os, "access", lambda *_: False)  # as on a disk that is mounted read-only
    value = tmp_path / "new" / "x.png" if option == "plot" else tmp_path / "new"
    done = CliRunner().invoke(app, [*TINY, f"--{option}", str(value)])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"{option} ({tmp_path / 'new'}) must be a folder that can be written, and {tmp_path} cannot" in done.stderr


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def measured(*_, **__):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measured", measured)
    done = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert [r.provider for r in report.read(tmp_path / "cpu.csv")] == ["fused"]
    assert (tmp_path / "cpu.png").exists()


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--provider", "magic", "provider ('magic') must be of dense"),
        ("--mode", "sideways", "mode ('sideways') must be of forward"),
        ("--ids", "normal", "ids ('normal') must be of zipf"),
        ("--scheme", "x", "scheme ('x') must be the start of one of QR(4)"),
        ("--preset", "tpu", "preset ('tpu') must be one of full"),
    ],
)
def test_unknown_values_are_a_usage_error(option, value, match):
    done = CliRunner().invoke(app, ["bench", option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert match in done.output


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--mode", "sideways", "mode ('sideways') must be one that was measured: step"),
        ("--batch", "7", "batch (7) must be one that was measured: 128, 2048"),
    ],
)
def test_values_that_a_file_lacks_are_a_usage_error(option, value, match, tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(batch=2048)])
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert match in done.output


def test_a_provider_that_was_not_measured_is_named(tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(provider="loop")])
    options = ["--provider", "fbgemm_fastest", "--provider", "fused"]
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), *options])
    assert done.exit_code == 0, done.output
    assert "Not measured: `fbgemm_fastest`." in done.output
    assert "`fused`" in done.output and "`loop`" not in done.output
    unknown = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), "--provider", "magic"])
    assert unknown.exit_code == 2


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path):
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv")], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "does not exist" in done.output


def test_a_table_is_drawn_from_its_file(tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(batch=2048)])
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), "--plot", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

"""What a sweep shows while it trains: how many runs are done, running, failed and left."""

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console
from runs_of_training import small_log, small_run

from quorem.cli import progress
from quorem.experiments import sweep
from quorem.paper.schemes import QR


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("progress") / "log", 2000)


def made_of(log, folder: Path, configs) -> sweep.Sweep:
    return sweep.new(folder, [[config] for config in configs], log.path, "cpu")


def test_without_a_terminal_a_sweep_prints_lines_with_counts(log, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SURVEY_SECONDS", 0.0)
    configs = [small_run(log, seed=seed, scheme=QR(2)) for seed in range(3)]
    sweep.work(made_of(log, tmp_path, configs[:1]), threading.Event())
    made = made_of(log, tmp_path, configs)
    text = io.StringIO()
    with progress.watching_sweep(Console(file=text, width=120), made) as report:
        report()
        sweep.work(made_of(log, tmp_path, configs[1:2]), threading.Event())
        report()
        made.error(configs[2]).parent.mkdir()
        made.error(configs[2]).write_text("{}")
    first, second, last = text.getvalue().splitlines()
    assert first == "runs: 1 of 3 done" and last == "runs: 2 of 3 done, 1 failed"
    assert second.startswith("runs: 2 of 3 done, ") and second.endswith(" left")

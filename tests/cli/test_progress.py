"""What a sweep shows while it trains: how many runs are done, running, failed and left."""

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console
from runs_of_training import small_log, small_run

from quorem.cli import progress
from quorem.cli.progress import SweepView
from quorem.experiments import sweep
from quorem.paper.schemes import QR
from quorem.training.loop import Status


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("progress") / "log", 2000)


def made_of(log, folder: Path, configs) -> sweep.Sweep:
    return sweep.new(folder, [[config] for config in configs], {configs[0].data: log.path}, "cpu")


def train(made: sweep.Sweep) -> None:
    sweep.work(made, 1, lambda *report: None, threading.Event())


def test_the_view_counts_done_running_failed_and_left(log, tmp_path):
    configs = [small_run(log, seed=seed, scheme=QR(2)) for seed in range(4)]
    made = made_of(log, tmp_path, configs)
    train(made_of(log, tmp_path, configs[:1]))
    view = SweepView(made)
    assert (view.done, view.total) == (1, 4) and "left" not in view.summary()
    view.take("status", 7, Status(configs[1], 5, 10, 123.0, 0.5))
    made.error(configs[2]).parent.mkdir()
    made.error(configs[2]).write_text("{}")
    view.survey()
    assert view.summary() == "1 of 4 runs done, 1 running, 1 to do, 1 failed"
    (line,) = view.lines()
    assert "(50%)" in line and "loss 0.5000" in line
    view.take("status", 8, Status(configs[3], 5, 10, 123.0, 0.5))
    view.take("ended", 8, None)  # a worker that was killed trains nothing
    assert list(view.running[7]) == [configs[1]] and not view.running[8]
    train(made_of(log, tmp_path, configs[1:2]))
    view.take("settled", 7, configs[1])
    view.survey()
    assert view.done == 2 and view.summary().endswith(" left")


def test_without_a_terminal_a_sweep_prints_lines_that_say_something_new(log, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SURVEY_SECONDS", 0.0)
    configs = [small_run(log, seed=seed) for seed in range(2)]
    made = made_of(log, tmp_path, configs)
    text = io.StringIO()
    with progress.watching_sweep(Console(file=text, width=120), made) as report:
        for _ in range(3):
            report("status", 0, Status(configs[0], 5, 10, 123.0, 0.5))
        train(made)
        report("ended", 0, None)
    lines = [line.split(" done")[0] for line in text.getvalue().splitlines()]
    assert lines == ["0 of 2 runs", "0 of 2 runs", "2 of 2 runs"]

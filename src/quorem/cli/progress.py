"""Progress of runs, stages and sweeps: bars on a terminal, otherwise a plain line at intervals."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..experiments import words
from ..experiments.sweep import Sweep
from ..training.config import RunConfig
from ..training.loop import Status

LINE_SECONDS = 10.0  # between two lines, where there is no terminal
SURVEY_SECONDS = 2.0  # between two looks at the folder of a sweep


@contextmanager
def bars(console: Console, names: Iterable[str] = ()) -> Iterator[Callable[[str, float, str, str], None]]:
    """Show progress until the block ends.

    Yields a function for reports: the name of a run or stage, the share of it that is done, the text after its bar, and
    the text of its line. Without a terminal, each has a line every ``LINE_SECONDS``, and one when it is finished.

    Args:
        console: the console to draw on.
        names: what has a bar from the beginning; others have one from their first report on.
    """
    if not console.is_terminal:
        printed: dict[str, float] = {}

        def print_line(name: str, done: float, text: str, line: str) -> None:
            seconds = time.monotonic()
            if seconds - printed.setdefault(name, seconds) >= LINE_SECONDS or done >= 1:
                printed[name] = seconds
                console.print(f"{name}: {line}", soft_wrap=True)

        yield print_line
        return
    description = TextColumn("{task.description:7}", markup=False)
    text = TextColumn("{task.fields[text]}", markup=False)
    columns = (description, BarColumn(14), TaskProgressColumn(), text, TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=None, start=False, text="") for name in names}

        def move_bar(name: str, done: float, text: str, line: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, start=False, text="")
            if not progress.tasks[tasks[name]].started:
                progress.start_task(tasks[name])
            progress.update(tasks[name], total=1.0, completed=done, text=text)

        yield move_bar


@contextmanager
def watching(console: Console, names: Mapping[RunConfig, str]) -> Iterator[Callable[[Status], None]]:
    """Show the progress of runs, by their names, until the block ends; yields the function that takes their reports."""
    with bars(console, names.values()) as show:

        def report(status: Status) -> None:
            loss = "" if status.loss is None else f"{status.loss:.4f}"
            text = f"{status.rows_per_second:7,.0f} rows/s loss {loss:6}"
            show(names[status.config], status.step / status.steps, text, line(status))

        yield report


def line(status: Status) -> str:
    """The progress of a run, in one line.

    >>> line(Status(RunConfig(data="log"), 300, 400, 12800.0, 0.4567))
    'step 300 of 400 (75%), 12,800 rows/s, loss 0.4567, 0:01 left'
    """
    left = (status.steps - status.step) * status.config.batch_size / max(status.rows_per_second, 1e-9)
    parts = [
        f"step {status.step:,} of {status.steps:,} ({100 * status.step // status.steps}%)",
        f"{status.rows_per_second:,.0f} rows/s",
        *([] if status.loss is None else [f"loss {status.loss:.4f}"]),
        *([f"{clock(left)} left"] if status.step < status.steps else []),
    ]
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> clock(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@contextmanager
def watching_sweep(console: Console, sweep: Sweep) -> Iterator[Callable[[str, int, Any], None]]:
    """Show a sweep until the block ends; yields a function for the ``report`` argument of ``sweep.run``.

    Without a terminal, a line is printed at the beginning, every ``LINE_SECONDS`` if it has changed, and at the end.
    """
    view = SweepView(sweep)
    live = Live(Text(view.summary()), console=console, refresh_per_second=4) if console.is_terminal else None
    printed, printed_at = "", float("-inf")

    def show() -> None:
        nonlocal printed, printed_at
        if live is not None:
            live.update(Text("\n".join([view.summary(), *view.lines()])))
        elif (text := view.summary()) != printed:
            printed, printed_at = text, time.monotonic()
            console.print(text, soft_wrap=True)

    def report(kind: str, worker: int, value: Any) -> None:
        view.take(kind, worker, value)
        if live is not None or time.monotonic() - printed_at >= LINE_SECONDS:
            show()

    with live or nullcontext():
        show()
        yield report
        view.survey()
        show()


class SweepView:
    """The state of a sweep: counts from its folder, which include other processes' runs, and reports of own workers."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.open = [config for group in sweep.runs for config in group]
        self.total = len(self.open)
        self.running: dict[int, dict[RunConfig, Status]] = {}
        self.failed: list[RunConfig] = []
        self.began = time.monotonic()
        self.survey()
        self.done_before = self.done

    def take(self, kind: str, worker: int, value: Any) -> None:
        """Handle one report of a worker."""
        runs = self.running.setdefault(worker, {})
        if kind == "status":
            runs[value.config] = value
        elif kind == "settled":
            runs.pop(value, None)
        elif kind == "ended":
            runs.clear()  # whether it succeeded or not, its runs are no longer running
        if time.monotonic() - self.surveyed > SURVEY_SECONDS:
            self.survey()

    def survey(self) -> None:
        """Update the counts from the folder."""
        self.open = [config for config in self.open if not self.sweep.is_done(config)]
        self.failed = [config for config in self.open if self.sweep.has_failed(config)]
        self.done = self.total - len(self.open)
        self.surveyed = time.monotonic()

    def summary(self) -> str:
        """Counts and the time left at the rate so far, in one line."""
        running = sum(map(len, self.running.values()))
        to_do = max(0, len(self.open) - len(self.failed) - running)
        text = f"{self.done} of {self.total} runs done, {running} running, {to_do} to do"
        if self.failed:
            text += f", {len(self.failed)} failed"
        if (trained := self.done - self.done_before) and to_do + running:
            left = (time.monotonic() - self.began) / trained * (len(self.open) - len(self.failed))
            text += f", {clock(left)} left"
        return text

    def lines(self) -> list[str]:
        """A line for each run that workers of this process train."""
        statuses = {config: status for runs in self.running.values() for config, status in runs.items()}
        return [f"  {name_of(config)}: {line(status)}" for config, status in statuses.items()]


def name_of(config: RunConfig) -> str:
    """A run in a few words.

    >>> name_of(RunConfig(data="log", threshold=200, seed=3))
    'dlrm QR(num_collisions=4) threshold 200 adagrad seed 3'
    """
    threshold = f" threshold {config.threshold}" if config.threshold else ""
    scheme = repr(config.scheme) if config.plan is None else words.scheme(json.loads(config.to_json()))
    return f"{config.network} {scheme}{threshold} {config.optimizer} seed {config.seed}"

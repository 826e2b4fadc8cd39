"""The progress of a sweep: which runs are done, running and left, and the time left; plain lines without a terminal."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..training.config import RunConfig
from . import words
from .sweep import Sweep

SURVEY_SECONDS = 2.0
LINE_SECONDS = 30.0  # between two lines, where there is no terminal


@contextmanager
def showing(console: Console, sweep: Sweep) -> Iterator[Callable[[str, int, Any], None]]:
    """Show a sweep until the block ends; yields a function for the ``report`` argument of ``sweep.run``.

    Without a terminal, a line is printed at the beginning, every ``LINE_SECONDS`` if it has changed, and at the end.
    """
    view = View(sweep)
    live = Live(view.table(), console=console, refresh_per_second=4) if console.is_terminal else None
    line, printed = "", float("-inf")

    def show() -> None:
        nonlocal line, printed
        if live is not None:
            live.update(view.table())
        elif view.summary() != line:
            line, printed = view.summary(), time.monotonic()
            console.print(line, soft_wrap=True)

    def report(kind: str, worker: int, value: Any) -> None:
        view.take(kind, worker, value)
        if live is not None or time.monotonic() - printed >= LINE_SECONDS:
            show()

    with live or nullcontext():
        show()
        yield report
        view.survey()
        show()


class View:
    """The state of a sweep: counts from its folder, which include other processes' runs, and reports of own workers."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.open = [config for group in sweep.runs for config in group]
        self.total = len(self.open)
        self.running: dict[int, dict[RunConfig, Any]] = {}
        self.failed: list[RunConfig] = []
        self.began, self.surveyed = time.monotonic(), float("-inf")
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

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the sweep is done, at the rate so far; None before the first run is done."""
        trained = self.done - self.done_before
        remaining = len(self.open) - len(self.failed)
        return (time.monotonic() - self.began) / trained * remaining if trained else None

    def current(self) -> dict[RunConfig, Any]:
        """The runs that workers of this process are training, with their status."""
        return {config: status for runs in self.running.values() for config, status in runs.items()}

    def summary(self) -> str:
        """Counts and the time left, in one line."""
        running = len(self.current())
        to_do = max(0, len(self.open) - len(self.failed) - running)
        text = f"{self.done} of {self.total} runs done, {running} running, {to_do} to do"
        if self.failed:
            text += f", {len(self.failed)} failed"
        seconds = self.seconds_left
        if seconds is not None and to_do + running:
            text += f", {int(seconds) // 60}:{int(seconds) % 60:02} left"
        return text

    def table(self) -> Group:
        """What a terminal shows."""
        rows = Table.grid(padding=(0, 2))
        for config, status in self.current().items():
            loss = "" if status.loss is None else f"loss {status.loss:.4f}"
            rate = f"{status.rows_per_second:,.0f} rows/s"
            rows.add_row(name_of(config), f"{100 * status.step // status.steps}%", rate, loss)
        return Group(Text(self.summary()), rows)


def name_of(config: RunConfig) -> str:
    """A run in a few words.

    >>> name_of(RunConfig(data="log", threshold=200, seed=3))
    'dlrm QR(num_collisions=4) threshold 200 adagrad seed 3'
    """
    threshold = f" threshold {config.threshold}" if config.threshold else ""
    scheme = repr(config.scheme) if config.plan is None else words.scheme(json.loads(config.to_json()))
    return f"{config.network} {scheme}{threshold} {config.optimizer} seed {config.seed}"

"""Progress of runs, stages and sweeps: bars on a terminal, otherwise a plain line at intervals."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

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
        times: dict[str, float] = {}
        lines: dict[str, str] = {}

        def print_line(name: str, done: float, text: str, line: str) -> None:
            seconds = time.monotonic()
            is_due = seconds - times.setdefault(name, seconds) >= LINE_SECONDS or done >= 1
            if is_due and line != lines.get(name):
                times[name], lines[name] = seconds, line
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
def watching_sweep(console: Console, sweep: Sweep) -> Iterator[Callable[[], None]]:
    """Show how many runs of a sweep are done until the block ends; yields the ``report`` argument of ``sweep.run``.

    The counts come from the folder, and include the runs of other processes.
    """
    configs = [config for group in sweep.runs for config in group]
    began, surveyed = time.monotonic(), float("-inf")
    done_before = sum(map(sweep.is_done, configs))

    def show_counts() -> None:
        done, failed = sum(map(sweep.is_done, configs)), sum(map(sweep.has_failed, configs))
        text = f"{done} of {len(configs)} done" + (f", {failed} failed" if failed else "")
        left = len(configs) - done - failed
        if left and done > done_before:
            text += f", {clock((time.monotonic() - began) / (done - done_before) * left)} left"
        show("runs", (done + failed) / len(configs), text, text)

    def report() -> None:
        nonlocal surveyed
        if time.monotonic() - surveyed >= SURVEY_SECONDS:
            show_counts()
            surveyed = time.monotonic()

    with bars(console, ["runs"]) as show:
        yield report
        show_counts()

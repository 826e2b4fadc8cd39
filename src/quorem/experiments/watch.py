"""Show the progress of runs: a bar for each on a terminal, otherwise a plain line at intervals."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..training.config import RunConfig
from ..training.loop import Status

LINE_SECONDS = 10.0  # time between two lines of a run, without a terminal


@contextmanager
def watching(console: Console, names: Mapping[RunConfig, str]) -> Iterator[Callable[[Status], None]]:
    """Show the progress of runs until the block ends; yields the function that takes their reports.

    Args:
        console: the console to draw on.
        names: names of the runs.
    """
    if console.is_terminal:
        with _bars(console, names) as report:
            yield report
    else:
        yield _lines(console, names)


@contextmanager
def _bars(console: Console, names: Mapping[RunConfig, str]) -> Iterator[Callable[[Status], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(14),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:>7} rows/s"),
        TextColumn("loss {task.fields[loss]:6}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {
            config: progress.add_task(name, total=None, start=False, rate="", loss="") for config, name in names.items()
        }

        def report(status: Status) -> None:
            task = tasks[status.config]
            if not progress.tasks[task].started:
                progress.start_task(task)
            loss = "" if status.loss is None else f"{status.loss:.4f}"
            rate = f"{status.rows_per_second:,.0f}"
            progress.update(task, total=status.steps, completed=status.step, rate=rate, loss=loss)

        yield report


def _lines(console: Console, names: Mapping[RunConfig, str]) -> Callable[[Status], None]:
    """Print a line for each run every ``LINE_SECONDS``, and one when it is finished."""
    printed: dict[RunConfig, float] = {}

    def report(status: Status) -> None:
        seconds = time.monotonic()
        since = seconds - printed.setdefault(status.config, seconds)
        if since >= LINE_SECONDS or status.step == status.steps:
            printed[status.config] = seconds
            console.print(f"{names[status.config]}: {line(status)}", highlight=False, soft_wrap=True)

    return report


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
        *([f"{int(left) // 60}:{int(left) % 60:02} left"] if status.step < status.steps else []),
    ]
    return ", ".join(parts)

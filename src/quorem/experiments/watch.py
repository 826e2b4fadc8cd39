"""Show progress: a bar for each run or stage on a terminal, otherwise a plain line at intervals."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..training.config import RunConfig
from ..training.loop import Status

LINE_SECONDS = 10.0  # time between two lines of a run or stage, without a terminal


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
        *([f"{int(left) // 60}:{int(left) % 60:02} left"] if status.step < status.steps else []),
    ]
    return ", ".join(parts)

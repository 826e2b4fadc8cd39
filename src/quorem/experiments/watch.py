"""Runs on the terminal: a bar for each, with its rate, its loss and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..training.config import RunConfig
from ..training.loop import Status


@contextmanager
def watching(console: Console, names: dict[RunConfig, str]) -> Iterator[Callable[[Status], None]]:
    """Show the runs that report until the block ends.

    Args:
        console: to draw on.
        names: of the runs.
    """
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

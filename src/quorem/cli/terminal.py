"""What commands print: text, tables, the commands to go on with, and the progress of runs, stages and sweeps.

Progress is bars on a terminal, otherwise a plain line at intervals.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:  # loads torch
    from ..data.folder import ProgressCallback
    from ..experiments.sweep import Sweep
    from ..training.loop import Status

LINE_SECONDS = 10.0  # between two lines, where there is no terminal
SURVEY_SECONDS = 2.0  # between two looks at the folder of a sweep

Show = Callable[[str, float, str], None]  # name of a run or stage, the share of it that is done, and a text about it


def terminal(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: without this, Rich drops ``[v2]`` of a path, and ``[/a]`` is an error."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def print_table(console: Console, rows: Sequence[Mapping[str, str]], *left: str) -> None:
    """Print rows of cells by column; the first column and those named in ``left`` are aligned to the left.

    Columns that are empty in every row are left out.
    """
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in (names[0], *left) else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)


def command_line() -> str:
    """The command as it was given, for files that record which command made them."""
    return shlex.join(["quorem", *sys.argv[1:]])


def command(*arguments: object) -> str:
    """A command of this program, quoted for a shell: ``quorem`` if that is on the PATH, else this Python's module."""
    program = ["quorem"] if shutil.which("quorem") else [sys.executable, "-m", "quorem"]
    return shlex.join([*program, *map(str, arguments)])


@contextmanager
def bars(console: Console) -> Iterator[Show]:
    """Show progress until the block ends; yields the function that takes reports.

    Without a terminal, each name has a line every ``LINE_SECONDS``, and one when it is finished.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    description = TextColumn("{task.description:7}", markup=False)
    text = TextColumn("{task.fields[text]}", markup=False)
    columns = (description, BarColumn(14), TaskProgressColumn(), text, TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def move_bar(name: str, done: float, text: str) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=1.0, text="")
            progress.update(tasks[name], completed=done, text=text)

        yield move_bar


def _lines(console: Console) -> Show:
    """A function that prints a line at intervals."""
    printed: dict[str, tuple[float, str]] = {}  # when, and the line

    def print_line(name: str, done: float, text: str) -> None:
        now, line = time.monotonic(), f"{name}: {done:.0%}, {text}"
        earlier, last = printed.setdefault(name, (now, ""))
        if (now - earlier >= LINE_SECONDS or done >= 1) and line != last:
            printed[name] = now, line
            console.print(line, soft_wrap=True)

    return print_line


@contextmanager
def stages(console: Console) -> Iterator["ProgressCallback"]:
    """Show the stages of work on rows until the block ends; yields the function that takes their reports."""
    with bars(console) as show:

        def report(stage: str, done: float, rows: int) -> None:
            counted = round(done * rows) if stage in ("number", "write") else rows  # other stages do not know the total
            show(stage, done, f"{counted:,} rows")

        yield report


@contextmanager
def watching(console: Console, name: str) -> Iterator[Callable[["Status"], None]]:
    """Show the progress of a run until the block ends; yields the function that takes its reports."""
    with bars(console) as show:

        def report(status: "Status") -> None:
            if status.resumed:
                console.print(f"goes on from step {status.step:,} of {status.steps:,}")
            text = f"step {status.step:,} of {status.steps:,}, {status.rows_per_second:,.0f} rows/s"
            text += "" if status.loss is None else f", loss {status.loss:.4f}"
            show(name, status.step / status.steps, text)

        yield report


@contextmanager
def watching_sweep(console: Console, sweep: "Sweep") -> Iterator[Callable[[], None]]:
    """Show how many runs of a sweep are done until the block ends; yields the ``report`` argument of ``sweep.run``.

    The counts come from the folder, and include the runs of other processes.
    """
    configs = [config for group in sweep.runs for config in group]
    surveyed = float("-inf")

    def report(least_seconds: float = SURVEY_SECONDS) -> None:
        nonlocal surveyed
        if time.monotonic() - surveyed >= least_seconds:
            done, failed = sum(map(sweep.is_done, configs)), sum(map(sweep.has_failed, configs))
            text = f"{done} of {len(configs)} done" + (f", {failed} failed" if failed else "")
            show("runs", (done + failed) / len(configs), text)
            surveyed = time.monotonic()

    with bars(console) as show:
        yield report
        report(0)

"""The terminal that commands print to, and the commands that they name to go on with."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


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


def command(*arguments: object) -> str:
    """A command of this program, quoted for a shell: ``quorem`` if that is on the PATH, else this Python's module."""
    program = ["quorem"] if shutil.which("quorem") else [sys.executable, "-m", "quorem"]
    return shlex.join([*program, *map(str, arguments)])

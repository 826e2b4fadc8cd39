"""The terminal that commands print to, and the commands that they name to go on with."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    """A command of this program, quoted for a shell."""
    return f"{program()} {shlex.join(map(str, arguments))}"


def program() -> str:
    """The command that runs this program again: ``quorem`` if that is the same program on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "quorem":
        return shlex.join([_short(Path(sys.executable)), "-m", "quorem"])
    on_path = shutil.which("quorem")
    return "quorem" if on_path and Path(on_path).resolve() == called.resolve() else shlex.quote(_short(called))


def _short(path: Path) -> str:
    """The path relative to the current folder, if it is inside."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

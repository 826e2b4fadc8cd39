"""The terminal that commands print to."""

from rich.console import Console


def terminal(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: without this, Rich drops ``[v2]`` of a path, and ``[/a]`` is an error."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)

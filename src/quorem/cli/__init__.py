"""The ``quorem`` command; each module has a group of commands.

A command imports what it needs when it runs, so that ``quorem --help`` loads neither torch nor anything else heavy.
"""

import signal
import sys
from typing import Annotated

try:
    import rich  # noqa: F401 - shows help and errors
    import typer
except ModuleNotFoundError:
    sys.exit('quorem: the command needs typer and rich: pip install "quorem[cli]"')

from ..version import __version__
from . import bench, data, demo, figures, serve, train
from .errors import Commands

epilog = "Example: quorem demo, then quorem COMMAND --help."
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, epilog=epilog)
for group in (demo, data, train, serve, figures, bench):
    app.add_typer(group.commands)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"quorem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compositional embeddings over complementary partitions."""


def main() -> None:
    """Run the command; Ctrl-C exits with 130."""
    if "--help" in sys.argv and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `quorem train --help | head` ends without a word
    try:
        app()
    except KeyboardInterrupt:  # before a command runs, while its options are read
        sys.exit(130)

"""Errors that a user can fix, and Ctrl-C, are told in one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

EXTRAS = {"polars": "data", "matplotlib": "report", "jinja2": "report"}  # the extra that brings a package


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print an error in one line and exit with code 1, without a traceback; Ctrl-C likewise, with code 130."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # these are RuntimeErrors
        raise
    except BrokenPipeError:  # the reader, such as head, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        raise typer.Exit(0) from None
    except FileNotFoundError as error:
        typer.echo(f"quorem: {error if error.filename is None else f'{error.filename} does not exist'}", err=True)
        raise typer.Exit(1) from error
    except (ValueError, OSError, RuntimeError, FloatingPointError, ModuleNotFoundError) as error:
        name = getattr(error, "name", None)  # of a package that is missing
        message = f'this needs {name}: pip install "quorem[{EXTRAS[name]}]"' if name in EXTRAS else error
        typer.echo(f"quorem: {message}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        typer.echo(f"quorem: {stop if stop.args else 'interrupted'}", err=True)
        raise typer.Exit(130) from stop


class Commands(TyperGroup):
    """The commands, with ``plain_errors`` around whichever runs."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command of the context."""
        with plain_errors():
            return super().invoke(ctx)

"""The ``quorem`` command. Each command imports what it runs, so that ``quorem --help`` is quick."""

import sys
from typing import Annotated, Literal

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError:
    sys.exit("quorem: the command needs typer and rich: pip install typer rich")

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _commands() -> None:
    """Compositional embeddings over complementary partitions."""  # with it, a single command keeps its name


@app.command()
def demo(
    rows: Annotated[int, typer.Option(min=2, help="Ids of the table.")] = 10_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Width of its vectors.")] = 16,
    seed: Annotated[int, typer.Option(help="Of every random draw.")] = 0,
) -> None:
    """Show each scheme at work on one large table, and what its vectors learn."""
    from .experiments import demo

    demo.show(rows, dim, seed, Console())


@app.command()
def reproduce(
    what: Annotated[Literal["table1"], typer.Argument(help="Figure or table of the paper.")],
    params_only: Annotated[bool, typer.Option("--params-only", help="Count parameters; train nothing.")] = False,
) -> None:
    """Reproduce a figure or table of the paper."""
    if not params_only:
        raise typer.BadParameter(f"{what} has no trained part yet: --params-only must be given")
    from .experiments import table1

    for (network, hidden), count in table1.parameter_counts().items():
        typer.echo(f"{network},{hidden},{count}")


def main() -> None:
    """Run the command; Ctrl-C exits with 130."""
    app()

"""``quorem plan``."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..optimizer_names import Optimizer
from .terminal import command

commands = typer.Typer()


@commands.command(epilog="Example: quorem plan data/log --budget 512MB --out plan.json")
def plan(
    data: Annotated[Path, Argument(help="Prepared data.")],
    budget: Annotated[str, Option(help="Bytes of all tables, such as 512MB or 2GiB.")],
    out: Annotated[Path | None, Option(help="File for train --plan; one that is there is replaced.")] = None,
    optimizer: Annotated[Optimizer, Option(help="Its state counts in the budget.")] = "adagrad",
    serving: Annotated[
        bool, Option("--serving", help="The tables alone, as they are served: no state, 8 or 4 bits a number.")
    ] = False,
    search: Annotated[
        bool,
        Option("--search", help="Train plans with other widths of rows too, on up to 200,000 rows; take the best."),
    ] = False,
    dim: Annotated[int, Option(min=1, help="Width of a row.")] = 16,
    row_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(help="Dtype of rows in training; auto: bfloat16 if float32 rows are too few."),
    ] = "auto",
    state_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "log8"],
        Option(help="Dtype of Adagrad's state for rows; auto: log8, one byte, if bfloat16 rows are too few."),
    ] = "auto",
) -> None:
    """Choose how each table is stored so that all of them fit a budget; say what each gets and why."""
    from ..data.prepared import Prepared
    from ..experiments import planning
    from ..files.atomic import write

    options: dict[str, Any] = {"row_dtype": row_dtype, "state_dtype": state_dtype}
    make = partial(planning.search, say=typer.echo) if search else planning.plan
    planned = make(Prepared(data), budget, dim, optimizer=None if serving else optimizer, **options)
    typer.echo(str(planned))
    if out is not None:
        write(out, planned.to_json() + "\n")
        typer.echo(f"Next: {command('train', '--data', data, '--plan', out, '--out', 'RUN')}")

"""``quorem plan``."""

import runpy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..optimizer_names import Optimizer
from .options import Overwrite

if TYPE_CHECKING:
    from torch import nn

commands = typer.Typer()


@commands.command(epilog="Example: quorem plan data/log --budget 512MB --out plan.json")
def plan(
    target: Annotated[Path, typer.Argument(help="Prepared data, or a Python file that defines model.")],
    budget: Annotated[str, typer.Option(help="Bytes of all tables, such as 512MB or 2GiB.")],
    out: Annotated[Path | None, typer.Option(help="File for the plan, as JSON for quorem train --plan.")] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Its state counts in the budget.")] = "adagrad",
    serving: Annotated[
        bool, typer.Option("--serving", help="The tables alone, as they are served: no state, 8 or 4 bits a number.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Train a few plans on a part of prepared data, and take the best.")
    ] = False,
    dim: Annotated[int, typer.Option(min=1, help="Width of a row, for prepared data.")] = 16,
    row_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Dtype of rows in training, for prepared data; auto: bfloat16 if float32 rows are too few."),
    ] = "auto",
    state_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "log8"],
        typer.Option(help="Dtype of Adagrad's state for rows; auto: log8, one byte, if bfloat16 rows are too few."),
    ] = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Choose how each table is stored so that all of them fit a budget; say what each gets and why."""
    import torch

    from .. import planner
    from ..data.prepared import Prepared
    from ..experiments import planning
    from ..files.atomic import write
    from .terminal import command

    if out is not None and out.exists() and not overwrite:
        raise ValueError(f"{out} exists: --overwrite replaces it")
    state = None if serving else optimizer
    if target.suffix == ".py":
        if search:
            raise ValueError("--search needs prepared data to train on, not a model")
        if row_dtype != "auto":
            raise ValueError(f"--row-dtype {row_dtype} needs prepared data: a model has the dtypes of its tables")
        planned = planner.plan(model_in(target), budget, optimizer=state, state_dtype=state_dtype)
    else:
        prepared = Prepared(target)
        dtypes = planning.TRIED_DTYPES if row_dtype == "auto" else (getattr(torch, row_dtype),)
        make = partial(planning.search, say=typer.echo) if search else planning.plan
        planned = make(prepared, budget, dim, optimizer=state, dtypes=dtypes, state_dtype=state_dtype)
    typer.echo(str(planned))
    if out is not None:
        write(out, planned.to_json() + "\n")
        if target.suffix != ".py":
            typer.echo(f"Next: {command('train', '--data', target, '--plan', out, '--out', 'RUN')}")


def model_in(path: Path) -> "nn.Module":
    """The model that a Python file defines as ``model``, which may also be a function that returns the model.

    The file runs with the meta device as the default, so that a model of any size takes no memory.

    Raises:
        ValueError: if the file does not run, or has no such model.
    """
    import torch
    from torch import nn

    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        with torch.device("meta"):
            model = runpy.run_path(str(path)).get("model")
            if callable(model) and not isinstance(model, nn.Module):
                model = model()
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path} must define model, an nn.Module or a function that returns one")
    return model

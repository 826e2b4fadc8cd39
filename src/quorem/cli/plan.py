"""``quorem plan``."""

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..optimizer_names import Optimizer
from .options import Overwrite

if TYPE_CHECKING:
    from torch import nn

    from ..planner import Plan

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
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Also print what full tables and the plan cost on so many GPUs.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a GPU in a step, for --world-size.")] = 8192,
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
    if world_size is not None:
        _print_costs(planned, world_size, batch_size, optimizer)
    if out is not None:
        write(out, planned.to_json() + "\n")
        if target.suffix != ".py":
            typer.echo(f"Next: {command('train', '--data', target, '--plan', out, '--out', 'RUN')}")


def _print_costs(planned: "Plan", world_size: int, batch_size: int, optimizer: Optimizer) -> None:
    """Print memory, sent bytes and step time of one of many GPUs, for full tables and for the plan."""
    from ..integrations.scale import estimate
    from ..modules.collection import Table
    from ..planner.budget import show_bytes
    from .terminal import print_table, terminal

    full = [Table(table.name, table.num_embeddings, table.embedding_dim) for table in planned.tables]
    rows = []
    for name, tables in {"full": full, "plan": [replace(table, scheme=planned[table.name]) for table in full]}.items():
        cost = estimate(tables, world_size, batch_size=batch_size, optimizer=optimizer)
        row = {
            "tables": name,
            "memory": show_bytes(round(cost.memory)) + ("" if cost.fits else ", does not fit"),
            "all-to-all": show_bytes(round(cost.id_bytes + cost.vector_bytes)),
            "gradients summed": show_bytes(round(cost.reduce_bytes)),
            "replicated": f"{sum(traffic.replicated for traffic in cost.tables)} of {len(cost.tables)}",
            "step, estimated": f"{cost.seconds * 1e3:.3g} ms",
        }
        rows.append(row)
    typer.echo(f"On {world_size} GPUs with {batch_size:,} samples each and {optimizer}, of one GPU in a step:")
    print_table(terminal(), rows)
    typer.echo(f"A table is worth replicating with up to {batch_size // 2:,} rows, half as many as a GPU has samples.")


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

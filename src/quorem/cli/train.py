"""``quorem plan`` and ``quorem train``."""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from ..optimizer_names import Optimizer, RowDtype, StateDtype
from .options import Device, Threads, integers
from .terminal import command

commands = typer.Typer()
Unknown = Literal["error", "rest", "hash"]


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
        Literal["auto", RowDtype], Option(help="Dtype of rows in training; auto: bfloat16 if float32 rows are too few.")
    ] = "auto",
    state_dtype: Annotated[
        Literal["auto", StateDtype],
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


@commands.command(epilog="Example: quorem train --data data/log --out runs/first --budget 2MB")
def train(
    context: typer.Context,
    data: Annotated[Path, Option(help="Prepared data, the folder that quorem prepare wrote.")],
    out: Annotated[Path, Option(help="Folder of the run; one that was interrupted goes on.")],
    scheme: Annotated[
        str | None, Option(help="full, hash, mult, add, concat, feature, path, or a scheme's JSON; by default mult.")
    ] = None,
    collisions: Annotated[
        int | None, Option(min=1, help="Ids that share a row, for a named scheme; default 4.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Compress tables even where that does not shrink them.")] = False,
    threshold: Annotated[int, Option(min=0, help="Tables of at most this many ids stay full.")] = 0,
    budget: Annotated[
        str | None, Option(help="Instead of a scheme: bytes of all tables with their state, such as 2MB.")
    ] = None,
    plan: Annotated[
        str | None, Option(help="Instead of a scheme: the file that quorem plan wrote, or JSON of its schemes.")
    ] = None,
    bits: Annotated[Literal["8", "4"] | None, Option(help="Store the rows in so many bits once trained.")] = None,
    row_dtype: Annotated[RowDtype | None, Option(help="Of rows in training; by default the plan's or float32.")] = None,
    state_dtype: Annotated[StateDtype | None, Option(help="Of Adagrad's state for the rows; likewise.")] = None,
    unknown: Annotated[
        Unknown, Option(help="An id that a table does not have: an error, the row of its rest, or hashed onto another.")
    ] = "error",
    network: Annotated[str, Option(help="dlrm, dcn, or your own: my_model.py:build.")] = "dlrm",
    preset: Annotated[Literal["text", "table1"], Option(help="As the paper's text or table 1 has it.")] = "text",
    hidden: Annotated[str | None, Option(help="Widths of hidden layers (of DLRM's top), such as 512,256.")] = None,
    bottom: Annotated[str | None, Option(help="Widths of the hidden layers of DLRM's bottom.")] = None,
    dim: Annotated[int, Option(min=1, help="Width of a stored row.")] = 16,
    optimizer: Annotated[Optimizer, Option(help="The optimizer.")] = "adagrad",
    lr: Annotated[float | None, Option(help="Learning rate; by default torch's.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Rows of a step.")] = 128,
    epochs: Annotated[int, Option(min=1, help="Passes over the rows; the best by validation loss is kept.")] = 1,
    patience: Annotated[int | None, Option(min=1, help="Stop after so many epochs without a lower loss.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the initial weights and of the shuffle.")] = 0,
    shuffle: Annotated[bool, Option("--shuffle", help="Train in a random order.")] = False,
    precision: Annotated[Literal["float32", "bfloat16"], Option(help="Of matrix products.")] = "float32",
    validate_every: Annotated[int | None, Option(min=1, help="Steps between two validations.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Train on the first so many rows only.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    deterministic: Annotated[bool, Option("--deterministic", help="The same bits on a GPU too.")] = False,
    checkpoint_seconds: Annotated[float, Option(min=0, help="Least time between two checkpoints.")] = 60,
) -> None:
    """Train one model on prepared data, resumable at any moment; Ctrl-C saves it and exits with 130."""
    import torch

    from .. import models
    from ..data.prepared import Prepared
    from ..experiments import planning
    from ..paper.schemes import QR
    from ..training.config import RunConfig
    from ..training.model import data_identity
    from . import training

    prepared = Prepared(data)
    if budget is not None and plan is not None:
        raise ValueError("--budget makes a plan: leave out --plan")
    if (budget or plan) is not None and (scheme is not None or collisions is not None or threshold or force):
        given = "--plan" if budget is None else "--budget"
        raise ValueError(f"{given} says how tables are stored: leave out --scheme, --collisions, --threshold, --force")
    planned = {} if plan is None else training.plan_from(plan, prepared, dim)
    if budget is not None:
        dtypes: dict[str, Any] = {"row_dtype": row_dtype or "auto", "state_dtype": state_dtype or "auto"}
        made = planning.plan(prepared, budget, dim, optimizer=optimizer, **dtypes)
        training.say(str(made))
        planned = planning.options_of(made)
    named_alike = {each.name: context.params[each.name] for each in fields(RunConfig) if each.name in context.params}
    others = {
        "data": data_identity(prepared),
        "scheme": QR() if planned else training.scheme_from(scheme or "mult", collisions or 4, force=force),
        "plan": planned.get("plan"),
        "bits": planned.get("bits") if bits is None else int(bits),
        "row_dtype": row_dtype or planned.get("row_dtype", "float32"),
        "state_dtype": state_dtype or planned.get("state_dtype", "float32"),
        "network": models.pinned(network),
        "hidden": None if hidden is None else integers("hidden", hidden),
        "bottom": None if bottom is None else integers("bottom", bottom),
        "embedding_dim": dim,
        "max_rows": rows,
    }
    if deterministic:
        torch.use_deterministic_algorithms(True)
    training.run(RunConfig(**{**named_alike, **others}), prepared, out, device, checkpoint_seconds)

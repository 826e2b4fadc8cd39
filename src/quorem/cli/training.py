"""``quorem train``: train one run, with output to the terminal."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import dtype_name
from ..data.prepared import Prepared
from ..experiments import planning, words
from ..experiments.figures import Conditions, Dataset
from ..files import atomic as files
from ..paper import schemes
from ..paper.schemes import Scheme
from ..planner import Plan
from ..planner.budget import show_bytes
from ..training.config import RunConfig
from ..training.loop import Options, stop_on_signal, train
from ..training.model import PAPER_METHODS, build_model, scheme_of, sizes, tables_of_run
from ..training.processes import is_first, process_group
from .terminal import command, terminal, watching


def scheme_from(text: str, num_collisions: int = 4, *, force: bool = False) -> Scheme:
    """The scheme for the paper's name of a method, with so many collisions, forced or not; or from JSON."""
    if text.startswith("{"):
        try:
            return schemes.from_json(text)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"scheme ({text}) must be the JSON of a scheme: {error}") from None
    if text not in PAPER_METHODS:
        known, example = ", ".join(map(repr, PAPER_METHODS)), schemes.to_json(schemes.QR(4))
        raise ValueError(f"scheme ({text!r}) must be one of {known}, or JSON such as '{example}'")
    return scheme_of(text, num_collisions, force=force)


def plan_from(text: str, prepared: Prepared, embedding_dim: int) -> dict[str, Any]:
    """The options of ``RunConfig`` that a plan determines, from a file of ``quorem plan`` or from JSON of schemes."""
    if not text.lstrip().startswith("{"):
        text = files.read(Path(text))
    try:
        values = json.loads(text)
        if isinstance(values, dict) and "format" not in values:
            return {"plan": {name: schemes.from_dict(scheme) for name, scheme in values.items()}}
        plan = Plan.from_json(text)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        rule = "must be what quorem plan wrote, or JSON of names and schemes"
        raise ValueError(f"plan ({text[:40]}...) {rule}: {error}") from None
    sizes = dict(zip(prepared.names, prepared.cardinalities, strict=True))
    for table in plan.tables:
        n, size = table.num_embeddings, sizes.get(table.name, table.num_embeddings)
        if (n, table.embedding_dim) != (size, embedding_dim):
            given = f"plan has {n} ids of width {table.embedding_dim} for {table.name}"
            raise ValueError(f"{given}, but the data and --dim have {size} of width {embedding_dim}")
    dtypes = sorted({dtype_name(table.dtype) for table in plan.tables})
    if len(dtypes) != 1:
        raise ValueError(f"plan has tables of {', '.join(dtypes)} but a run has all its tables in one dtype")
    return planning.options_of(plan)


def say(text: str) -> None:
    """Print, if this is the first of the processes that ``torchrun`` has started, or the only one."""
    if os.environ.get("RANK", "0") == "0":
        terminal().print(text, soft_wrap=True)


def run(config: RunConfig, prepared: Prepared, out: Path, device: str, checkpoint_seconds: float) -> None:
    """Train one run, show progress and print the results; continues an interrupted run in ``out``.

    The processes that ``torchrun`` has started train it together; only the first writes to the folder and the terminal.
    """
    finished = (out / "result.json").exists()
    if finished and os.environ.get("RANK", "0") != "0":
        return
    with nullcontext(device) if finished else process_group(device) as own_device:
        if is_first():
            _run(config, prepared, out, own_device, Options(checkpoint_seconds=checkpoint_seconds), finished)
        else:
            with stop_on_signal() as stop:
                train(config, prepared, out, device=own_device, stop=stop)


def _run(config: RunConfig, prepared: Prepared, out: Path, device: str, options: Options, finished: bool) -> None:
    console = terminal()
    for line in header(config, prepared, device):
        console.print(line, soft_wrap=True)
    with stop_on_signal() as stop, watching(console, words.network(config.network)) as report:
        try:
            result = train(config, prepared, out, device=device, options=replace(options, report=report), stop=stop)
        except KeyboardInterrupt:
            message = f"interrupted; the same command goes on from the checkpoint in {out}"
            raise KeyboardInterrupt(message) from None
    if finished:
        console.print(f"{out} is finished: nothing is trained again.", soft_wrap=True)
    if "best_epoch" in result:
        if (trained := result.get("epochs", config.epochs)) < config.epochs:
            console.print(f"Stopped after epoch {trained} of {config.epochs}: --patience {config.patience}.")
        console.print(f"Kept: epoch {result['best_epoch']}, the best of {trained} by validation loss.")
    for split in ("validation", "test"):
        text = "log loss {log_loss:.5f}, AUC {auc:.5f}, accuracy {accuracy:.4f}, calibration {calibration:.4f}"
        console.print(f"{split}: {text.format(**result[split])}", soft_wrap=True)
    if not finished:
        console.print(f"{result['rows_per_second']:,.0f} rows/s, {result['seconds']:,.1f} s")
    console.print(f"Next: {command('report', out)}", soft_wrap=True)


def header(config: RunConfig, prepared: Prepared, device: str) -> list[str]:
    """What will be trained: one line each for data, model, tables and training."""
    numbers, about = sizes(build_model(config, prepared, "meta")), Dataset.of(prepared)
    tables = tables_of_run(config, prepared)
    size = numbers["embedding_bytes"]
    full_size = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)  # float32
    smaller = f", {full_size / size:,.3g} times smaller than full float32 tables" if full_size > 1.01 * size else ""
    why = "which would not shrink (--force compresses them too)"
    kept_full = numbers["tables_kept_full"]
    kept = f"; {kept_full} of {len(tables)} tables stay full, {why}" if kept_full else ""
    rows = min(config.max_rows or about.rows["train"], about.rows["train"])
    conditions = Conditions(rows, config.epochs, config.batch_size)
    return [
        f"data      {prepared.path}: {words.data(about)}",
        f"model     {words.network(config.network)}, {numbers['parameters']:,} parameters",
        f"tables    {words.scheme(json.loads(config.to_json()))}, D = {config.embedding_dim}, {config.row_dtype}:"
        f" {show_bytes(size)} without optimizer state{smaller}{kept}",
        f"training  {conditions}, {words.optimizer(config.optimizer)}, lr {config.learning_rate:g},"
        f" seed {config.seed}, on {device}",
    ]

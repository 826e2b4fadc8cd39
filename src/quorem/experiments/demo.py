"""The demo: one click log, DLRM trained with tables of several sizes, and a page that compares size and loss."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.prepared import Prepared
from ..data.shape import scaled_cardinalities
from ..data.synthetic import ClickLog, synthesize
from ..modules.collection import EmbeddingCollection
from ..paper.schemes import QR, Full, Hash, Scheme
from ..planner import Plan, plan
from ..training.config import RunConfig
from ..training.loop import Options, Status, stop_on_signal, train_many
from ..training.model import data_identity
from ..training.tables import counted_tables, tables_of
from . import words
from .aggregate import FinishedRun, facts_of, result_of
from .figures import Dataset, Figure, Made, Result
from .paper_figures import FIGURE4, validation_interval

ROWS, SCALE = 100_000, 0.002  # rows of the synthetic log, and its cardinalities relative to Criteo's
POINTS = 12  # points of a curve
PLAN = "plan, as small as mult, 60 collisions"
WORKERS = 2  # models that train at a time on a CPU

SCHEMES: dict[str, Scheme] = {
    "full": Full(),
    "hash, 4 collisions": Hash(4),
    "mult, 4 collisions": QR(4),
    "hash, 60 collisions": Hash(60),
    "mult, 60 collisions": QR(60),
}
AXES = replace(FIGURE4, name="demo", title="Validation loss while training", paper="")


def make_log(out: Path, seed: int, num_rows: int = ROWS) -> Prepared:
    """A click log of Criteo's shape, small enough to train on in seconds, whose best log loss is known."""
    log = ClickLog(cardinalities=scaled_cardinalities(SCALE), seed=seed)
    return synthesize(log, num_rows, out, overwrite=out.exists())


def configs_of(prepared: Prepared, seed: int, max_rows: int | None = None) -> dict[RunConfig, str]:
    """The runs of the demo and their names."""
    every = validation_interval(len(prepared.split("train", check=False)), max_rows, POINTS)
    data = data_identity(prepared)
    options: dict[str, dict[str, Any]] = {name: {"scheme": scheme} for name, scheme in SCHEMES.items()}
    options[PLAN] = {"plan": dict(plan_of(prepared))}
    return {
        RunConfig(data=data, seed=seed, max_rows=max_rows, validate_every=every, **storage): name
        for name, storage in options.items()
    }


def plan_of(prepared: Prepared) -> Plan:
    """A plan by counts whose budget is the size of the smallest composed tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tables that stay full
        alike = EmbeddingCollection(tables_of(prepared.cardinalities, QR(60)), device="meta")
    budget = sum(tensor.nbytes for tensor in (*alike.parameters(), *alike.buffers()))
    return plan(counted_tables(prepared, RunConfig.embedding_dim), budget, optimizer=None, bits=())


def train_all(
    configs: Mapping[RunConfig, str],
    prepared: Prepared,
    folder: Path,
    *,
    device: str = "cpu",
    report: Callable[[Status], None] | None = None,
) -> Figure:
    """Train every model; returns the figure of their curves, the largest tables first."""
    outs = [folder / config.key() for config in configs]
    options = Options(checkpoint_seconds=float("inf"), report=report, keep_model=False)
    workers = WORKERS if device == "cpu" else 1
    with stop_on_signal() as stop:
        results = train_many(list(configs), prepared, outs, device=device, options=options, stop=stop, workers=workers)
    runs = [FinishedRun(*parts) for parts in zip(configs, results, outs, strict=True)]
    points = [result_of(configs[run.config], None, [run], str(prepared.path)) for run in runs]
    made = Made(command="quorem demo", data=Dataset.of(prepared), **facts_of(runs[0]))
    return Figure(axes=AXES, made=made, points=sorted(points, key=lambda p: -p.embedding_bytes))


def about(prepared: Prepared, max_rows: int | None = None) -> str:
    """One sentence about the data and the network."""
    rows = min(max_rows or prepared.num_rows, len(prepared.split("train", check=False)))
    ids, features = sum(prepared.cardinalities), len(prepared.cardinalities)
    return (
        f"DLRM, one epoch over {rows:,} rows with {ids:,} categories in {features} features, D = 16, batch 128, "
        f"Adagrad; tested on {len(prepared.split('test', check=False)):,} later rows."
    )


def headline(points: Sequence[Result]) -> str:
    """What the demo shows, in one sentence."""
    full, *others = points
    times = {point.series: full.embedding_bytes / point.embedding_bytes for point in others}
    parts = {point.series: change(point, full) for point in others}
    text = {name: f"{abs(part):.1%} {'above' if part >= 0 else 'below'}" for name, part in parts.items()}
    return (
        f"Tables planned by counts are {times[PLAN]:.0f} times smaller than full ones, with a log loss {text[PLAN]}"
        f" theirs; composed tables of the same size (mult, 60 collisions) are {text['mult, 60 collisions']},"
        f" hashed ones {text['hash, 60 collisions']}."
    )


def change(point: Result, full: Result) -> float:
    """The test loss relative to that of the full tables: 0.01 is 1% above."""
    return words.or_nan(point.test_mean) / words.or_nan(full.test_mean) - 1

"""The demo: one click log, and DLRM trained on it with tables of several sizes."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.prepared import Prepared
from ..data.shape import scaled_cardinalities
from ..data.synthetic import ClickLog, synthesize
from ..modules.collection import EmbeddingCollection
from ..paper.schemes import QR, Full, Hash
from ..planner import Plan, plan
from ..training.config import RunConfig
from ..training.model import counted_tables, tables_of
from . import reproduce
from .figures import Figure, Point
from .paper_figures import FIGURE4, validation_interval

SCALE = 0.002  # cardinalities of the log relative to Criteo's
POINTS = 12  # points of a curve
PLAN = "plan, as small as mult, 60 collisions"
WORKERS = 2  # processes on a CPU
AXES = replace(FIGURE4, name="demo", title="Validation loss while training", paper="")


def make_log(out: Path, seed: int, num_rows: int) -> Prepared:
    """A click log of Criteo's shape, small enough to train on in seconds, whose best log loss is known."""
    log = ClickLog(cardinalities=scaled_cardinalities(SCALE), seed=seed)
    return synthesize(log, num_rows, out, overwrite=True)


def planned(prepared: Prepared) -> Figure:
    """The figure of the demo before training."""
    storage: dict[str, dict[str, Any]] = {
        "full": {"scheme": Full()},
        "hash, 4 collisions": {"scheme": Hash(4)},
        "mult, 4 collisions": {"scheme": QR(4)},
        "hash, 60 collisions": {"scheme": Hash(60)},
        "mult, 60 collisions": {"scheme": QR(60)},
        PLAN: {"plan": dict(plan_of(prepared))},
    }
    every = {"validate_every": validation_interval(prepared.meta.rows["train"], None, POINTS)}
    points = [Point(series=name, x=None, options=every | options) for name, options in storage.items()]
    return reproduce.planned_figure(AXES, points, prepared, trials=1, optimizers=["adagrad"], command="quorem demo")


def plan_of(prepared: Prepared) -> Plan:
    """A plan by counts whose budget is the size of the smallest composed tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tables that stay full
        alike = EmbeddingCollection(tables_of(prepared.cardinalities, QR(60)), device="meta")
    budget = sum(tensor.nbytes for tensor in (*alike.parameters(), *alike.buffers()))
    return plan(counted_tables(prepared, RunConfig.embedding_dim), budget, optimizer=None, bits=())

"""The configuration of a run: everything that decides its result, and nothing else."""

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from .. import models
from ..checks import check_options
from ..files.checked_json import build
from ..modules.table import UnknownIds
from ..ops.state import check_state_dtype
from ..optim import CLASSES
from ..optimizer_names import Optimizer, RowDtype, StateDtype
from ..paper import schemes
from ..paper.schemes import QR, Scheme, check_scheme

# torch's learning rates, which the paper keeps (section 5.2).
DEFAULT_LRS = {name: inspect.signature(each).parameters["lr"].default for name, each in CLASSES.items()}
RARELY_SET = ("plan", "unknown", "bits", "row_dtype", "state_dtype", "hidden", "bottom", "patience")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run (section 5.2). Two runs with equal configurations are the same run.

    Args:
        data: identity of the prepared data (``data_identity``); it does not depend on their path.
        network: ``"dcn"``, ``"dlrm"``, or your own as ``"FILE.py:FUNCTION#DIGEST"`` (``models.pinned``).
        preset: architecture of the network, ``"text"`` or ``"table1"`` (see ``models.build``).
        hidden: widths of the hidden layers (of DLRM's top); None takes the preset's.
        bottom: those of DLRM's bottom; None likewise.
        scheme: how tables are stored.
        threshold: tables of at most this many ids stay full.
        plan: instead of ``scheme`` and ``threshold``, the scheme of each table by its name, as from ``quorem.plan``;
            stored as pairs, sorted by name.
        unknown: what an id gives that a table does not have: ``"error"``, or where the table can, ``"rest"`` or
            ``"hash"`` (see ``Embedding``).
        bits: 8 or 4: rows are stored in so many bits a number once trained, before the final metrics. None keeps them.
        row_dtype: dtype of the rows in training; updates of 16-bit rows are rounded at random (``ops.rounding``).
        state_dtype: dtype of the optimizer's state for the rows; only ``"adagrad"`` has others than ``"float32"``.
        embedding_dim: width of a stored row, D; with ``concat``, vectors are several rows wide (see ``tables_of``).
        optimizer: name of an optimizer of ``quorem.optim``, with torch's defaults for all options but ``lr``.
            Parameters outside the tables have the ``torch.optim`` class; with ``"rowwise_adagrad"``, Adagrad.
        lr: learning rate; if None, torch's default for the optimizer.
        batch_size: samples per step.
        epochs: passes over the training rows; of several, the one with the least validation loss is kept.
        patience: stop after so many epochs in a row without a lower validation loss; None trains all.
        seed: seed of the initial values and of the shuffle.
        shuffle: train in a random order that differs per epoch; False keeps the order of the log.
        precision: precision of matrix products: ``"float32"``, or ``"bfloat16"`` under autocast.
        validate_every: steps between two validations; None validates only at the end.
        max_rows: train only on the first rows, at most this many; None uses all.

    >>> config = RunConfig(data="criteo-sample", scheme=QR(num_collisions=60), seed=3)
    >>> RunConfig.from_json(config.to_json()) == config, config.learning_rate
    (True, 0.01)
    """

    data: str
    network: str = "dlrm"
    preset: Literal["text", "table1"] = "text"
    hidden: tuple[int, ...] | None = None
    bottom: tuple[int, ...] | None = None
    scheme: Scheme = QR()  # noqa: RUF009 - a scheme is frozen
    threshold: int = field(default=0, metadata={"low": 0})
    plan: Mapping[str, Scheme] | tuple[tuple[str, Scheme], ...] | None = None
    unknown: UnknownIds = "error"
    bits: Literal[8, 4] | None = None
    row_dtype: RowDtype = "float32"
    state_dtype: StateDtype = "float32"
    embedding_dim: int = 16
    optimizer: Optimizer = "adagrad"
    lr: float | None = None
    batch_size: int = 128
    epochs: int = 1
    patience: int | None = None
    seed: int = field(default=0, metadata={"low": 0})
    shuffle: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    validate_every: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_scheme(self.scheme)
        if not self.data:
            raise ValueError("data ('') must name the data")
        if self.plan is not None:
            object.__setattr__(self, "plan", _checked_plan(self.plan))
            if self.scheme != QR() or self.threshold:
                options = f"scheme ({self.scheme!r}) and threshold ({self.threshold})"
                raise ValueError(f"{options} must be left at {QR()!r} and 0 where plan says how tables are stored")
        models.check_network(self.network, self.preset, hidden=self.hidden, bottom=self.bottom)
        check_state_dtype(self.optimizer, getattr(torch, self.row_dtype), self.state_dtype)
        if self.lr is not None:
            if isinstance(self.lr, bool) or not isinstance(self.lr, int | float):
                raise TypeError(f"lr ({self.lr!r}) must be a float")
            if not 0 < self.lr < math.inf:
                raise ValueError(f"lr ({self.lr}) must be above 0 and finite")
            object.__setattr__(self, "lr", float(self.lr))

    @property
    def learning_rate(self) -> float:
        """``lr``, or torch's default for the optimizer."""
        return DEFAULT_LRS[self.optimizer] if self.lr is None else self.lr

    def to_json(self) -> str:
        """The configuration as JSON text; equal ones give equal text. Rarely set options are left out at defaults."""
        shown = [f.name for f in fields(self) if f.name not in RARELY_SET or getattr(self, f.name) != f.default]
        options = {name: getattr(self, name) for name in shown}
        options["scheme"] = schemes.to_dict(self.scheme)
        if self.plan is not None:
            options["plan"] = {name: schemes.to_dict(scheme) for name, scheme in dict(self.plan).items()}
        return json.dumps(options, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        """The configuration that ``to_json`` wrote; raises ValueError if the text is none."""
        return build(cls, json.loads(text), converters={Scheme: schemes.from_dict})

    def key(self) -> str:
        """Sixteen hex digits that identify the run on any machine: the start of the SHA-256 of ``to_json()``."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _checked_plan(plan: Any) -> tuple[tuple[str, Scheme], ...]:
    """A mapping of names to schemes, or pairs of them, as pairs sorted by name."""
    try:
        pairs = tuple(sorted(dict(plan).items()))
    except (TypeError, ValueError):
        pairs = ((None, plan),)
    if not all(isinstance(name, str) and isinstance(scheme, Scheme) for name, scheme in pairs):
        raise TypeError(f"plan ({plan!r}) must be a mapping of names of tables to schemes")
    if not pairs:
        raise ValueError("plan ({}) must name at least one table")
    return pairs

"""The configuration of a run: everything that decides its result, and nothing else."""

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_origin

import torch

from .. import models
from ..checks import check_choice, check_int
from ..files.checked_json import build
from ..modules.id_rules import UnknownIds
from ..ops.codes import BITS
from ..ops.state import check_state_dtype
from ..optim import CLASSES
from ..optimizer_names import Optimizer, StateDtype
from ..paper import schemes
from ..paper.schemes import QR, Scheme

# torch's learning rates, which the paper keeps (section 5.2).
DEFAULT_LRS = {name: inspect.signature(each).parameters["lr"].default for name, each in CLASSES.items()}
RowDtype = Literal["float32", "bfloat16", "float16"]
RARELY_SET = ("plan", "unknown", "bits", "row_dtype", "state_dtype", "hidden", "bottom", "patience")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run (section 5.2). Two runs with equal configurations are the same run.

    Args:
        data: identity of the prepared data (``data_identity``); it does not depend on their path.
        network: ``"dcn"``, ``"dlrm"``, ``"deepfm"``, or your own as ``"FILE.py:FUNCTION#DIGEST"`` (``models.pinned``).
        preset: architecture of the network, ``"text"`` or ``"table1"`` (see ``models.build``).
        hidden: widths of the hidden layers (the top's of DLRM); None takes the preset's.
        bottom: widths of the hidden layers of DLRM's bottom; None takes the preset's.
        scheme: how tables are stored.
        threshold: tables of at most this many ids stay full.
        plan: instead of ``scheme`` and ``threshold``, the scheme of each table by its name, for example from
            ``quorem.plan``; stored as pairs, sorted by name.
        unknown: how an id that a table does not have is treated: ``"error"``, ``"rest"`` in tables with a rest, or
            ``"hash"`` in composed tables (see ``Embedding``). In tables that do not support the option, it is an error.
        bits: 8 or 4: after training, rows are stored in so many bits per number, and the final metrics are measured
            with these rows. None keeps ``row_dtype``.
        row_dtype: dtype of the rows in training: ``"float32"``, or ``"bfloat16"`` or ``"float16"`` with stochastic
            rounding of updates (``quorem.ops.rounding``).
        state_dtype: how the optimizer keeps a number of its state for the rows: ``"float32"``; or, with ``"adagrad"``,
            ``"bfloat16"`` or ``"log8"``, one byte.
        embedding_dim: width of a stored row, D; with ``concat``, vectors are several rows wide (see ``tables_of``).
        optimizer: name of an optimizer of ``quorem.optim``, with torch's defaults for all options but ``lr``.
            Parameters outside the tables have the ``torch.optim`` class; with ``"rowwise_adagrad"``, Adagrad.
        lr: learning rate; if None, torch's default for the optimizer.
        batch_size: samples per step.
        epochs: passes over the training rows; of several, the one with the least validation loss is kept.
        patience: stop after so many epochs in a row without a lower validation loss; None trains all.
        seed: seed of the initial values and of the shuffle.
        shuffle: train in a random order that differs per epoch; False keeps the order of the log.
        precision: precision of matrix products: ``"float32"``, ``"tf32"``, or ``"bfloat16"`` under autocast.
        validate_every: steps between two validations; None validates only at the end.
        max_rows: train only on the first rows, at most this many; None uses all.

    Raises:
        TypeError: if an option has the wrong type.
        ValueError: if an option is out of range or unknown.

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
    threshold: int = 0
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
    seed: int = 0
    shuffle: bool = False
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    validate_every: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        """Check every option."""
        kinds = {"data": str, "network": str, "preset": str, "shuffle": bool, "scheme": Scheme}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} ({getattr(self, name)!r}) must be a {kind.__name__}")
        if not self.data:
            raise ValueError("data ('') must name the data")
        if self.plan is not None:
            object.__setattr__(self, "plan", _checked_plan(self.plan))
            default = type(self).__dataclass_fields__["scheme"].default
            if self.scheme != default or self.threshold:
                options = f"scheme ({self.scheme!r}) and threshold ({self.threshold})"
                raise ValueError(f"{options} must be left at {default!r} and 0 where plan says how tables are stored")
        for name in ("hidden", "bottom"):
            if (widths := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(check_int(f"a width of {name}", width, 1) for width in widths))
        models.check_network(self.network, self.preset, hidden=self.hidden, bottom=self.bottom)
        if self.bits not in (None, *BITS):
            raise ValueError(f"bits ({self.bits!r}) must be None, 8 or 4")
        for field in fields(self):
            if get_origin(field.type) is Literal:
                check_choice(field.name, getattr(self, field.name), field.type)
        check_state_dtype(self.optimizer, getattr(torch, self.row_dtype), self.state_dtype)
        least = {"threshold": 0, "embedding_dim": 1, "batch_size": 1, "epochs": 1, "seed": 0}
        optional = {name: 1 for name in ("validate_every", "max_rows", "patience") if getattr(self, name) is not None}
        for name, low in (least | optional).items():
            object.__setattr__(self, name, check_int(name, getattr(self, name), low))
        if self.lr is not None:
            if isinstance(self.lr, bool) or not isinstance(self.lr, int | float):
                raise TypeError(f"lr ({self.lr!r}) must be a float")
            if not (math.isfinite(self.lr) and self.lr > 0):
                raise ValueError(f"lr ({self.lr}) must be above 0 and finite")
            object.__setattr__(self, "lr", float(self.lr))

    @property
    def learning_rate(self) -> float:
        """``lr``, or torch's default for the optimizer."""
        return DEFAULT_LRS[self.optimizer] if self.lr is None else self.lr

    def to_json(self) -> str:
        """The configuration as JSON text with every option; equal configurations give equal text.

        Options that most runs do not set are left out if they have their defaults.
        """
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        options = {name: v for name, (v, usual) in values.items() if name not in RARELY_SET or v != usual}
        options["scheme"] = schemes.to_dict(self.scheme)
        if self.plan is not None:
            options["plan"] = {name: schemes.to_dict(scheme) for name, scheme in dict(self.plan).items()}
        return json.dumps(options, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "RunConfig":
        """The configuration that ``to_json`` wrote.

        Raises:
            ValueError: if the text is not a configuration.
        """
        return build(cls, json.loads(text), converters={Scheme: schemes.from_dict})

    def key(self) -> str:
        """Sixteen hex digits that identify the run: the start of the SHA-256 of ``to_json()``.

        The key is the same in every process and on every machine; if any option differs, the key differs.
        """
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

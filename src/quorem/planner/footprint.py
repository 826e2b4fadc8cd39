"""The bytes that tables take in a module, and the bytes that an optimizer keeps for them.

The bytes of a module are those of all its tensors: rows, path networks, maps, and the integers of its layout. The bytes
of an optimizer are those of its state for the module's parameters. Tables with sparse gradients, or updated within the
backward pass, have the row-wise state of ``quorem.optim``; tables with dense gradients have that of ``torch.optim``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple, get_args

import torch

from ..checks import FLOAT_DTYPES
from ..id_rules import RULE_COLUMNS
from ..ops import linear, replay
from ..ops.codes import code_bytes
from ..ops.layout import PART_COLUMNS, SLOT_COLUMNS
from ..ops.state import CATCHES_UP, HISTORY, MOMENT_COLUMNS
from ..optimizer_names import AVERAGES, Optimizer
from ..schemes import TableSpec

SGD_NAMES = ("sgd", "decayed_sgd", "momentum_sgd")
LAGS = ("decayed_sgd", *CATCHES_UP)  # optimizers that store, for each row, the step that it is up to date with
BETAS = (0.9, 0.999)  # the default betas of Adam; others may need a longer history of steps


ROW_DTYPES = {**FLOAT_DTYPES, "int8": torch.int8}  # dtypes that rows may have in training, by name


class Rate(NamedTuple):
    """Bytes that a table takes for each row and for each stored table."""

    row: int  # in the module, for each row
    row_state: int  # in the optimizer's state, for each row
    table_state: int  # in the optimizer's state, for each stored table


@dataclass(frozen=True)
class TrainedStorage:
    """How the tables of one module are stored and trained.

    Args:
        widths: ``embedding_dim`` of each table.
        num_features: number of features that read each table.
        dtype: dtype of the rows; int8 for rows of 8 bits, each with a scale and a zero point.
        sparse: whether rows are updated one by one (sparse gradients, or in the backward pass).
        optimizer: the optimizer whose state counts; None for none.
        bits: bits of a stored number, where rows are quantized after training; else 0.
        has_id_rules: whether a table takes raw or unknown ids: then each feature has a rule (``quorem.id_rules``).
    """

    widths: tuple[int, ...]
    num_features: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool
    optimizer: Optimizer | None
    bits: int = 0
    has_id_rules: bool = False

    @cached_property
    def width(self) -> int:
        """Width of a row of the parameter that holds all tables: the greatest common divisor of their widths."""
        return gcd(*self.widths)

    def rate(self, embedding_dim: int) -> Rate:
        """The bytes of a table of width ``embedding_dim``, for each row and each stored table."""
        number = self.dtype.itemsize
        rows = embedding_dim // self.width  # rows of the parameter that make up one row of the table
        bits = 8 if self.dtype == torch.int8 else self.bits
        row = rows * (code_bytes(self.width, bits) + 4) if bits else embedding_dim * number
        if self.bits or self.optimizer is None:
            return Rate(row, 0, 0)
        average = max(number, 4) if self.sparse else number
        if self.optimizer == "rowwise_adagrad" and self.sparse:
            return Rate(row, rows * average, 16)
        state = embedding_dim * average * AVERAGES[self.optimizer]
        last = 4 * rows if self.sparse and self.optimizer in LAGS else 0
        return Rate(row, state + last, 0)

    def shared_state(self) -> int:
        """Bytes of the optimizer's state that do not depend on the rows."""
        if self.optimizer is None:
            return 0
        if not self.sparse:
            return 0 if self.optimizer in SGD_NAMES else 4  # torch's step
        if self.optimizer not in LAGS:
            return 8
        if self.optimizer in SGD_NAMES:
            return 8 + linear.empty_products(torch.device("meta")).nbytes
        constants = replay.adam_constants(*BETAS, 1e-8, self.dtype, self.optimizer == "amsgrad")
        history = max(HISTORY, 2 * int(constants.window))
        moments = 0 if self.dtype == torch.float64 else MOMENT_COLUMNS
        decays = 1 if self.optimizer == "adamw" else 0
        return 8 + 8 * history * (1 + moments + decays)

    def layout(self, most_partitions: int) -> int:
        """Bytes of the integers by which lookups find rows, if an id reads from at most so many stored tables."""
        slots = sum(f * d // self.width for f, d in zip(self.num_features, self.widths, strict=True))
        per_slot = SLOT_COLUMNS + PART_COLUMNS * most_partitions
        per_feature = 2 + RULE_COLUMNS * self.has_id_rules
        return 8 * (slots * per_slot + per_feature * sum(self.num_features) + 1)  # 1: count of invalid ids


def module_bytes(storage: TrainedStorage, specs: Sequence[TableSpec]) -> tuple[int, int]:
    """Bytes of a module with tables of these specs, and of the optimizer's state for it.

    The specs must have closed-form partitions and must not concatenate, like those of the planner's choices.
    """
    module, state = storage.layout(max(len(spec.shapes) for spec in specs)), storage.shared_state()
    for spec in specs:
        rate, rows = storage.rate(spec.embedding_dim), sum(rows for rows, _ in spec.shapes)
        module += rows * rate.row
        state += rows * rate.row_state + len(spec.shapes) * rate.table_state
    return module, state


def number_bytes(dtype: torch.dtype) -> int:
    """Bytes of a number in full tables: those of the dtype, or of float32 if rows are to be trained in 8 bits."""
    return 4 if dtype == torch.int8 else dtype.itemsize


def check_optimizer(optimizer: str | None) -> None:
    """Raise ValueError unless ``optimizer`` is None or the name of an optimizer whose state is known."""
    if optimizer is not None and optimizer not in get_args(Optimizer):
        raise ValueError(
            f"optimizer ({optimizer!r}) must be None or one of {', '.join(map(repr, get_args(Optimizer)))}"
        )

"""What an optimizer keeps for the rows of ``stored`` ``[R, W]``: the state and the constants of each rule, by name.

Sums and averages are ``[R, W]`` (``[R]`` for rowwise_adagrad) in the accumulator's dtype, float32 for half precision.
The sums of adagrad may also be bfloat16, or uint8 codes on a logarithmic scale (``rounding.log8``).
``step`` is an int64 scalar that counts the steps taken. It lies on the device of ``stored``, as does the learning rate,
so that a CUDA graph can advance them.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ..optimizer_names import StateDtype

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "log8": torch.uint8}
NARROW = (torch.bfloat16, torch.uint8)  # dtypes of a state that is rounded at random
HISTORY = 2**16  # H: steps that are remembered, and so the most that a row may lag behind; a power of two
# Columns of ``AdamState.moments``: four moments, then two nodes, each a weight and a denominator.
MOMENT_COLUMNS = 8
NODE_COLUMN = 4


class SGDState(NamedTuple):
    """State of ``sgd``; it is needed only to round at random."""

    step: Tensor


class AdagradState(NamedTuple):
    """State of ``adagrad``."""

    sum: Tensor  # of squared gradients
    step: Tensor


class RowWiseAdagradState(NamedTuple):
    """State of ``rowwise_adagrad``.

    A row of a table that is ``pitch * W`` wide is ``pitch`` rows of ``stored``, each with the same number in ``sum``.
    """

    sum: Tensor  # [R]: of the mean squared gradient over all columns of a table's row
    step: Tensor
    extents: Tensor  # int64 [T, 2]: first row of each table in ``stored``, rising, and its pitch


class AdamState(NamedTuple):
    """State of ``adam``, ``amsgrad`` and ``adamw``, where rows that a step does not touch lag behind (``replay``)."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    last: Tensor  # int32 [R]: the step a row is up to date with; 0 if it never had a gradient and does not decay
    step: Tensor
    lrs: Tensor  # float64 [H]: the learning rate of step t at t % H
    moments: Tensor  # float64 [H, 8] of the steps after each possible ``last``; [0, 8] where they are not used
    max_exp_avg_sq: Tensor | None = None  # of amsgrad
    decays: Tensor | None = None  # of adamw, float64 [H]: sum of log(1 - lr * weight_decay) up to step t, at t % H


class AdagradConstants(NamedTuple):
    """Constants of ``adagrad`` and ``rowwise_adagrad``."""

    lr_decay: float
    eps: float


class AdamConstants(NamedTuple):
    """Constants of ``adam``, ``amsgrad`` and ``adamw``."""

    beta1: float
    beta2: float
    eps: float
    window: float  # how many missed steps count
    settled: float  # the step from which on missed steps have a closed form
    weight_decay: float = 0.0  # of adamw


@dataclass(eq=False)
class RowRule:
    """A rule by which an optimizer moves the rows of one ``stored``: all that ops which move rows need of it."""

    name: str  # a key of ``RULES``, which says of what types state and constants are
    constants: Any
    state: Any
    lr: Tensor  # float64 scalar
    rounding_seed: int | None = None  # half precision is rounded at random; to the nearest if None
    made_for: tuple[torch.dtype, torch.device] | None = None  # dtype and device of ``stored``
    updates: Any = None  # the ``Updates`` of ``stored``
    _last_lr: float | None = field(default=None, init=False)

    @property
    def entry(self) -> "Rule":
        """What is known of the rule by its name."""
        return RULES[self.name]

    def set_lr(self, lr: float | Tensor) -> None:
        """Write a learning rate to the device, if it is another: a CUDA graph reads it there."""
        if isinstance(lr, Tensor):
            self.lr.copy_(lr.squeeze())
            self._last_lr = None
        elif lr != self._last_lr:
            self.lr.fill_(lr)
            self._last_lr = lr


class Rule(NamedTuple):
    """What is known of an optimizer by its name: its state, the bytes of it, and who does its arithmetic.

    ``kernel`` is the name of a function in ``ops.rules``, the truth, and of a kernel in ``cpu.rules``. The kernel in
    ``gpu.rules`` takes the name of the optimizer.
    """

    kernel: str
    state: type
    constants: type
    averages: tuple[str, ...] = ()  # names of its tensors with a number for each weight, as in ``torch.optim``
    by_row: bool = False  # whether these have one number for each row instead
    lags: bool = False  # whether rows that no gradient reaches move too
    decays: bool = False  # whether they shrink by the weight decay of each step, as in ``AdamState.decays``
    fused: bool = True  # whether devices have kernels for it
    state_dtypes: tuple[StateDtype, ...] = ("float32",)  # that the averages may have

    @property
    def amsgrad(self) -> bool:
        """Whether it is ``torch.optim``'s rule with ``amsgrad=True``, which keeps the largest average of squares."""
        return "max_exp_avg_sq" in self.averages


_ADAM = ("exp_avg", "exp_avg_sq")
RULES: dict[str, Rule] = {
    "sgd": Rule("sgd", SGDState, tuple),  # the learning rate is an argument of its own
    "adagrad": Rule("adagrad", AdagradState, AdagradConstants, ("sum",), state_dtypes=get_args(StateDtype)),
    "rowwise_adagrad": Rule("rowwise_adagrad", RowWiseAdagradState, AdagradConstants, ("sum",), by_row=True),
    "adam": Rule("adam", AdamState, AdamConstants, _ADAM, lags=True),
    "amsgrad": Rule("adam", AdamState, AdamConstants, (*_ADAM, "max_exp_avg_sq"), lags=True),
    "adamw": Rule("adam", AdamState, AdamConstants, _ADAM, lags=True, decays=True, fused=False),
}


def check_state_dtype(optimizer: str, row_dtype: torch.dtype, state_dtype: StateDtype) -> None:
    """Raise ValueError unless an optimizer can keep its state for rows of ``row_dtype`` in ``state_dtype``."""
    allowed = RULES[optimizer].state_dtypes if row_dtype != torch.float64 else ("float32",)
    if state_dtype not in allowed:
        raise ValueError(
            f"state_dtype ({state_dtype!r}) must be one of {', '.join(map(repr, allowed))} for {optimizer} and rows of"
            f" {row_dtype}"
        )


def row_state_bytes(
    optimizer: str, width: int, row_dtype: torch.dtype, state_dtype: StateDtype = "float32", lags: bool = True
) -> int:
    """Bytes that an optimizer keeps for one row of ``stored``, ``width`` numbers.

    ``lags`` says whether rows may lag behind, as under the optimizers of ``quorem.optim``.

    >>> [row_state_bytes("adagrad", 16, torch.float32, dtype) for dtype in ("float32", "bfloat16", "log8")]
    [64, 32, 16]
    """
    check_state_dtype(optimizer, row_dtype, state_dtype)
    rule = RULES[optimizer]
    number = 8 if row_dtype == torch.float64 else STATE_DTYPES[state_dtype].itemsize
    numbers = len(rule.averages) * (1 if rule.by_row else width)
    return numbers * number + (4 if rule.lags and lags else 0)


def present(state: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors that a state has."""
    return tuple([tensor for tensor in state if tensor is not None])

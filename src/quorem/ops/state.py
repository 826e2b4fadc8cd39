"""What an optimizer keeps for the rows of ``stored`` ``[R, W]``: the state and the constants of each rule, by name.

Sums and averages are ``[R, W]`` (``[R]`` for rowwise_adagrad) in the accumulator's dtype, float32 for half precision.
``step`` is an int64 scalar that counts the steps taken. It lies on the device of ``stored``, as does the learning rate,
so that a CUDA graph can advance them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Columns of ``AdamState.moments``: four moments, then two nodes, each a weight and a denominator.
MOMENT_COLUMNS = 8
NODE_COLUMN = 4


class SGDState(NamedTuple):
    """Of ``sgd``, which needs it to round at random only."""

    step: Tensor


class AdagradState(NamedTuple):
    """Of ``adagrad``."""

    sum: Tensor  # of squared gradients
    step: Tensor


class RowWiseAdagradState(NamedTuple):
    """Of ``rowwise_adagrad``.

    A row of a table that is ``pitch * W`` wide is ``pitch`` rows of ``stored``, each with the same number in ``sum``.
    """

    sum: Tensor  # [R]: of the mean squared gradient over all columns of a table's row
    step: Tensor
    extents: Tensor  # int64 [T, 2]: first row of each table in ``stored``, rising, and its pitch


class AdamState(NamedTuple):
    """Of ``adam`` and ``amsgrad``, where rows that a step does not touch lag behind (see ``replay``)."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    last: Tensor  # int32 [R]: the step a row is up to date with; 0 if it never had a gradient
    step: Tensor
    lrs: Tensor  # float64 [H]: the learning rate of step t at t % H
    moments: Tensor  # float64 [H, 8] of the steps after each possible ``last``; [0, 8] where they are not used
    max_exp_avg_sq: Tensor | None = None  # of amsgrad


class LazyAdamState(NamedTuple):
    """Of ``lazy_adam`` and ``lazy_amsgrad``."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    max_exp_avg_sq: Tensor | None = None  # of lazy_amsgrad


class SGDConstants(NamedTuple):
    """SGD has none: the learning rate is an argument of its own."""


class AdagradConstants(NamedTuple):
    """Of ``adagrad`` and ``rowwise_adagrad``."""

    lr_decay: float
    eps: float


class AdamConstants(NamedTuple):
    """Of ``adam`` and ``amsgrad``."""

    beta1: float
    beta2: float
    eps: float
    window: float  # how many missed steps count
    settled: float  # the step from which on missed steps have a closed form


class LazyAdamConstants(NamedTuple):
    """Of ``lazy_adam`` and ``lazy_amsgrad``."""

    beta1: float
    beta2: float
    eps: float


State = SGDState | AdagradState | RowWiseAdagradState | AdamState | LazyAdamState
Constants = SGDConstants | AdagradConstants | AdamConstants | LazyAdamConstants

STATES: dict[str, type] = {
    "sgd": SGDState,
    "adagrad": AdagradState,
    "rowwise_adagrad": RowWiseAdagradState,
    "adam": AdamState,
    "amsgrad": AdamState,
    "lazy_adam": LazyAdamState,
    "lazy_amsgrad": LazyAdamState,
}
CONSTANTS: dict[str, type] = {
    "sgd": SGDConstants,
    "adagrad": AdagradConstants,
    "rowwise_adagrad": AdagradConstants,
    "adam": AdamConstants,
    "amsgrad": AdamConstants,
    "lazy_adam": LazyAdamConstants,
    "lazy_amsgrad": LazyAdamConstants,
}
CATCHES_UP = ("adam", "amsgrad")  # rules under which rows that no gradient reaches move too


class DeviceScalar:
    """A float64 number on a device, written only when it changes, so that a CUDA graph can read it there."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.float64, device=device)
        self._value: float | None = None

    def set(self, value: float | Tensor) -> Tensor:
        """Set it to ``value``, and return the tensor."""
        if isinstance(value, Tensor):
            self._value = None
            self.tensor.copy_(value.squeeze())
        elif value != self._value:
            self._value = value
            self.tensor.fill_(value)
        return self.tensor

"""The optimizers as rules on the touched rows: the truth, in plain PyTorch.

An update takes every gradient from ``stored`` as it was, sums those of equal rows in the accumulator's dtype, and
changes each touched row once. The step counts even if no row is touched. Where rows lag behind, the touched ones and
the next few in turn are first brought up to date (see ``replay``).

A rule takes the touched rows, its state and its constants (see ``state``). Rules under which no row lags behind count
the step themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import gradients, replay
from .layout import Layout
from .pieces import Gradient
from .rounding import Rounding, read_state, write_state_
from .rows import IdBatch, accumulator, subtract_
from .state import AdagradConstants, AdagradState, AdamConstants, AdamState, RowRule, RowWiseAdagradState, SGDState


class TouchedRows(NamedTuple):
    """The rows that a step changes, and by what."""

    rows: Tensor  # [N], all different
    grad: Tensor  # [N, W]: their gradients in the accumulator's dtype
    stored: Tensor  # [R, W]
    lr: Tensor  # float64 scalar
    rounding: Rounding | None

    def subtract_(self, change: Tensor) -> None:
        """Subtract ``change`` ``[N, W]``."""
        subtract_(self.stored, self.rows, change, self.rounding)


def update_(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> None:
    """One step on the rows that a lookup read."""
    rows_update_(*gradients.row_grads(grad, batch, stored, layout), stored, rule)


def rows_update_(rows: Tensor, values: Tensor, stored: Tensor, rule: RowRule) -> None:
    """One step on ``rows`` ``[N]``, repeated or not, with gradients ``[N, W]``; rows below 0 are left out."""
    state, constants, seed = rule.state, rule.constants, rule.rounding_seed
    values = values.flatten(0, -2).to(accumulator(stored))
    rows, sums = gradients.sum_by_row(rows.flatten(), values)
    if rule.entry.lags:
        replay.rows_catch_up_(torch.cat([rows, replay.rows_in_turn(stored, state)]), stored, rule)
    rounding = None if seed is None else Rounding(seed, state.step)
    STEPS[rule.entry.kernel](TouchedRows(rows, sums, stored, rule.lr, rounding), state, constants)
    if rule.entry.lags:
        replay.advance_(rule.lr, state, constants)
        state.last[rows] = state.step.to(state.last.dtype)


def sgd(touched: TouchedRows, state: SGDState, constants: tuple[()]) -> None:
    """``torch.optim.SGD`` without momentum or weight decay."""
    touched.subtract_(touched.lr * touched.grad)
    state.step.add_(1)


def adagrad(touched: TouchedRows, state: AdagradState, constants: AdagradConstants) -> None:
    """``torch.optim.Adagrad``."""
    squares = read_state(state.sum, touched.rows) + touched.grad**2
    write_state_(state.sum, touched.rows, squares, touched.rounding)
    rate = touched.lr / (1 + state.step.double() * constants.lr_decay)
    touched.subtract_(rate * touched.grad / (squares.sqrt() + constants.eps))
    state.step.add_(1)


def rowwise_adagrad(touched: TouchedRows, state: RowWiseAdagradState, constants: AdagradConstants) -> None:
    """Adagrad with one number per row of a table: the sum of the mean of its squared gradient."""
    rows, grad = touched.rows, touched.grad
    base, pitch = state.extents[torch.searchsorted(state.extents[:, 0].contiguous(), rows, right=True) - 1].unbind(1)
    _, group = (rows - (rows - base) % pitch).unique(return_inverse=True)  # by the first of a table's row
    mean = grad.new_zeros(len(rows)).index_add(0, group, (grad**2).mean(1) / pitch)[group]
    squares = state.sum[rows] + mean
    state.sum[rows] = squares
    rate = touched.lr / (1 + state.step.double() * constants.lr_decay)
    touched.subtract_(rate * grad / (squares.sqrt() + constants.eps)[:, None])
    state.step.add_(1)


def adam(touched: TouchedRows, state: AdamState, constants: AdamConstants) -> None:
    """``torch.optim.Adam`` or ``AdamW`` on the dense gradient, which is zero in other rows: these lag behind."""
    rows, grad = touched.rows, touched.grad
    exp_avg = state.exp_avg[rows].lerp(grad, 1 - constants.beta1)
    exp_avg_sq = state.exp_avg_sq[rows] * constants.beta2 + grad * grad * (1 - constants.beta2)
    state.exp_avg[rows], state.exp_avg_sq[rows] = exp_avg, exp_avg_sq
    if state.max_exp_avg_sq is not None:
        exp_avg_sq = torch.maximum(state.max_exp_avg_sq[rows], exp_avg_sq)
        state.max_exp_avg_sq[rows] = exp_avg_sq
    t = (state.step + 1).double()
    denominator = exp_avg_sq.sqrt() / (1 - constants.beta2**t).sqrt() + constants.eps
    change = touched.lr / (1 - constants.beta1**t) * exp_avg / denominator
    if constants.weight_decay:
        change = change + touched.lr * constants.weight_decay * touched.stored[rows].to(change.dtype)
    touched.subtract_(change)


STEPS: dict[str, Callable[..., None]] = {step.__name__: step for step in (sgd, adagrad, rowwise_adagrad, adam)}

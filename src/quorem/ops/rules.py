"""The optimizers as rules on the touched rows: the truth, in plain PyTorch.

An update takes every gradient from ``stored`` as it was, sums those of equal rows in the accumulator's dtype, and
changes each touched row once. First the sums are divided by ``loss_scale``, in which case a row of a table whose sum is
not finite counts as having a gradient of zero; then they are clamped to ``clip_value``; then the rule runs. The step
counts even if no row is touched. Where rows lag behind, the touched ones and the next few in turn are first brought up
to date (see ``replay``).

A rule takes the touched rows, its state and its constants (see ``state``). Rules under which no row lags behind count
the step themselves.
"""

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from . import gradients, replay
from .layout import Layout, extents_of
from .rounding import Rounding, read_state, write_state_
from .rows import IdBatch, accumulator, subtract_
from .state import (
    RULES,
    AdagradConstants,
    AdagradState,
    AdamConstants,
    AdamState,
    Constants,
    RowWiseAdagradState,
    SGDConstants,
    SGDState,
    State,
    StepOptions,
)


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


def update_(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    lr: Tensor,
    state: State,
    layout: Layout,
    **options: Unpack[StepOptions],
) -> None:
    """One step on the rows that a lookup read."""
    extents = None if options.get("loss_scale") is None else extents_of(layout)
    row_grads = gradients.row_grads(grad, batch, stored, layout)
    rows_update_(*row_grads, stored, lr, state, extents=extents, **options)


def rows_update_(
    rows: Tensor,
    values: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: State,
    *,
    rule: str,
    constants: Constants,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
    rounding_seed: int | None = None,
    extents: Tensor | None = None,
) -> None:
    """One step on ``rows`` ``[N]``, repeated or not, with gradients ``[N, W]``; rows below 0 are left out.

    ``extents`` are those of ``gradients.sum_by_row``.
    """
    values = values.flatten(0, -2).to(accumulator(stored))
    rows, sums = gradients.sum_by_row(rows.flatten(), values, clip_value, loss_scale, extents)
    rounding = None if rounding_seed is None else Rounding(rounding_seed, state.step)
    if isinstance(state, AdamState):
        due = torch.cat([rows, replay.rows_in_turn(stored, state)])
        replay.rows_catch_up_(due, stored, state, rule=rule, constants=constants, rounding_seed=rounding_seed)
    STEPS[RULES[rule].kernel](TouchedRows(rows, sums, stored, lr, rounding), state, constants)
    if isinstance(state, AdamState):
        assert isinstance(constants, AdamConstants)
        replay.advance_(lr, state, constants)
        state.last[rows] = state.step.to(state.last.dtype)


def sgd(touched: TouchedRows, state: SGDState, constants: SGDConstants) -> None:
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
    whole, pitch = gradients.whole_rows(rows, state.extents)
    _, group = whole.unique(return_inverse=True)
    mean = grad.new_zeros(len(rows)).index_add(0, group, (grad**2).mean(1) / pitch)[group]
    squares = state.sum[rows] + mean
    state.sum[rows] = squares
    rate = touched.lr / (1 + state.step.double() * constants.lr_decay)
    touched.subtract_(rate * grad / (squares.sqrt() + constants.eps)[:, None])
    state.step.add_(1)


def adam(touched: TouchedRows, state: AdamState, constants: AdamConstants) -> None:
    """``torch.optim.Adam`` or ``AdamW`` on the dense gradient, which is zero in other rows: these lag behind."""
    exp_avg, root = _averaged(touched, state, constants)
    t = (state.step + 1).double()
    denominator = root / (1 - constants.beta2**t).sqrt() + constants.eps
    change = touched.lr / (1 - constants.beta1**t) * exp_avg / denominator
    if constants.weight_decay:
        change = change + touched.lr * constants.weight_decay * touched.stored[touched.rows].to(change.dtype)
    touched.subtract_(change)


STEPS: dict[str, Callable[..., None]] = {step.__name__: step for step in (sgd, adagrad, rowwise_adagrad, adam)}


def _averaged(touched: TouchedRows, state: AdamState, constants: AdamConstants) -> tuple[Tensor, Tensor]:
    """Update the averages with the gradient; returns the first, and the root of the second or of its maximum."""
    rows, grad = touched.rows, touched.grad
    exp_avg = state.exp_avg[rows].lerp(grad, 1 - constants.beta1)
    exp_avg_sq = state.exp_avg_sq[rows] * constants.beta2 + grad * grad * (1 - constants.beta2)
    state.exp_avg[rows], state.exp_avg_sq[rows] = exp_avg, exp_avg_sq
    if state.max_exp_avg_sq is not None:
        exp_avg_sq = torch.maximum(state.max_exp_avg_sq[rows], exp_avg_sq)
        state.max_exp_avg_sq[rows] = exp_avg_sq
    return exp_avg, exp_avg_sq.sqrt()

"""The optimizers as rules on the touched rows: the truth, in plain PyTorch.

An update takes every gradient from ``stored`` as it was, sums those of equal rows in the accumulator's dtype, and
changes each touched row once. First the sums are divided by ``loss_scale``, in which case a row of a table whose sum is
not finite counts as having a gradient of zero; then they are clamped to ``clip_value``; then the rule runs. The step
counts even if no row is touched.

A rule takes ``rows`` ``[N]``, all different; their gradients ``[N, W]`` in the accumulator's dtype; ``stored``
``[R, W]``, or bytes (``codes``); ``lr``, a float64 scalar tensor; and its state and constants (see ``state``).
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from . import gradients, linear, replay
from .layout import Layout, extents_of
from .rounding import Rounding
from .rows import accumulator, subtract_
from .state import (
    AdagradConstants,
    AdagradState,
    AdamConstants,
    AdamState,
    AdamWConstants,
    AdamWState,
    Constants,
    LazyAdamConstants,
    LazyAdamState,
    MomentumSGDConstants,
    MomentumSGDState,
    RowWiseAdagradState,
    SGDConstants,
    SGDState,
    State,
    StepOptions,
)


def lookup_update_(
    grad: Tensor, ids: Tensor, stored: Tensor, lr: Tensor, state: State, layout: Layout, **options: Unpack[StepOptions]
) -> None:
    """One step on the rows that a lookup read."""
    extents = None if options.get("loss_scale") is None else extents_of(layout)
    row_grads = gradients.lookup_row_grads(grad, ids, stored, layout)
    rows_update_(*row_grads, stored, lr, state, extents=extents, **options)


def bag_update_(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    lr: Tensor,
    state: State,
    layout: Layout,
    *,
    mean: bool,
    **options: Unpack[StepOptions],
) -> None:
    """One step on the rows that a bag read."""
    extents = None if options.get("loss_scale") is None else extents_of(layout)
    row_grads = gradients.bag_row_grads(grad, ids, offsets, sample_weights, stored, layout, mean=mean)
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
    RULES[rule](rows, sums, stored, lr, state, constants, rounding)


def sgd(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: SGDState,
    constants: SGDConstants,
    rounding: Rounding | None,
) -> None:
    """``torch.optim.SGD`` without momentum or weight decay."""
    subtract_(stored, rows, lr * grad, rounding)
    state.step.add_(1)


def momentum_sgd(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: MomentumSGDState,
    constants: MomentumSGDConstants,
    rounding: Rounding | None,
) -> None:
    """``torch.optim.SGD`` with momentum, weight decay or both, on the dense gradient: other rows lag behind."""
    seed = None if rounding is None else rounding.seed
    due = torch.cat([rows, replay.rows_in_turn(stored, state)])
    replay.rows_catch_up_(due, stored, state, rule="momentum_sgd", constants=constants, rounding_seed=seed)
    direction = grad + constants.weight_decay * stored[rows].to(grad.dtype)
    if state.momentum_buffer is not None:
        buffer = constants.momentum * state.momentum_buffer[rows] + direction
        state.momentum_buffer[rows] = buffer
        direction = direction + constants.momentum * buffer if constants.nesterov else buffer
    subtract_(stored, rows, lr * direction, rounding)
    linear.advance_(lr, state, constants)
    state.last[rows] = state.step.to(state.last.dtype)


def adagrad(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: AdagradState,
    constants: AdagradConstants,
    rounding: Rounding | None,
) -> None:
    """``torch.optim.Adagrad``."""
    squares = state.sum[rows] + grad**2
    state.sum[rows] = squares
    rate = lr / (1 + state.step.double() * constants.lr_decay)
    subtract_(stored, rows, rate * grad / (squares.sqrt() + constants.eps), rounding)
    state.step.add_(1)


def rowwise_adagrad(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: RowWiseAdagradState,
    constants: AdagradConstants,
    rounding: Rounding | None,
) -> None:
    """Adagrad with one number per row of a table: the sum of the mean of its squared gradient."""
    whole, pitch = gradients.whole_rows(rows, state.extents)
    _, group = whole.unique(return_inverse=True)
    mean = grad.new_zeros(len(rows)).index_add(0, group, (grad**2).mean(1) / pitch)[group]
    squares = state.sum[rows] + mean
    state.sum[rows] = squares
    rate = lr / (1 + state.step.double() * constants.lr_decay)
    subtract_(stored, rows, rate * grad / (squares.sqrt() + constants.eps)[:, None], rounding)
    state.step.add_(1)


def adam(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: AdamState | AdamWState,
    constants: AdamConstants | AdamWConstants,
    rounding: Rounding | None,
) -> None:
    """``torch.optim.Adam`` or ``AdamW`` on the dense gradient, which is zero in other rows: these lag behind."""
    seed = None if rounding is None else rounding.seed
    due = torch.cat([rows, replay.rows_in_turn(stored, state)])
    replay.rows_catch_up_(due, stored, state, rule="adam", constants=constants, rounding_seed=seed)
    exp_avg, root = _averaged(rows, grad, state, constants)
    t = (state.step + 1).double()
    denominator = root / (1 - constants.beta2**t).sqrt() + constants.eps
    change = lr / (1 - constants.beta1**t) * exp_avg / denominator
    if isinstance(constants, AdamWConstants):
        change = change + lr * constants.weight_decay * stored[rows].to(change.dtype)
    subtract_(stored, rows, change, rounding)
    replay.advance_(lr, state, constants)
    state.last[rows] = state.step.to(state.last.dtype)


def lazy_adam(
    rows: Tensor,
    grad: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: LazyAdamState,
    constants: LazyAdamConstants,
    rounding: Rounding | None,
) -> None:
    """``torch.optim.SparseAdam``: a row moves, and its averages decay, only when a gradient reaches it."""
    state.step.add_(1)
    exp_avg, root = _averaged(rows, grad, state, constants)
    t = state.step.double()
    rate = lr * (1 - constants.beta2**t).sqrt() / (1 - constants.beta1**t)
    subtract_(stored, rows, rate * exp_avg / (root + constants.eps), rounding)


RULES: dict[str, Callable[..., None]] = {
    "sgd": sgd,
    "momentum_sgd": momentum_sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "amsgrad": adam,
    "adamw": adam,
    "lazy_adam": lazy_adam,
    "lazy_amsgrad": lazy_adam,
}


def _averaged(
    rows: Tensor,
    grad: Tensor,
    state: AdamState | AdamWState | LazyAdamState,
    constants: AdamConstants | AdamWConstants | LazyAdamConstants,
) -> tuple[Tensor, Tensor]:
    """Update the averages with ``grad``; returns the first, and the root of the second or of its maximum."""
    exp_avg = state.exp_avg[rows].lerp(grad, 1 - constants.beta1)
    exp_avg_sq = state.exp_avg_sq[rows] * constants.beta2 + grad * grad * (1 - constants.beta2)
    state.exp_avg[rows], state.exp_avg_sq[rows] = exp_avg, exp_avg_sq
    if state.max_exp_avg_sq is not None:
        exp_avg_sq = torch.maximum(state.max_exp_avg_sq[rows], exp_avg_sq)
        state.max_exp_avg_sq[rows] = exp_avg_sq
    return exp_avg, exp_avg_sq.sqrt()

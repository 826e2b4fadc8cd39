"""Steps of optimizers on a CPU."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from ..layout import PITCH, Layout
from ..rows import IdBatch, accumulator
from ..state import (
    AdagradState,
    AdamState,
    RowWiseAdagradState,
    SGDState,
    State,
    StepOptions,
)
from . import gradients, replay, rules
from .areas import Areas, area_bytes
from .launch import KINDS, kernel_input
from .launch_gradients import Apply, sum_by_row
from .launch_replay import averages_of, checked_rows, history_of, missed_rounding, state_fits
from .rounding import rounding_by
from .rules import AdamFactors, GradientOptions
from .scratch import Scratch
from .threads import run_tasks, threads_for

SUM_KINDS = {**KINDS, torch.uint8: np.uint8(0)}  # of Adagrad's sums
_ONE_AREA = torch.zeros(1, dtype=torch.int64, device="cpu")  # its slot, and where it starts


class KernelStep(NamedTuple):
    """One step of a rule."""

    apply: Apply
    finish: Callable[[], None]  # after all rows


def update_(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    lr: Tensor,
    state: State,
    layout: Layout,
    **options: Unpack[StepOptions],
) -> None:
    """``ops.rules.update_``."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None or not state_fits(stored, state):
        return NotImplemented
    step = _step(stored, float(lr), state, options)
    # Here a row of a table that is several rows of ``stored`` is looked at as a whole, so its slots come together.
    by_table_row = isinstance(state, RowWiseAdagradState) or options.get("loss_scale") is not None
    all_at_once = by_table_row and int(layout.parts[..., PITCH].max()) > 1
    sum_by_row(grad, stored, inputs, layout, step.apply, all_at_once)
    step.finish()
    return None


def rows_update_(
    rows: Tensor,
    values: Tensor,
    stored: Tensor,
    lr: Tensor,
    state: State,
    *,
    extents: Tensor | None = None,
    **options: Unpack[StepOptions],
) -> None:
    """``ops.rules.rows_update_``."""
    if stored.dtype not in KINDS or not state_fits(stored, state):
        return NotImplemented
    if extents is None and isinstance(state, RowWiseAdagradState):
        extents = state.extents
    if extents is not None and int(extents[:, 1].max()) > 1:
        return NotImplemented  # the rows of ``stored`` that make up a row of a table need not come together
    rows = checked_rows(rows, stored)
    values = values.reshape(-1, stored.shape[1]).to(accumulator(stored)).contiguous()
    step = _step(stored, float(lr), state, options)
    n, (num_rows, width) = len(rows), stored.shape
    fixed = (KINDS[stored.dtype], rows.data_ptr(), values.data_ptr(), n, num_rows)
    num_bytes = area_bytes([n], width, values.itemsize)

    def update_share(share: int, shares: int) -> None:
        scratch = Scratch(num_bytes)
        areas = tuple(Areas(scratch.address, 1, 1, width, 0, 0, _ONE_AREA.data_ptr(), _ONE_AREA.data_ptr()))
        gradients.sum_rows(*fixed, areas, share, shares)
        step.apply(areas)

    with threads_for("rows", n * width) as threads:
        run_tasks(lambda: update_share, [(share, threads) for share in range(threads)], threads)
    step.finish()
    return None


def _step(stored: Tensor, lr: float, state: State, options: StepOptions) -> KernelStep:
    kind, address = KINDS[stored.dtype], stored.data_ptr()
    constants: Any = options["constants"]  # of the rule of ``state``
    loss_scale, clip_value = options.get("loss_scale"), options.get("clip_value")
    scale = 0.0 if loss_scale is None else float(loss_scale)
    gradient_options = tuple(GradientOptions(scale, math.inf if clip_value is None else float(clip_value)))
    if isinstance(state, AdamState):
        return _adam_step(stored, lr, state, constants, gradient_options, options.get("rounding_seed"))
    step = int(state.step)
    finish = partial(rules.count_step, state.step.data_ptr())
    rounding = rounding_by(options.get("rounding_seed"), step)
    if isinstance(state, SGDState):
        return KernelStep(lambda areas: rules.sgd(kind, areas, gradient_options, address, lr, rounding), finish)
    assert isinstance(state, AdagradState | RowWiseAdagradState)
    rate = lr / (1 + step * constants.lr_decay)
    fixed = (address, state.sum.data_ptr(), rate, constants.eps, rounding)
    if isinstance(state, RowWiseAdagradState):
        return KernelStep(lambda areas: rules.rowwise_adagrad(kind, areas, gradient_options, *fixed), finish)
    sum_kind = SUM_KINDS[state.sum.dtype]
    return KernelStep(lambda areas: rules.adagrad(kind, areas, gradient_options, sum_kind, *fixed), finish)


def _adam_step(
    stored: Tensor,
    lr: float,
    state: AdamState,
    constants: Any,
    gradient_options: tuple[float, ...],
    seed: int | None,
) -> KernelStep:
    kind, address, (num_rows, width) = KINDS[stored.dtype], stored.data_ptr(), stored.shape
    t, averages = int(state.step) + 1, averages_of(state)
    beta1, beta2, eps = constants.beta1, constants.beta2, constants.eps
    rate, divisor = lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
    lagging = (history_of(state), tuple(constants))
    roundings = (rounding_by(seed, t - 1), missed_rounding(seed, state))
    factors = tuple(AdamFactors(1 - beta1, beta2, 1 - beta2, rate, divisor, eps))
    fixed = (gradient_options, address, averages, factors, *lagging, *roundings)

    def finish() -> None:
        # A few rows in turn, so that none lags behind further than ``lrs`` remembers (see ``ops.replay``).
        count = -(-2 * num_rows // len(state.lrs))
        turn = (roundings[1], (t - 1) * count, t * count, 0, 1)
        replay.catch_up_rows(kind, address, width, num_rows, 0, averages, *lagging, *turn)
        replay.advance(state.step.data_ptr(), lr, *lagging, state.max_exp_avg_sq is not None)

    return KernelStep(lambda areas: rules.adam(kind, areas, *fixed), finish)

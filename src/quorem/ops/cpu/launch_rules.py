"""Steps of optimizers on a CPU, and the steps that rows missed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from ..state import (
    RULES,
    AdagradState,
    AdamState,
    CatchUpOptions,
    RowWiseAdagradState,
    SGDState,
    State,
    StepOptions,
)
from . import gradients, replay, rules
from .areas import Areas, area_bytes
from .launch import KINDS, kernel_input
from .launch_gradients import Apply, sum_by_row
from .pages import Scratch
from .replay import Averages, History
from .rounding import rounding_by
from .rules import AdamFactors
from .sharing import sharing_of
from .threads import STEP_COST, run_tasks, threads_for
from .vector import columns

SUM_KINDS = {**KINDS, torch.uint8: np.uint8(0)}  # of Adagrad's sums
_ONE_AREA = torch.zeros(1, dtype=torch.int64, device="cpu")  # its slot, and where it starts


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
    if inputs is None or not _fits(stored, state, options):
        return NotImplemented
    apply, finish = _step(stored, float(lr), state, options)
    sum_by_row(grad, stored, inputs, layout, apply)
    finish()
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
    if not _fits(stored, state, options):
        return NotImplemented
    if extents is None and isinstance(state, RowWiseAdagradState):
        extents = state.extents
    if extents is not None and int(extents[:, 1].max()) > 1:
        return NotImplemented  # the rows of ``stored`` that make up a row of a table need not come together
    rows = _checked_rows(rows, stored)
    values = values.reshape(-1, stored.shape[1]).to(accumulator(stored)).contiguous()
    apply, finish = _step(stored, float(lr), state, options)
    n, (num_rows, width) = len(rows), stored.shape
    fixed = (KINDS[stored.dtype], columns(width), rows.data_ptr(), values.data_ptr(), n, num_rows)
    num_bytes = area_bytes([n], width, values.itemsize)

    def update_share(share: int, shares: int) -> None:
        scratch = Scratch(num_bytes)
        areas = tuple(Areas(scratch.address, 1, 1, 0, 0, _ONE_AREA.data_ptr(), _ONE_AREA.data_ptr()))
        gradients.sum_rows(*fixed, areas, share, shares)
        apply(areas)

    threads = threads_for(STEP_COST * n * width)
    run_tasks(update_share, [(share, threads) for share in range(threads)], threads)
    finish()
    return None


def catch_up_(
    batch: IdBatch, stored: Tensor, state: AdamState, layout: Layout, **options: Unpack[CatchUpOptions]
) -> None:
    """``ops.replay.catch_up_``."""
    inputs = kernel_input(IdBatch(batch.ids, batch.offsets), stored, layout)
    if inputs is None or not _fits(stored, state, options):
        return NotImplemented
    slots, partitions, _ = layout.parts.shape
    run = partial(replay.catch_up_slots, inputs.kind, inputs.width, inputs.source, *_lagging(state, options))
    threads = threads_for(inputs.longest * slots * partitions * stored.shape[1])
    if threads > 1 and sharing_of(layout).largest_group > 1:  # no two threads may move the same row
        shares, step = 2 * threads, slots
    else:
        shares = -(-2 * threads // slots) if threads > 1 else 1
        step = slots if threads == 1 else max(1, slots // (4 * threads))
    ranges = [(first, min(first + step, slots)) for first in range(0, slots, step)]
    tasks = [(first, last, share, shares) for first, last in ranges for share in range(shares)]
    run_tasks(run, tasks, threads)
    return None


def rows_catch_up_(rows: Tensor | None, stored: Tensor, state: AdamState, **options: Unpack[CatchUpOptions]) -> None:
    """``ops.replay.rows_catch_up_``."""
    if not _fits(stored, state, options):
        return NotImplemented
    num_rows, width = stored.shape
    rows = None if rows is None else _checked_rows(rows, stored)
    address = 0 if rows is None else rows.data_ptr()
    fixed = (KINDS[stored.dtype], columns(width), stored.data_ptr(), num_rows, address)
    run = partial(replay.catch_up_rows, *fixed, *_lagging(state, options))
    threads = threads_for(STEP_COST * (stored.numel() if rows is None else len(rows) * width))
    if rows is None:
        step = -(-num_rows // (4 * threads))
        tasks = [(first, min(first + step, num_rows), 0, 1) for first in range(0, num_rows, step)]
    else:
        tasks = [(0, len(rows), share, threads) for share in range(threads)]
    run_tasks(run, tasks, threads)
    return None


def _step(stored: Tensor, lr: float, state: State, options: StepOptions) -> tuple[Apply, Callable[[], Any]]:
    """What a step does to summed gradients, and after all rows."""
    kind, width, address = KINDS[stored.dtype], columns(stored.shape[1]), stored.data_ptr()
    constants: Any = options["constants"]  # of the rule of ``state``
    loss_scale, clip_value = options.get("loss_scale"), options.get("clip_value")
    scale, bound = float(loss_scale or 0), math.inf if clip_value is None else float(clip_value)
    step = int(state.step)
    rounding = rounding_by(options.get("rounding_seed"), step)
    if isinstance(state, AdamState):
        beta1, beta2, t = constants.beta1, constants.beta2, step + 1
        rate, divisor = lr / (1 - beta1**t), math.sqrt(1 - beta2**t)
        factors = tuple(AdamFactors(1 - beta1, beta2, 1 - beta2, rate, divisor, constants.eps))
        *lagging, missed_rounding = _lagging(state, options)
        fixed: tuple[Any, ...] = (address, factors, *lagging, rounding, missed_rounding)
        finish: Callable[[], Any] = partial(_finish_adam, stored, lr, state, options)
    else:
        finish = partial(state.step.add_, 1)
        if isinstance(state, SGDState):
            fixed = (address, lr, rounding)
        else:
            rate = lr / (1 + step * constants.lr_decay)
            fixed = (address, state.sum.data_ptr(), rate, constants.eps, rounding)
            if isinstance(state, AdagradState):
                fixed = (SUM_KINDS[state.sum.dtype], *fixed)
    kernel = getattr(rules, RULES[options["rule"]].kernel)

    def apply(areas: tuple[int, ...]) -> None:
        if scale or bound < math.inf:
            rules.prepare_sums(kind, width, areas, scale, bound)
        kernel(kind, width, areas, *fixed)

    return apply, finish


def _finish_adam(stored: Tensor, lr: float, state: AdamState, options: CatchUpOptions) -> None:
    """Count the step; before, bring a few rows in turn up to date, so that none lags too far (see ``ops.replay``)."""
    (num_rows, width), step = stored.shape, int(state.step)
    averages, *lagging, rounding = _lagging(state, options)
    count = -(-2 * num_rows // len(state.lrs))
    fixed = (KINDS[stored.dtype], columns(width), stored.data_ptr(), num_rows, 0, averages, *lagging, rounding)
    replay.catch_up_rows(*fixed, step * count, (step + 1) * count, 0, 1)
    replay.advance(state.step.data_ptr(), lr, *lagging, state.max_exp_avg_sq is not None)


def _lagging(state: AdamState, options: CatchUpOptions) -> tuple[tuple[float, ...], ...]:
    """Averages, history, constants and rounding of rows that lag behind, as kernels take them."""
    largest = 0 if state.max_exp_avg_sq is None else state.max_exp_avg_sq.data_ptr()
    averages = Averages(state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr(), largest, state.last.data_ptr())
    step, seed = int(state.step), options.get("rounding_seed")
    history = History(step, state.lrs.data_ptr(), len(state.lrs), state.moments.data_ptr() if len(state.moments) else 0)
    rounding = rounding_by(None if seed is None else ~seed, step)  # other bits than the step's own
    return tuple(averages), tuple(history), tuple(options["constants"]), rounding


def _fits(stored: Tensor, state: State, options: CatchUpOptions) -> bool:
    """Whether there are kernels for the rule, and they can change ``stored`` and ``state`` in place."""
    rule = RULES[options["rule"]]
    if not rule.fused or stored.dtype not in KINDS or not stored.is_contiguous():
        return False
    shape = stored.shape[:1] if rule.by_row else stored.shape
    averages = [getattr(state, name) for name in rule.averages]
    return all(average.shape == shape and average.is_contiguous() for average in averages)


def _checked_rows(rows: Tensor, stored: Tensor) -> Tensor:
    """``rows`` ``[N]`` as the kernels take them, or IndexError."""
    rows = rows.flatten().long().contiguous()
    if len(rows) and int(rows.max()) >= len(stored):
        raise IndexError(f"rows ({int(rows.max())}) must be below the number of rows ({len(stored)})")
    return rows

"""Steps of optimizers, and catching up with missed steps, on a CPU."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..layout import PITCH, Layout
from ..rows import accumulator
from ..state import (
    MOMENT_COLUMNS,
    AdagradState,
    AdamConstants,
    AdamState,
    AdamWState,
    Constants,
    LazyAdamConstants,
    LazyAdamState,
    MomentumSGDState,
    RowWiseAdagradState,
    SGDState,
    State,
    StepOptions,
)
from . import gradients, replay, rules
from .gradients import Areas
from .launch import KINDS, IdBatch, bag_batch, lookup_batch, sum_by_row
from .replay import Averages, History
from .rounding import NEAREST, rounding_by
from .rules import AdamFactors, GradientOptions
from .scratch import Scratch
from .sharing import sharing_of
from .threads import run_tasks, threads_for

_DTYPES = {  # of state tensors; the others have the accumulator's
    "last": torch.int32,
    "step": torch.int64,
    "lrs": torch.float64,
    "moments": torch.float64,
    "extents": torch.int64,
}
Numbers = tuple[float, ...]
Addresses = tuple[int, ...]


class Step(NamedTuple):
    """One step of a rule."""

    apply: Callable[[Addresses, int], None]  # to areas of summed gradients, given with their number
    finish: Callable[[], None]  # after all rows


def lookup_update_(
    grad: Tensor, ids: Tensor, stored: Tensor, lr: Tensor, state: State, layout: Layout, **options: Unpack[StepOptions]
) -> None:
    """``ops.rules.lookup_update_``."""
    return _update(grad, lookup_batch(ids, stored, layout, grad), stored, lr, state, layout, **options)


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
    """``ops.rules.bag_update_``."""
    batch = bag_batch(ids, offsets, sample_weights, stored, layout, mean, grad)
    return _update(grad, batch, stored, lr, state, layout, **options)


def _update(
    grad: Tensor,
    batch: IdBatch | None,
    stored: Tensor,
    lr: Tensor,
    state: State,
    layout: Layout,
    *,
    rule: str,
    constants: Constants,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
    rounding_seed: int | None = None,
) -> None:
    if batch is None or not _fits(stored, state, rounding_seed):
        return NotImplemented
    step = _step(stored, lr, state, constants, _options(clip_value, loss_scale), rounding_seed)
    # Here a row of a table that is several rows of ``stored`` is looked at as a whole, so its slots come together.
    by_table_row = isinstance(state, RowWiseAdagradState) or loss_scale is not None
    all_at_once = by_table_row and int(layout.parts[..., PITCH].max()) > 1
    sum_by_row(grad, stored, batch, layout, step.apply, all_at_once)
    step.finish()
    return None


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
    """``ops.rules.rows_update_``."""
    if stored.dtype not in KINDS or not _fits(stored, state, rounding_seed):
        return NotImplemented
    if extents is None and isinstance(state, RowWiseAdagradState):
        extents = state.extents
    if extents is not None and int(extents[:, 1].max()) > 1:
        return NotImplemented  # the rows of ``stored`` that make up a row of a table need not come together
    rows = _checked(rows, stored)
    values = values.reshape(-1, stored.shape[1]).to(accumulator(stored)).contiguous()
    step = _step(stored, lr, state, constants, _options(clip_value, loss_scale), rounding_seed)
    n, (num_rows, width) = len(rows), stored.shape
    fixed = (KINDS[stored.dtype], rows.data_ptr(), values.data_ptr(), n, num_rows)
    num_bytes = gradients.area_bytes([n], width, values.itemsize)

    def update_share(share: int, shares: int) -> None:
        scratch = Scratch(num_bytes)
        areas = tuple(Areas(scratch.address, 0, 1, 1, width, 0))
        gradients.sum_rows(*fixed, areas, share, shares)
        step.apply(areas, 0)

    with threads_for("rows", n * width) as threads:
        run_tasks(lambda: update_share, [(share, threads) for share in range(threads)], threads)
    step.finish()
    return None


def lookup_catch_up_(
    ids: Tensor,
    stored: Tensor,
    state: AdamState,
    layout: Layout,
    *,
    rule: str,
    constants: AdamConstants,
    rounding_seed: int | None = None,
) -> None:
    """``ops.replay.lookup_catch_up_``."""
    return _catch_up(lookup_batch(ids, stored, layout), stored, state, layout, constants, rounding_seed)


def bag_catch_up_(
    ids: Tensor,
    offsets: Tensor,
    stored: Tensor,
    state: AdamState,
    layout: Layout,
    *,
    rule: str,
    constants: AdamConstants,
    rounding_seed: int | None = None,
) -> None:
    """``ops.replay.bag_catch_up_``."""
    batch = bag_batch(ids, offsets, None, stored, layout, False)
    return _catch_up(batch, stored, state, layout, constants, rounding_seed)


def _catch_up(
    batch: IdBatch | None,
    stored: Tensor,
    state: AdamState,
    layout: Layout,
    constants: AdamConstants,
    rounding_seed: int | None,
) -> None:
    if batch is None or not _fits(stored, state, rounding_seed):
        return NotImplemented
    slots, partitions, _ = layout.parts.shape
    lagging = (_averages(state), _history(state), tuple(constants), _missed_rounding(rounding_seed, state))
    fixed = (KINDS[stored.dtype], batch.source, *lagging)
    with threads_for("catch up", batch.longest * slots * partitions * stored.shape[1] // 4) as threads:
        if threads > 1 and sharing_of(layout) is not None:  # no two threads may move the same row
            shares, step = 2 * threads, slots
        else:
            shares = -(-2 * threads // slots) if threads > 1 and slots < 2 * threads else 1
            step = slots if threads == 1 else max(1, slots // (4 * threads))
        ranges = [(first, min(first + step, slots)) for first in range(0, slots, step)]
        tasks = [(first, last, share, shares) for first, last in ranges for share in range(shares)]
        run_tasks(lambda: partial(replay.catch_up_slots, *fixed), tasks, threads)
    return None


def rows_catch_up_(
    rows: Tensor | None,
    stored: Tensor,
    state: AdamState,
    *,
    rule: str,
    constants: AdamConstants,
    rounding_seed: int | None = None,
) -> None:
    """``ops.replay.rows_catch_up_``."""
    if stored.dtype not in KINDS or not _fits(stored, state, rounding_seed):
        return NotImplemented
    num_rows, width = stored.shape
    rows = None if rows is None else _checked(rows, stored)
    rows_address = 0 if rows is None else rows.data_ptr()
    fixed = (KINDS[stored.dtype], stored.data_ptr(), width, num_rows, rows_address)
    lagging = (_averages(state), _history(state), tuple(constants), _missed_rounding(rounding_seed, state))
    run = partial(replay.catch_up_rows, *fixed, *lagging)
    with threads_for("catch up rows", stored.numel() if rows is None else len(rows) * width) as threads:
        if rows is None:
            step = -(-num_rows // (4 * threads))
            tasks = [(first, min(first + step, num_rows), 0, 1) for first in range(0, num_rows, step)]
        else:
            tasks = [(0, len(rows), share, threads) for share in range(threads)]
        run_tasks(lambda: run, tasks, threads)
    return None


def _missed_rounding(seed: int | None, state: AdamState) -> Addresses:
    """How the missed steps of a row are rounded: with other bits than the step's own."""
    return NEAREST if seed is None else rounding_by(~seed, int(state.step))


def _step(stored: Tensor, lr: Tensor, state: State, constants: Any, options: Numbers, seed: int | None) -> Step:
    kind, address, rate = KINDS[stored.dtype], stored.data_ptr(), float(lr)
    if isinstance(state, AdamState):
        return _adam_step(stored, rate, state, constants, options, seed)
    if isinstance(state, LazyAdamState):
        return _lazy_adam_step(stored, rate, state, constants, options, seed)
    finish = partial(rules.count_step, state.step.data_ptr())
    rounding = NEAREST if seed is None else rounding_by(seed, int(state.step))
    if isinstance(state, SGDState):
        return Step(lambda areas, unit: rules.sgd(kind, areas, options, address, rate, rounding), finish)
    assert isinstance(state, AdagradState | RowWiseAdagradState)
    rate /= 1 + int(state.step) * constants.lr_decay
    fixed = (options, address, state.sum.data_ptr(), rate, constants.eps, rounding)
    if isinstance(state, AdagradState):
        return Step(lambda areas, unit: rules.adagrad(kind, areas, *fixed), finish)
    return Step(lambda areas, unit: rules.rowwise_adagrad(kind, areas, *fixed), finish)


def _adam_step(
    stored: Tensor, lr: float, state: AdamState, constants: AdamConstants, options: Numbers, seed: int | None
) -> Step:
    kind, address, (num_rows, width) = KINDS[stored.dtype], stored.data_ptr(), stored.shape
    averages, history = _averages(state), _history(state)
    t = int(state.step) + 1
    rate, divisor = lr / (1 - constants.beta1**t), math.sqrt(1 - constants.beta2**t)
    rounding = NEAREST if seed is None else rounding_by(seed, t - 1)
    lagging = (history, tuple(constants))
    missed_rounding = _missed_rounding(seed, state)
    factors = _factors(constants, rate, divisor)
    fixed = (options, address, averages, factors, *lagging, rounding, missed_rounding)

    def finish() -> None:
        # A few rows in turn, so that none lags behind further than ``lrs`` remembers (see ``ops.replay``).
        count = -(-2 * num_rows // len(state.lrs))
        turn = (missed_rounding, (t - 1) * count, t * count, 0, 1)
        replay.catch_up_rows(kind, address, width, num_rows, 0, averages, *lagging, *turn)
        replay.advance(state.step.data_ptr(), lr, history, tuple(constants), state.max_exp_avg_sq is not None)

    return Step(lambda areas, unit: rules.adam(kind, areas, *fixed), finish)


def _lazy_adam_step(
    stored: Tensor,
    lr: float,
    state: LazyAdamState,
    constants: LazyAdamConstants,
    options: Numbers,
    seed: int | None,
) -> Step:
    t = int(state.step) + 1
    rate = lr / (1 - constants.beta1**t) * math.sqrt(1 - constants.beta2**t)  # eps is added before this correction
    no_history, no_constants = tuple(History(0, 0, 1, 0)), (0.0,) * len(AdamConstants._fields)
    roundings = (NEAREST if seed is None else rounding_by(seed, t), NEAREST)
    averages, factors = _averages(state), _factors(constants, rate, 1.0)
    fixed = (options, stored.data_ptr(), averages, factors, no_history, no_constants, *roundings)
    kind, finish = KINDS[stored.dtype], partial(rules.count_step, state.step.data_ptr())
    return Step(lambda areas, unit: rules.adam(kind, areas, *fixed), finish)


def _factors(constants: AdamConstants | LazyAdamConstants, rate: float, divisor: float) -> Numbers:
    beta1, beta2, eps = constants.beta1, constants.beta2, constants.eps
    return tuple(AdamFactors(1 - beta1, beta2, 1 - beta2, rate, divisor, eps))


def _options(clip_value: float | None, loss_scale: Tensor | None) -> Numbers:
    clip = math.inf if clip_value is None else float(clip_value)
    return tuple(GradientOptions(0.0 if loss_scale is None else float(loss_scale), clip))


def _averages(state: AdamState | LazyAdamState) -> Addresses:
    largest = 0 if state.max_exp_avg_sq is None else state.max_exp_avg_sq.data_ptr()
    last = state.last.data_ptr() if isinstance(state, AdamState) else 0
    return tuple(Averages(state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr(), largest, last))


def _history(state: AdamState) -> Addresses:
    moments = state.moments.data_ptr() if len(state.moments) else 0
    return tuple(History(int(state.step), state.lrs.data_ptr(), len(state.lrs), moments))


def _fits(stored: Tensor, state: State, rounding_seed: int | None) -> bool:
    """Whether kernels can change ``stored`` and ``state`` in place: memory, dtypes and shapes are as expected."""
    if rounding_seed is not None and stored.dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(state, MomentumSGDState | AdamWState):
        return False
    rows, number = stored.shape[:1], accumulator(stored)
    for name, tensor in zip(state._fields, state, strict=True):
        if tensor is None:
            continue
        if tensor.dtype != _DTYPES.get(name, number) or not tensor.is_contiguous():
            return False
        by_row = name == "last" or (name == "sum" and isinstance(state, RowWiseAdagradState))
        if (by_row or name not in _DTYPES) and tensor.shape != (rows if by_row else stored.shape):
            return False
    if isinstance(state, AdamState) and state.moments.shape not in [(n, MOMENT_COLUMNS) for n in (0, len(state.lrs))]:
        return False
    return stored.is_contiguous()


def _checked(rows: Tensor, stored: Tensor) -> Tensor:
    """``rows`` ``[N]`` as the kernels take them, or IndexError."""
    rows = rows.flatten().long().contiguous()
    if len(rows) and int(rows.max()) >= len(stored):
        raise IndexError(f"rows ({int(rows.max())}) must be below the number of rows ({len(stored)})")
    return rows

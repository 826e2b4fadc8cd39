"""Rules of optimizers on the summed gradients of a unit (see ``sums``), in place: ``ops.rules``, compiled."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from ..pieces import Gradient
from ..rows import IdBatch, accumulator
from ..state import AdagradState, AdamConstants, AdamState, RowRule, RowWiseAdagradState
from .compiled import inner, kernel
from .gradients import Apply, sharing_of, sum_by_row
from .launch import KINDS, fits, kernel_input, rows_as_ids
from .replay import AdamRows, advance_, catch_up_row, lagging
from .rounding import NO_ROUNDING, Rounding, load_sum, rounding_by, store_rounded, store_sum
from .sums import Unit, place_at
from .vector import (
    INT32,
    INT64,
    choose,
    columns,
    item,
    load,
    over_columns,
    prefetch,
    put,
    reserve,
    size_of,
    sqrt,
    store,
    times,
    total,
    wide,
)

AHEAD = 32  # how many rows ahead state is prefetched
SUM_KINDS = {**KINDS, torch.uint8: np.uint8(0)}  # of Adagrad's sums


def _over_rows(update_row: Callable[..., None]) -> Any:
    """Compile ``update_row(kind, W, r, ahead, grad, *rest)`` into ``loop(kind, W, unit, *rest)`` over all rows.

    ``r`` is a row, ``grad`` the address of its gradient, and ``ahead`` a row that follows soon.
    """
    update_row = inner(update_row)

    @inner
    def loop(kind, W, unit, *rest):
        for p in range(unit.first, unit.first + unit.num_places):
            place = place_at(unit, p)
            for u in range(place.count):
                ahead = item(INT64, place.distinct, min(u + AHEAD, place.count - 1))
                for i in range(place.units):
                    grad = place.sums + (u * place.units + i) * W * size_of(wide(kind))
                    update_row(kind, W, item(INT64, place.distinct, u) + i, ahead + i, grad, *rest)

    return loop


@over_columns
def _subtract(zero, j, kind, W, stored, start, grad, lr, rounding):
    change = lr * load(wide(kind), zero, grad, j)
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _sgd(kind, W, r, ahead, grad, stored, lr, rounding):
    _subtract(kind, W, stored, r * W, grad, lr, rounding)


@kernel
def sgd(kind, W, unit, stored, lr, rounding):
    """``rules.sgd``."""
    _sgd(kind, W, Unit(*unit), stored, lr, Rounding(*rounding))


@over_columns
def _adagrad_columns(zero, j, kind, W, sum_kind, stored, start, squares, grad, lr, eps, rounding):
    g = load(wide(kind), zero, grad, j)
    h = load_sum(sum_kind, zero, squares, start + j) + g * g
    store_sum(sum_kind, squares, start + j, h, rounding)
    change = lr * g / (sqrt(h) + eps)
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _adagrad(kind, W, r, ahead, grad, sum_kind, stored, squares, lr, eps, rounding):
    prefetch(squares + ahead * W * size_of(sum_kind))
    prefetch(stored + ahead * W * size_of(kind))
    _adagrad_columns(kind, W, sum_kind, stored, r * W, squares, grad, lr, eps, rounding)


@kernel
def adagrad(kind, W, unit, sum_kind, stored, squares, lr, eps, rounding):
    """``rules.adagrad``."""
    _adagrad(kind, W, Unit(*unit), sum_kind, stored, squares, lr, eps, Rounding(*rounding))


@over_columns
def _add_square(zero, j, kind, W, sum_, grad):
    g = load(wide(kind), zero, grad, j)
    put(wide(kind), sum_, 0, item(wide(kind), sum_, 0) + total(g * g))


@kernel
def rowwise_adagrad(kind, W, unit, stored, squares, lr, eps, rounding):
    """``rules.rowwise_adagrad``, where the rows of a table are summed as one (``Sharing.sums_whole_rows``)."""
    unit, rounding, float_kind, square = Unit(*unit), Rounding(*rounding), wide(kind), reserve(8)
    for p in range(unit.first, unit.first + unit.num_places):
        place, size = place_at(unit, p), W * size_of(float_kind)
        width = times(W, place.units)
        for u in range(place.count):
            ahead = item(INT64, place.distinct, min(u + AHEAD, place.count - 1))
            prefetch(squares + ahead * size_of(float_kind))
            prefetch(stored + ahead * W * size_of(kind))
            first, grad = item(INT64, place.distinct, u), place.sums + u * place.units * size
            put(float_kind, square, 0, 0)
            _add_square(kind, width, square, grad)
            for i in range(place.units):
                r = first + i
                h = item(float_kind, squares, r) + item(float_kind, square, 0) / width
                put(float_kind, squares, r, h)
                _subtract(kind, W, stored, r * W, grad + i * size, lr / (math.sqrt(h) + eps), rounding)


@over_columns
def _adam_columns(zero, j, kind, W, stored, start, state, grad, lr, divisor, constants, rounding):
    float_kind = wide(kind)
    g = load(float_kind, zero, grad, j)
    m = load(float_kind, zero, state.exp_avg, start + j)
    m = m + (1 - constants.beta1) * (g - m)
    v = load(float_kind, zero, state.exp_avg_sq, start + j) * constants.beta2 + g * g * (1 - constants.beta2)
    store(float_kind, state.exp_avg, start + j, m)
    store(float_kind, state.exp_avg_sq, start + j, v)
    if state.max_exp_avg_sq:
        largest = load(float_kind, zero, state.max_exp_avg_sq, start + j)
        v = choose(largest != largest, largest, choose(largest > v, largest, v))  # NaN where either is
        store(float_kind, state.max_exp_avg_sq, start + j, v)
    change = lr * m / (sqrt(v) / divisor + constants.eps)
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _adam(kind, W, r, ahead, grad, stored, lr, divisor, state, constants, rounding, missed_rounding):
    size = W * size_of(wide(kind))
    prefetch(state.exp_avg + ahead * size)
    prefetch(state.exp_avg_sq + ahead * size)
    if state.max_exp_avg_sq:
        prefetch(state.max_exp_avg_sq + ahead * size)
    prefetch(state.last + ahead * 4)
    catch_up_row(kind, W, stored, r, state, constants, missed_rounding)
    put(INT32, state.last, r, state.step + 1)
    _adam_columns(kind, W, stored, r * W, state, grad, lr, divisor, constants, rounding)


@kernel
def adam(kind, W, unit, stored, lr, state, constants, rounding, missed_rounding):
    """``rules.adam``; the learning rate and the root of exp_avg_sq are corrected for the bias of the state."""
    state, constants = AdamRows(*state), AdamConstants(*constants)
    rounding, missed_rounding, t = Rounding(*rounding), Rounding(*missed_rounding), state.step + 1
    rate, divisor = lr / (1 - constants.beta1**t), math.sqrt(1 - constants.beta2**t)
    _adam(kind, W, Unit(*unit), stored, rate, divisor, state, constants, rounding, missed_rounding)


STEPS = {step.__name__: step for step in (sgd, adagrad, rowwise_adagrad, adam)}


def update_(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> None:
    """``ops.rules.update_``."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None or not fits(stored, rule) or (rule.entry.by_row and not sharing_of(layout).sums_whole_rows):
        return NotImplemented
    sum_by_row(grad, stored, inputs, layout, _step_on(stored, rule))
    if rule.entry.lags:
        advance_(stored, rule)
    else:
        rule.state.step.add_(1)
    return None


def rows_update_(rows: Tensor, values: Tensor, stored: Tensor, rule: RowRule) -> None:
    """``ops.rules.rows_update_``."""
    if rule.entry.by_row and int(rule.state.extents[:, 1].max()) > 1:  # a row of a table is several of ``stored``
        return NotImplemented
    values = values.reshape(-1, 1, stored.shape[1]).to(accumulator(stored))
    batch, layout = rows_as_ids(rows, stored)
    return update_(values, batch, stored, layout, rule)


def _step_on(stored: Tensor, rule: RowRule) -> Apply:
    """What a step does to summed gradients."""
    state, lr, step = rule.state, float(rule.lr), int(rule.state.step)
    rounding = NO_ROUNDING if rule.rounding_seed is None else rounding_by(rule.rounding_seed, step)
    fixed: tuple[Any, ...]
    if isinstance(state, AdamState):
        *rows, missed_rounding = lagging(rule)
        fixed = (stored.data_ptr(), lr, *rows, rounding, missed_rounding)
    elif isinstance(state, AdagradState | RowWiseAdagradState):
        rate = lr / (1 + step * rule.constants.lr_decay)
        fixed = (stored.data_ptr(), state.sum.data_ptr(), rate, rule.constants.eps, rounding)
        if isinstance(state, AdagradState):
            fixed = (SUM_KINDS[state.sum.dtype], *fixed)
    else:
        fixed = (stored.data_ptr(), lr, rounding)
    kernel, kind, width = STEPS[rule.entry.kernel], KINDS[stored.dtype], columns(stored.shape[1])
    return lambda unit: kernel(kind, width, unit, *fixed)

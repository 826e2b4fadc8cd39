"""Rules of optimizers on the summed gradients in ``Areas`` (see ``gradients``), in place: ``ops.rules``, compiled."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..state import AdamConstants
from .areas import COUNT, DISTINCT, SUMS, Areas, area_of, header, pitch_of
from .compiled import inner, kernel
from .memory import INT32, INT64, item, prefetch, put, reserve, size_of
from .replay import Averages, History, catch_up_row
from .rounding import Rounding, load_sum, store_rounded, store_sum
from .vector import accumulator, load, maximum, over_columns, splat, sqrt, store, total

AHEAD = 32  # how many rows ahead state is prefetched


class AdamFactors(NamedTuple):
    """The numbers of one Adam step."""

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float  # corrected for the bias of exp_avg
    divisor: float  # of the root of exp_avg_sq
    eps: float


@kernel
def prepare_sums(kind, W, areas, loss_scale, clip_value):
    """Divide all sums by the loss scale and clip them. A row of a table whose gradient is not finite gets zeros.

    There is no loss scale if it is 0, and no clipping if ``clip_value`` is infinite.
    """
    areas = Areas(*areas)
    K, float_kind = areas.num_partitions, accumulator(kind)
    for k in range(K):
        a = 0
        while a < areas.count:
            pitch = pitch_of(areas, a, k)
            for u in range(header(area_of(areas, a), K, COUNT, k)):
                finite = True
                for unit in range(pitch if loss_scale != 0 else 0):
                    grad = header(area_of(areas, a + unit), K, SUMS, k) + u * W * size_of(float_kind)
                    for j in range(W):
                        put(float_kind, grad, j, item(float_kind, grad, j) / loss_scale)
                        finite &= math.isfinite(item(float_kind, grad, j))
                for unit in range(pitch):
                    grad = header(area_of(areas, a + unit), K, SUMS, k) + u * W * size_of(float_kind)
                    for j in range(W):
                        g = item(float_kind, grad, j)
                        g = clip_value if g > clip_value else g
                        g = -clip_value if g < -clip_value else g
                        put(float_kind, grad, j, g if finite else 0.0)
            a += pitch


def _over_rows(update_row: Callable[..., None]) -> Any:
    """Compile ``update_row(kind, W, r, ahead, grad, *rest)`` into ``loop(kind, W, areas, *rest)`` over all rows.

    ``r`` is a row, ``grad`` the address of its gradient, and ``ahead`` a row that follows soon.
    """
    update_row = inner(update_row)

    @inner
    def loop(kind, W, areas, *rest):
        K = areas.num_partitions
        for a in range(areas.count):
            area = area_of(areas, a)
            for k in range(K):
                distinct, count = header(area, K, DISTINCT, k), header(area, K, COUNT, k)
                sums = header(area, K, SUMS, k)
                for u in range(count):
                    ahead = item(INT64, distinct, min(u + AHEAD, count - 1))
                    grad = sums + u * W * size_of(accumulator(kind))
                    update_row(kind, W, item(INT64, distinct, u), ahead, grad, *rest)

    return loop


@over_columns
def _subtract(zero, j, kind, W, stored, start, grad, lr, rounding):
    change = splat(zero, lr) * load(accumulator(kind), zero, grad, j)
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _sgd(kind, W, r, ahead, grad, stored, lr, rounding):
    _subtract(kind, W, stored, r * W, grad, lr, rounding)


@kernel
def sgd(kind, W, areas, stored, lr, rounding):
    """``rules.sgd``."""
    _sgd(kind, W, Areas(*areas), stored, lr, Rounding(*rounding))


@over_columns
def _adagrad_columns(zero, j, kind, W, sum_kind, stored, start, squares, grad, lr, eps, rounding):
    g = load(accumulator(kind), zero, grad, j)
    h = load_sum(sum_kind, zero, squares, start + j) + g * g
    store_sum(sum_kind, squares, start + j, h, rounding)
    change = splat(zero, lr) * g / (sqrt(h) + splat(zero, eps))
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _adagrad(kind, W, r, ahead, grad, sum_kind, stored, squares, lr, eps, rounding):
    prefetch(squares + ahead * W * size_of(sum_kind))
    prefetch(stored + ahead * W * size_of(kind))
    _adagrad_columns(kind, W, sum_kind, stored, r * W, squares, grad, lr, eps, rounding)


@kernel
def adagrad(kind, W, areas, sum_kind, stored, squares, lr, eps, rounding):
    """``rules.adagrad``."""
    _adagrad(kind, W, Areas(*areas), sum_kind, stored, squares, lr, eps, Rounding(*rounding))


@over_columns
def _add_square(zero, j, kind, W, sum_, grad):
    g = load(accumulator(kind), zero, grad, j)
    put(accumulator(kind), sum_, 0, item(accumulator(kind), sum_, 0) + total(g * g))


@kernel
def rowwise_adagrad(kind, W, areas, stored, squares, lr, eps, rounding):
    """``rules.rowwise_adagrad``."""
    areas, rounding = Areas(*areas), Rounding(*rounding)
    K, float_kind, square = areas.num_partitions, accumulator(kind), reserve(8)
    size = W * size_of(float_kind)
    for k in range(K):
        a = 0
        while a < areas.count:
            area, pitch = area_of(areas, a), pitch_of(areas, a, k)
            for u in range(header(area, K, COUNT, k)):
                put(float_kind, square, 0, 0)
                for unit in range(pitch):
                    grad = header(area_of(areas, a + unit), K, SUMS, k) + u * size
                    _add_square(kind, W, square, grad)
                for unit in range(pitch):
                    unit_area = area_of(areas, a + unit)
                    grad = header(unit_area, K, SUMS, k) + u * size
                    r = item(INT64, header(unit_area, K, DISTINCT, k), u)
                    h = item(float_kind, squares, r) + item(float_kind, square, 0) / (pitch * W)
                    put(float_kind, squares, r, h)
                    _subtract(kind, W, stored, r * W, grad, lr / (math.sqrt(h) + eps), rounding)
            a += pitch


@over_columns
def _adam_columns(zero, j, kind, W, stored, start, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, factors, rounding):
    float_kind = accumulator(kind)
    g = load(float_kind, zero, grad, j)
    m = load(float_kind, zero, exp_avg, j)
    m = m + splat(zero, factors.one_minus_beta1) * (g - m)
    v = load(float_kind, zero, exp_avg_sq, j) * splat(zero, factors.beta2) + g * g * splat(
        zero, factors.one_minus_beta2
    )
    store(float_kind, exp_avg, j, m)
    store(float_kind, exp_avg_sq, j, v)
    if max_exp_avg_sq:
        v = maximum(load(float_kind, zero, max_exp_avg_sq, j), v)
        store(float_kind, max_exp_avg_sq, j, v)
    change = splat(zero, factors.lr) * m / (sqrt(v) / splat(zero, factors.divisor) + splat(zero, factors.eps))
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@_over_rows
def _adam(kind, W, r, ahead, grad, stored, factors, averages, history, constants, rounding, missed_rounding):
    size = W * size_of(accumulator(kind))
    exp_avg, exp_avg_sq, max_exp_avg_sq = averages.exp_avg, averages.exp_avg_sq, averages.max_exp_avg_sq
    prefetch(exp_avg + ahead * size)
    prefetch(exp_avg_sq + ahead * size)
    if max_exp_avg_sq:
        prefetch(max_exp_avg_sq + ahead * size)
    prefetch(averages.last + ahead * 4)
    catch_up_row(kind, W, stored, r, averages, history, constants, missed_rounding)
    put(INT32, averages.last, r, history.step + 1)
    first, second = exp_avg + r * size, exp_avg_sq + r * size
    largest = max_exp_avg_sq + r * size if max_exp_avg_sq else 0
    _adam_columns(kind, W, stored, r * W, first, second, largest, grad, factors, rounding)


@kernel
def adam(kind, W, areas, stored, factors, averages, history, constants, rounding, missed_rounding):
    """``rules.adam``."""
    areas, factors = Areas(*areas), AdamFactors(*factors)
    averages, history, constants = Averages(*averages), History(*history), AdamConstants(*constants)
    rounding, missed_rounding = Rounding(*rounding), Rounding(*missed_rounding)
    _adam(kind, W, areas, stored, factors, averages, history, constants, rounding, missed_rounding)

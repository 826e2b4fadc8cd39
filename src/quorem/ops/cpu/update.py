"""Rules of optimizers on the summed gradients in ``areas`` (see ``backward``), in place: ``ops.rules``, compiled.

``clean`` is the loss scale, 0 for none, and the clip value, infinite for none. ``step`` is counted by itself.
"""

import math
from collections.abc import Callable
from typing import Any

from ..layout import PITCH
from .backward import count_of, seen_of, sums_of
from .catch_up import catch_up_row
from .compiled import inner, kernel
from .rows import part_item
from .vector import (
    INT32,
    INT64,
    item,
    load,
    maximum,
    number,
    over_columns,
    prefetch,
    put,
    size_of,
    splat,
    sqrt,
    store,
    total,
)

AHEAD = 8  # rows whose state is asked for before it is used


@inner
def _clean(kind, at, W, clean):
    """Unscale and clip one summed gradient; zeros where it is not finite after unscaling."""
    scale, clip = clean
    numbers = number(kind)
    finite = True
    if scale != 0:
        for j in range(W):
            put(numbers, at, j, item(numbers, at, j) / scale)
            finite &= math.isfinite(item(numbers, at, j))
    if not finite or clip < math.inf:
        for j in range(W):
            g = item(numbers, at, j) if finite else 0.0
            g = clip if g > clip else g
            put(numbers, at, j, -clip if g < -clip else g)


def _over_rows(step: Callable[..., None]) -> Any:
    """Compile ``step(kind, W, row, ahead, grad, *rest)`` into ``loop(kind, areas, clean, *rest)`` over all rows.

    ``ahead`` is a row that is to come, ``grad`` the address of the row's gradient.
    """
    step = inner(step)

    @inner
    def loop(kind, areas, clean, *rest):
        address, bytes_, slots, K, W = areas
        for a in range(slots):
            area = address + a * bytes_
            for k in range(K):
                seen, sums, count = seen_of(area, K, k), sums_of(kind, area, K, W, k), count_of(area, K, k)
                for u in range(count):
                    grad = sums + u * W * size_of(number(kind))
                    _clean(kind, grad, W, clean)
                    step(kind, W, item(INT64, seen, u), item(INT64, seen, min(u + AHEAD, count - 1)), grad, *rest)

    return loop


@over_columns
def _sgd_columns(zero, j, kind, weight, grad, lr):
    store(kind, weight, j, load(kind, zero, weight, j) - splat(zero, lr) * load(number(kind), zero, grad, j))


@_over_rows
def _sgd_row(kind, W, row, ahead, grad, weight, lr):
    _sgd_columns(kind, W, kind, weight + row * W * size_of(kind), grad, lr)


@kernel
def sgd(kind, areas, clean, weight, lr):
    """``rules.sgd``."""
    _sgd_row(kind, areas, clean, weight, lr)


@over_columns
def _adagrad_columns(zero, j, kind, weight, squares, grad, lr, eps):
    numbers = number(kind)
    g = load(numbers, zero, grad, j)
    h = load(numbers, zero, squares, j) + g * g
    store(numbers, squares, j, h)
    store(kind, weight, j, load(kind, zero, weight, j) - splat(zero, lr) * g / (sqrt(h) + splat(zero, eps)))


@_over_rows
def _adagrad_row(kind, W, row, ahead, grad, weight, squares, lr, eps):
    size = W * size_of(number(kind))
    prefetch(squares + ahead * size)
    _adagrad_columns(kind, W, kind, weight + row * W * size_of(kind), squares + row * size, grad, lr, eps)


@kernel
def adagrad(kind, areas, clean, weight, squares, lr, eps):
    """``rules.adagrad``."""
    _adagrad_row(kind, areas, clean, weight, squares, lr, eps)


@over_columns
def _square_columns(zero, j, kind, sums, grad):
    g = load(number(kind), zero, grad, j)
    put(number(kind), sums, 0, item(number(kind), sums, 0) + total(g * g))


@kernel
def rowwise_adagrad(kind, areas, clean, weight, squares, lr, eps, layout, first):
    """``rules.rowwise_adagrad`` on the slots from ``first`` on, or on plain rows where ``layout`` has no parts.

    The slots of a table whose rows are ``pitch`` rows of the weight follow one another and number its rows alike.
    """
    address, step, slots, K, W = areas
    numbers = number(kind)
    size = W * size_of(numbers)
    a = 0
    while a < slots:
        area = address + a * step
        pitch = part_item(layout, first + a, 0, PITCH) if layout[1] else 1
        square = area + 2 * K * 8  # the area's rows are done with
        for k in range(K):
            for u in range(count_of(area, K, k)):
                put(numbers, square, 0, 0)
                for unit in range(pitch):
                    grad = sums_of(kind, area + unit * step, K, W, k) + u * size
                    _clean(kind, grad, W, clean)
                    _square_columns(kind, W, kind, square, grad)
                for unit in range(pitch):
                    grad = sums_of(kind, area + unit * step, K, W, k) + u * size
                    row = item(INT64, seen_of(area + unit * step, K, k), u)
                    h = item(numbers, squares, row) + item(numbers, square, 0) / (pitch * W)
                    put(numbers, squares, row, h)
                    rate = lr / (math.sqrt(h) + eps)
                    _sgd_columns(kind, W, kind, weight + row * W * size_of(kind), grad, rate)
        a += pitch


@over_columns
def _adam_columns(zero, j, kind, weight, first, second, highest, grad, factors):
    """``factors``: 1 - beta1, beta2, 1 - beta2, the learning rate, what the root is divided by, eps."""
    fresh, kept, added, lr, divisor, eps = factors
    numbers = number(kind)
    g = load(numbers, zero, grad, j)
    m = load(numbers, zero, first, j)
    m = m + splat(zero, fresh) * (g - m)
    v = load(numbers, zero, second, j) * splat(zero, kept) + g * g * splat(zero, added)
    store(numbers, first, j, m)
    store(numbers, second, j, v)
    if highest:
        v = maximum(load(numbers, zero, highest, j), v)
        store(numbers, highest, j, v)
    change = splat(zero, lr) * m / (sqrt(v) / splat(zero, divisor) + splat(zero, eps))
    store(kind, weight, j, load(kind, zero, weight, j) - change)


@_over_rows
def _adam_row(kind, W, row, ahead, grad, weight, state, factors, times, hyper):
    size = W * size_of(number(kind))
    first, second, highest, last = state
    prefetch(first + ahead * size)
    prefetch(second + ahead * size)
    if highest:
        prefetch(highest + ahead * size)
    if last:
        prefetch(last + ahead * 4)
        catch_up_row(kind, W, row, weight, state, times, hyper)
        put(INT32, last, row, times[0] + 1)
    at, top = row * size, highest + row * size if highest else 0
    _adam_columns(kind, W, kind, weight + row * W * size_of(kind), first + at, second + at, top, grad, factors)


@kernel
def adam(kind, areas, clean, weight, state, factors, times, hyper):
    """``rules.adam``, or ``rules.lazy_adam`` where ``state`` has no last step; see ``catch_up`` for the tuples."""
    _adam_row(kind, areas, clean, weight, state, factors, times, hyper)


@kernel
def count(step):
    """Add one to ``step``."""
    put(INT64, step, 0, item(INT64, step, 0) + 1)

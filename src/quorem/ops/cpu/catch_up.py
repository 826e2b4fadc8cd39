"""The steps of Adam and AMSGrad that rows missed: ``ops.replay``, compiled.

Tuples, where memory is an address and 0 stands for none:

    state  exp_avg, exp_avg_sq, max_exp_avg_sq, last
    times  the step reached, lrs, H, moments
    hyper  beta1, beta2, eps, window, settled
"""

import math

from ..layout import FEATURE
from .compiled import inner, kernel
from .rows import BLOCK, block_rows, partitions_of, rows_bytes, slot_item
from .vector import (
    FLOAT64,
    INT32,
    INT64,
    item,
    load,
    number,
    over_columns,
    prefetch,
    put,
    reserve,
    size_of,
    splat,
    sqrt,
    store,
)


@over_columns
def _closed_columns(zero, j, kind, weight, first, root, nodes, eps):
    """Take off ``exp_avg`` times the sum over two nodes."""
    a, d, b, e = nodes
    numbers = number(kind)
    r = sqrt(load(numbers, zero, root, j))
    missed = splat(zero, a) * splat(zero, d) / (r + splat(zero, eps) * splat(zero, d))
    missed = missed + splat(zero, b) * splat(zero, e) / (r + splat(zero, eps) * splat(zero, e))
    store(kind, weight, j, load(kind, zero, weight, j) - load(numbers, zero, first, j) * missed)


@over_columns
def _summed_columns(zero, j, kind, weight, first, root, since, terms, amsgrad, times, hyper):
    """Take off ``exp_avg`` times the sum over the missed steps, one by one."""
    _, lrs, H, _ = times
    beta1, beta2, eps, _, _ = hyper
    numbers = number(kind)
    r = sqrt(load(numbers, zero, root, j))
    power, power1, power2, spread = 1.0, beta1**since, beta2**since, 1.0
    missed = zero
    for i in range(1, terms + 1):
        power *= beta1
        power1 *= beta1
        power2 *= beta2
        spread *= 1.0 if amsgrad else beta2
        a = item(FLOAT64, lrs, (since + i) % H) * power / (1 - power1)
        d = math.sqrt((1 - power2) / spread)
        missed = missed + splat(zero, a * d) / (r + splat(zero, eps * d))
    store(kind, weight, j, load(kind, zero, weight, j) - load(numbers, zero, first, j) * missed)


@over_columns
def _scale_columns(zero, j, kind, at, factor):
    store(number(kind), at, j, load(number(kind), zero, at, j) * splat(zero, factor))


@inner
def _put_nodes(at, scale):
    """``replay.nodes``: behind the moments at ``at``, the two nodes that have them; ``scale`` is d_1."""
    sum_ = item(FLOAT64, at, 0)
    inverse = 1 / sum_ if sum_ > 0 else 0.0
    mean, second, third = item(FLOAT64, at, 1) * inverse, item(FLOAT64, at, 2) * inverse, item(FLOAT64, at, 3) * inverse
    variance = second - mean * mean
    skew, reach, apart = 0.0, 1.0, 0.0
    if variance > 1e-14:
        skew = (third - 3 * mean * second + 2 * mean**3) / (2 * variance)
        reach = math.sqrt(variance + skew * skew)
        apart = reach
    put(FLOAT64, at, 4, sum_ * (reach - skew) / (2 * reach))
    put(FLOAT64, at, 5, scale * (1 + mean + skew + apart))
    put(FLOAT64, at, 6, sum_ * (reach + skew) / (2 * reach))
    put(FLOAT64, at, 7, scale * (1 + mean + skew - apart))


@inner
def catch_up_row(kind, W, row, weight, state, times, hyper):
    """Take the steps that a row missed, if any: ``rules.catch_up``."""
    first, second, highest, last = state
    now = times[0]
    beta1, beta2, eps, window, settled = hyper
    since = item(INT32, last, row)
    if since <= 0 or since >= now:
        return
    size = W * size_of(number(kind))
    target, momentum = weight + row * W * size_of(kind), first + row * size
    amsgrad = highest != 0
    root = (highest if amsgrad else second) + row * size
    if times[3] and since >= settled:
        at = times[3] + since % times[2] * 64
        nodes = item(FLOAT64, at, 4), item(FLOAT64, at, 5), item(FLOAT64, at, 6), item(FLOAT64, at, 7)
        _closed_columns(kind, W, kind, target, momentum, root, nodes, eps)
    else:
        terms = min(now - since, int(window))
        _summed_columns(kind, W, kind, target, momentum, root, since, terms, amsgrad, times, hyper)
    _scale_columns(kind, W, kind, momentum, beta1 ** (now - since))
    _scale_columns(kind, W, kind, second + row * size, beta2 ** (now - since))
    put(INT32, last, row, now)


@inner
def _ask(kind, W, row, weight, state, times):
    """Ask for what ``catch_up_row`` will need."""
    first, second, highest, last = state
    since = item(INT32, last, row)
    if 0 < since < times[0]:
        size = W * size_of(number(kind))
        prefetch(weight + row * W * size_of(kind))
        prefetch(first + row * size)
        prefetch(second + row * size)
        if highest:
            prefetch(highest + row * size)
        if times[3]:
            prefetch(times[3] + since % times[2] * 32)


@kernel
def slots(kind, table, source, layout, offsets, B, state, times, hyper, first, last, residue, shares):
    """Catch up the rows that ids of the slots ``first`` to ``last`` read, those with a ``residue`` of ``shares``.

    ``offsets`` is 0 for a lookup.
    """
    rows = reserve(rows_bytes(layout))
    for s in range(first, last):
        f = slot_item(layout, s, FEATURE)
        begin = item(INT64, offsets, f * B) if offsets else 0
        end = item(INT64, offsets, (f + 1) * B) if offsets else B
        for p in range(begin, end, BLOCK):
            n = min(BLOCK, end - p)
            block_rows(kind, source, layout, table, s, p, n, rows)
            for k in range(partitions_of(layout, s)):
                for i in range(n):
                    prefetch(state[3] + max(item(INT64, rows, k * BLOCK + i), 0) * 4)
                for i in range(n):
                    _ask(kind, table[1], max(item(INT64, rows, k * BLOCK + i), 0), table[0], state, times)
                for i in range(n):
                    row = item(INT64, rows, k * BLOCK + i)
                    if row >= 0 and (shares == 1 or row % shares == residue):
                        catch_up_row(kind, table[1], row, table[0], state, times, hyper)
    return False


@kernel
def plain(kind, table, rows, state, times, hyper, first, last, R, residue, shares):
    """Catch up entries ``first`` to ``last`` of ``rows``, or where that is 0, those rows themselves, modulo R."""
    for p in range(first, last):
        row = item(INT64, rows, p) if rows else p % R
        if row >= 0 and (shares == 1 or row % shares == residue):
            catch_up_row(kind, table[1], row, table[0], state, times, hyper)
    return False


@kernel
def advance(step, lr, times, hyper, amsgrad):
    """``replay.advance_``: enter one more step, taken at ``lr``; ``step`` is an address."""
    before, lrs, H, moments = times
    beta1, beta2, _, window, _ = hyper
    now = before + 1
    put(INT64, step, 0, now)
    put(FLOAT64, lrs, now % H, lr)
    if not moments:
        return
    top = 1 - beta2**now
    rate = lr / (1 - beta1**now)
    power, inverse = 1.0, 1.0
    for j in range(1, min(int(window), now) + 1):
        power *= beta1
        since = now - j
        start = 1 - beta2**now * inverse  # 1 - beta2^(since + 1)
        u = math.sqrt(top / start * (1.0 if amsgrad else inverse)) - 1
        inverse /= beta2
        a = rate * power
        at = moments + since % H * 64
        put(FLOAT64, at, 0, item(FLOAT64, at, 0) + a)
        put(FLOAT64, at, 1, item(FLOAT64, at, 1) + a * u)
        put(FLOAT64, at, 2, item(FLOAT64, at, 2) + a * u * u)
        put(FLOAT64, at, 3, item(FLOAT64, at, 3) + a * u * u * u)
        _put_nodes(at, math.sqrt(start if amsgrad else start / beta2))
    for i in range(8):
        put(FLOAT64, moments + now % H * 64, i, 0.0)

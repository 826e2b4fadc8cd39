"""The steps of Adam and AMSGrad that a row missed: ``ops.replay``, compiled. Memory is an address, 0 for none."""

import math
from typing import NamedTuple

from ..state import MOMENT_COLUMNS, NODE_COLUMN, AdamConstants
from .areas import slot_ids
from .compiled import inner, kernel
from .memory import FLOAT64, INT32, INT64, item, prefetch, put, reserve, size_of
from .rounding import Rounding, store_rounded
from .rows import block_rows, rows_bytes
from .source import BLOCK, Source, partitions_of
from .vector import accumulator, load, over_columns, splat, sqrt, store

_MOMENT_BYTES = MOMENT_COLUMNS * 8


class Averages(NamedTuple):
    """What the Adam rules keep for each row; ``state.AdamState`` describes the tensors."""

    exp_avg: int
    exp_avg_sq: int
    max_exp_avg_sq: int  # 0 but for amsgrad
    last: int


class History(NamedTuple):
    """The steps taken so far."""

    step: int  # how many
    lrs: int
    length: int  # H: of ``lrs``, and of ``moments`` where there are any
    moments: int


class Nodes(NamedTuple):
    """Two terms (a, d) that stand for all missed steps after one ``last``; see ``ops.replay``."""

    a1: float
    d1: float
    a2: float
    d2: float


@inner
def _moments_address(history, since):
    return history.moments + since % history.length * _MOMENT_BYTES


@inner
def _read_nodes(moments):
    nodes = moments + NODE_COLUMN * 8
    return Nodes(item(FLOAT64, nodes, 0), item(FLOAT64, nodes, 1), item(FLOAT64, nodes, 2), item(FLOAT64, nodes, 3))


@inner
def _write_nodes(moments, scale):
    """``replay.nodes``: compute the two nodes from the four moments and write them behind these; ``scale`` is d_1."""
    sum_ = item(FLOAT64, moments, 0)
    inverse = 1 / sum_ if sum_ > 0 else 0.0
    mean = item(FLOAT64, moments, 1) * inverse
    second, third = item(FLOAT64, moments, 2) * inverse, item(FLOAT64, moments, 3) * inverse
    variance = second - mean * mean
    skew, reach, distance = 0.0, 1.0, 0.0
    if variance > 1e-14:  # else only rounding errors are left, and one node is exact
        skew = (third - 3 * mean * second + 2 * mean**3) / (2 * variance)
        reach = math.sqrt(variance + skew * skew)
        distance = reach
    nodes = moments + NODE_COLUMN * 8
    put(FLOAT64, nodes, 0, sum_ * (reach - skew) / (2 * reach))
    put(FLOAT64, nodes, 1, scale * (1 + mean + skew + distance))
    put(FLOAT64, nodes, 2, sum_ * (reach + skew) / (2 * reach))
    put(FLOAT64, nodes, 3, scale * (1 + mean + skew - distance))


@over_columns
def _subtract_closed(zero, j, kind, W, stored, start, exp_avg, square, nodes, eps, rounding):
    """Subtract ``exp_avg`` times the sum over the two nodes; ``square`` is what the root is taken of."""
    float_kind = accumulator(kind)
    root = sqrt(load(float_kind, zero, square, j))
    d1, d2 = splat(zero, nodes.d1), splat(zero, nodes.d2)
    missed = splat(zero, nodes.a1) * d1 / (root + splat(zero, eps) * d1)
    missed = missed + splat(zero, nodes.a2) * d2 / (root + splat(zero, eps) * d2)
    change = load(float_kind, zero, exp_avg, j) * missed
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@over_columns
def _subtract_sum(
    zero, j, kind, W, stored, start, exp_avg, square, since, num_terms, amsgrad, history, constants, rounding
):
    """Subtract ``exp_avg`` times the sum over the missed steps, one by one."""
    beta1, beta2, eps = constants.beta1, constants.beta2, constants.eps
    float_kind = accumulator(kind)
    root = sqrt(load(float_kind, zero, square, j))
    decay1, power1, power2, decay2 = 1.0, beta1**since, beta2**since, 1.0
    missed = zero
    for i in range(1, num_terms + 1):
        decay1 *= beta1
        power1 *= beta1
        power2 *= beta2
        decay2 *= 1.0 if amsgrad else beta2
        a = item(FLOAT64, history.lrs, (since + i) % history.length) * decay1 / (1 - power1)
        d = math.sqrt((1 - power2) / decay2)
        missed = missed + splat(zero, a * d) / (root + splat(zero, eps * d))
    change = load(float_kind, zero, exp_avg, j) * missed
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@over_columns
def _scale(zero, j, kind, W, average, factor):
    float_kind = accumulator(kind)
    store(float_kind, average, j, load(float_kind, zero, average, j) * splat(zero, factor))


@inner
def catch_up_row(kind, W, stored, r, averages, history, constants, rounding):
    """Take the steps that row ``r`` missed, if any: ``rules.catch_up``."""
    since, step = item(INT32, averages.last, r), history.step
    if since <= 0 or since >= step:
        return
    size = W * size_of(accumulator(kind))
    exp_avg = averages.exp_avg + r * size
    amsgrad = averages.max_exp_avg_sq != 0
    square = (averages.max_exp_avg_sq if amsgrad else averages.exp_avg_sq) + r * size
    if history.moments and since >= constants.settled:
        nodes = _read_nodes(_moments_address(history, since))
        _subtract_closed(kind, W, stored, r * W, exp_avg, square, nodes, constants.eps, rounding)
    else:
        num_terms = min(step - since, int(constants.window))
        terms = (since, num_terms, amsgrad, history, constants, rounding)
        _subtract_sum(kind, W, stored, r * W, exp_avg, square, *terms)
    _scale(kind, W, exp_avg, constants.beta1 ** (step - since))
    _scale(kind, W, averages.exp_avg_sq + r * size, constants.beta2 ** (step - since))
    put(INT32, averages.last, r, step)


@inner
def _prefetch_row(kind, W, stored, r, averages, history):
    """Prefetch what ``catch_up_row`` will need."""
    since = item(INT32, averages.last, r)
    if 0 < since < history.step:
        size = W * size_of(accumulator(kind))
        prefetch(stored + r * W * size_of(kind))
        prefetch(averages.exp_avg + r * size)
        prefetch(averages.exp_avg_sq + r * size)
        if averages.max_exp_avg_sq:
            prefetch(averages.max_exp_avg_sq + r * size)
        if history.moments:
            prefetch(_moments_address(history, since) + NODE_COLUMN * 8)


@kernel
def catch_up_slots(kind, W, source, averages, history, constants, rounding, first, last, share, num_shares):
    """Bring the rows up to date that ids of slots ``first`` to ``last`` read, if they are in this thread's share.

    A row is in the share if it leaves the remainder ``share`` when divided by ``num_shares``.
    """
    source, rounding = Source(*source), Rounding(*rounding)
    averages, history, constants = Averages(*averages), History(*history), AdamConstants(*constants)
    rows = reserve(rows_bytes(source))
    for s in range(first, last):
        begin, end = slot_ids(source, s)
        for p in range(begin, end, BLOCK):
            n = min(BLOCK, end - p)
            block_rows(source, s, p, n, 0, partitions_of(source, s), 0, rows)
            for k in range(partitions_of(source, s)):
                for i in range(n):
                    prefetch(averages.last + max(item(INT64, rows, k * BLOCK + i), 0) * 4)
                for i in range(n):
                    _prefetch_row(kind, W, source.stored, max(item(INT64, rows, k * BLOCK + i), 0), averages, history)
                for i in range(n):
                    r = item(INT64, rows, k * BLOCK + i)
                    if r >= 0 and (num_shares == 1 or r % num_shares == share):
                        catch_up_row(kind, W, source.stored, r, averages, history, constants, rounding)


@kernel
def catch_up_rows(
    kind, W, stored, num_rows, rows, averages, history, constants, rounding, first, last, share, num_shares
):
    """Bring the rows up to date that entries ``first`` to ``last`` of ``rows`` name, if they are in this share.

    Where ``rows`` is 0, these are rows ``first`` to ``last`` themselves, modulo ``num_rows``.
    """
    averages, history, constants = Averages(*averages), History(*history), AdamConstants(*constants)
    rounding = Rounding(*rounding)
    for p in range(first, last):
        r = item(INT64, rows, p) if rows else p % num_rows
        if r >= 0 and (num_shares == 1 or r % num_shares == share):
            catch_up_row(kind, W, stored, r, averages, history, constants, rounding)


@kernel
def advance(step_address, lr, history, constants, amsgrad):
    """``replay.advance_``: enter one more step, taken at ``lr``."""
    history, constants = History(*history), AdamConstants(*constants)
    beta1, beta2, step = constants.beta1, constants.beta2, history.step + 1
    put(INT64, step_address, 0, step)
    put(FLOAT64, history.lrs, step % history.length, lr)
    if not history.moments:
        return
    power2 = beta2**step
    rate = lr / (1 - beta1**step)
    decay1, inverse2 = 1.0, 1.0
    for j in range(1, min(int(constants.window), step) + 1):
        decay1 *= beta1
        since = step - j
        # Below 1e-300, beta2^step has lost its digits, and its inverse powers may overflow.
        bottom = 1 - (power2 * inverse2 if power2 > 1e-300 else beta2 ** (since + 1))
        u = math.sqrt((1 - power2) / bottom * (1.0 if amsgrad else inverse2)) - 1
        inverse2 /= beta2
        a = rate * decay1
        moments = _moments_address(history, since)
        put(FLOAT64, moments, 0, item(FLOAT64, moments, 0) + a)
        put(FLOAT64, moments, 1, item(FLOAT64, moments, 1) + a * u)
        put(FLOAT64, moments, 2, item(FLOAT64, moments, 2) + a * u * u)
        put(FLOAT64, moments, 3, item(FLOAT64, moments, 3) + a * u * u * u)
        _write_nodes(moments, math.sqrt(bottom if amsgrad else bottom / beta2))
    for i in range(MOMENT_COLUMNS):
        put(FLOAT64, _moments_address(history, step), i, 0.0)

"""The steps of Adam and AMSGrad that a row missed: ``ops.replay``, compiled. Memory is an address, 0 for none."""

import math
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch
from ..state import MOMENT_COLUMNS, NODE_COLUMN, AdamConstants, RowRule
from .compiled import inner, kernel
from .launch import KINDS, STEP_COST, fits, kernel_input, ranges, rows_as_ids, run_tasks, threads_for
from .rounding import NO_ROUNDING, Rounding, rounding_by, store_rounded
from .rows import BLOCK, Source, block_rows, composition_of, rows_bytes, slot_ids
from .vector import (
    FLOAT64,
    INT32,
    INT64,
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
    wide,
)

_MOMENT_BYTES = MOMENT_COLUMNS * 8


class AdamRows(NamedTuple):
    """``state.AdamState``, as kernels take it: addresses, 0 for none."""

    exp_avg: int
    exp_avg_sq: int
    max_exp_avg_sq: int  # 0 but for amsgrad
    last: int
    step: int  # how many steps were taken so far
    lrs: int
    length: int  # H: of ``lrs``, and of ``moments`` where there are any
    moments: int


@inner
def _moments_address(state, since):
    return state.moments + since % state.length * _MOMENT_BYTES


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
    float_kind = wide(kind)
    root = sqrt(load(float_kind, zero, square, j))
    a1, d1, a2, d2 = nodes
    d1, d2 = zero + d1, zero + d2
    missed = a1 * d1 / (root + eps * d1) + a2 * d2 / (root + eps * d2)
    change = load(float_kind, zero, exp_avg, j) * missed
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@over_columns
def _subtract_sum(
    zero, j, kind, W, stored, start, exp_avg, square, since, num_terms, amsgrad, state, constants, rounding
):
    """Subtract ``exp_avg`` times the sum over the missed steps, one by one."""
    beta1, beta2, eps = constants.beta1, constants.beta2, constants.eps
    float_kind = wide(kind)
    root = sqrt(load(float_kind, zero, square, j))
    decay1, power1, power2, decay2 = 1.0, beta1**since, beta2**since, 1.0
    missed = zero
    for i in range(1, num_terms + 1):
        decay1 *= beta1
        power1 *= beta1
        power2 *= beta2
        decay2 *= 1.0 if amsgrad else beta2
        a = item(FLOAT64, state.lrs, (since + i) % state.length) * decay1 / (1 - power1)
        d = math.sqrt((1 - power2) / decay2)
        missed = missed + a * d / (root + eps * d)
    change = load(float_kind, zero, exp_avg, j) * missed
    store_rounded(kind, stored, start + j, load(kind, zero, stored, start + j) - change, rounding)


@over_columns
def _scale(zero, j, kind, W, average, factor):
    float_kind = wide(kind)
    store(float_kind, average, j, load(float_kind, zero, average, j) * factor)


@inner
def catch_up_row(kind, W, stored, r, state, constants, rounding):
    """Take the steps that row ``r`` missed, if any: ``ops.replay.rows_catch_up_``."""
    since, step = item(INT32, state.last, r), state.step
    if since <= 0 or since >= step:
        return
    size = W * size_of(wide(kind))
    exp_avg = state.exp_avg + r * size
    amsgrad = state.max_exp_avg_sq != 0
    square = (state.max_exp_avg_sq if amsgrad else state.exp_avg_sq) + r * size
    if state.moments and since >= constants.settled:
        node = _moments_address(state, since) + NODE_COLUMN * 8
        nodes = (item(FLOAT64, node, 0), item(FLOAT64, node, 1), item(FLOAT64, node, 2), item(FLOAT64, node, 3))
        _subtract_closed(kind, W, stored, r * W, exp_avg, square, nodes, constants.eps, rounding)
    else:
        num_terms = min(step - since, int(constants.window))
        terms = (since, num_terms, amsgrad, state, constants, rounding)
        _subtract_sum(kind, W, stored, r * W, exp_avg, square, *terms)
    _scale(kind, W, exp_avg, constants.beta1 ** (step - since))
    _scale(kind, W, state.exp_avg_sq + r * size, constants.beta2 ** (step - since))
    put(INT32, state.last, r, step)


@inner
def _prefetch_row(kind, W, stored, r, state):
    """Prefetch what ``catch_up_row`` will need."""
    since = item(INT32, state.last, r)
    if 0 < since < state.step:
        size = W * size_of(wide(kind))
        prefetch(stored + r * W * size_of(kind))
        prefetch(state.exp_avg + r * size)
        prefetch(state.exp_avg_sq + r * size)
        if state.max_exp_avg_sq:
            prefetch(state.max_exp_avg_sq + r * size)
        if state.moments:
            prefetch(_moments_address(state, since) + NODE_COLUMN * 8)


@kernel
def catch_up_slots(kind, W, source, state, constants, rounding, share, num_shares):
    """Bring the rows up to date that the batch reads, if they are in this thread's share.

    A row is in the share if it leaves the remainder ``share`` when divided by ``num_shares``.
    """
    source, state = Source(*source), AdamRows(*state)
    constants, rounding = AdamConstants(*constants), Rounding(*rounding)
    rows = reserve(rows_bytes(source))
    for s in range(source.num_slots):
        begin, end = slot_ids(source, s)
        num_parts = composition_of(source, s).num_parts
        for p in range(begin, end, BLOCK):
            n = min(BLOCK, end - p)
            block_rows(source, s, p, n, 0, num_parts, 0, rows)
            for k in range(num_parts):
                for i in range(n):
                    prefetch(state.last + max(item(INT64, rows, k * BLOCK + i), 0) * 4)
                for i in range(n):
                    _prefetch_row(kind, W, source.stored, max(item(INT64, rows, k * BLOCK + i), 0), state)
                for i in range(n):
                    r = item(INT64, rows, k * BLOCK + i)
                    if r >= 0 and (num_shares == 1 or r % num_shares == share):
                        catch_up_row(kind, W, source.stored, r, state, constants, rounding)


@kernel
def catch_up_rows(kind, W, stored, num_rows, state, constants, rounding, first, last):
    """Bring rows ``first`` to ``last``, modulo their number, up to date."""
    state, constants, rounding = AdamRows(*state), AdamConstants(*constants), Rounding(*rounding)
    for p in range(first, last):
        catch_up_row(kind, W, stored, p % num_rows, state, constants, rounding)


@kernel
def advance(step_address, lr, state, constants):
    """``replay.advance_``: enter one more step, taken at ``lr``."""
    state, constants = AdamRows(*state), AdamConstants(*constants)
    amsgrad = state.max_exp_avg_sq != 0
    beta1, beta2, step = constants.beta1, constants.beta2, state.step + 1
    put(INT64, step_address, 0, step)
    put(FLOAT64, state.lrs, step % state.length, lr)
    if not state.moments:
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
        moments = _moments_address(state, since)
        put(FLOAT64, moments, 0, item(FLOAT64, moments, 0) + a)
        put(FLOAT64, moments, 1, item(FLOAT64, moments, 1) + a * u)
        put(FLOAT64, moments, 2, item(FLOAT64, moments, 2) + a * u * u)
        put(FLOAT64, moments, 3, item(FLOAT64, moments, 3) + a * u * u * u)
        _write_nodes(moments, math.sqrt(bottom if amsgrad else bottom / beta2))
    for i in range(MOMENT_COLUMNS):
        put(FLOAT64, _moments_address(state, step), i, 0.0)


def catch_up_(batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> None:
    """``ops.replay.catch_up_``."""
    inputs = kernel_input(IdBatch(batch.ids, batch.offsets), stored, layout)
    if inputs is None or not fits(stored, rule):
        return NotImplemented
    run = partial(catch_up_slots, inputs.kind, inputs.width, inputs.source, *lagging(rule))
    threads = threads_for(inputs.longest * layout.parts[..., 0].numel() * stored.shape[1])
    run_tasks(run, [(share, threads) for share in range(threads)], threads)
    return None


def rows_catch_up_(rows: Tensor | None, stored: Tensor, rule: RowRule) -> None:
    """``ops.replay.rows_catch_up_``."""
    if rows is not None:
        batch, layout = rows_as_ids(rows, stored)
        return catch_up_(batch, stored, layout, rule)
    if not fits(stored, rule):
        return NotImplemented
    fixed = (KINDS[stored.dtype], columns(stored.shape[1]), stored.data_ptr(), len(stored))
    threads = threads_for(STEP_COST * stored.numel())
    run_tasks(partial(catch_up_rows, *fixed, *lagging(rule)), ranges(len(stored), threads), threads)
    return None


def advance_(stored: Tensor, rule: RowRule) -> None:
    """Count the step; before, bring a few rows in turn up to date, so that none lags too far (see ``ops.replay``)."""
    state, constants, rounding = lagging(rule)
    step, count = int(rule.state.step), -(-2 * len(stored) // len(rule.state.lrs))
    fixed = (KINDS[stored.dtype], columns(stored.shape[1]), stored.data_ptr(), len(stored), state, constants, rounding)
    catch_up_rows(*fixed, step * count, (step + 1) * count)
    advance(rule.state.step.data_ptr(), float(rule.lr), state, constants)


def lagging(rule: RowRule) -> tuple[tuple[float, ...], ...]:
    """State, constants and rounding of rows that lag behind, as kernels take them."""
    state, step, seed = rule.state, int(rule.state.step), rule.rounding_seed
    averages = (state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq, state.last)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in averages)
    moments = state.moments.data_ptr() if len(state.moments) else 0
    rounding = NO_ROUNDING if seed is None else rounding_by(~seed, step)  # other bits than the step's own
    return (*addresses, step, state.lrs.data_ptr(), len(state.lrs), moments), tuple(rule.constants), rounding

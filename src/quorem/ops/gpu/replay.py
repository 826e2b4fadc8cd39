"""Bring rows of Adam and AMSGrad that lag behind up to date, in one launch just before the rows are read.

``ops.replay`` explains the formulas and is the plain reference. Of several reads of one row, the first that sets its
``last`` to the present step applies the missed steps. The lookup is another launch, so it reads rows that are current.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import state as state_columns
from ..layout import Layout
from ..rows import IdBatch
from ..state import AdagradConstants, AdamConstants, AdamState, RowRule, present
from . import rows as index
from .host import check_state, fused_layout
from .launch import cdiv, launch, planned, power_of_2, scratch
from .rounding import as_stored, rounds, seed_bits
from .rows import FEATURE, TYPES, DeviceBatch, row_dtype

MOMENT_COLUMNS, NODE_COLUMN = tl.constexpr(state_columns.MOMENT_COLUMNS), tl.constexpr(state_columns.NODE_COLUMN)
# Positions of the constants. A kernel can read a global constant only if it is a ``tl.constexpr``.
LR_DECAY, ADAGRAD_EPS = (tl.constexpr(AdagradConstants._fields.index(name)) for name in ("lr_decay", "eps"))
BETA1, BETA2, EPS = (tl.constexpr(AdamConstants._fields.index(name)) for name in ("beta1", "beta2", "eps"))
WINDOW_LENGTH, SETTLED = (tl.constexpr(AdamConstants._fields.index(name)) for name in ("window", "settled"))
LOG_BETA1, LOG_BETA2 = tl.constexpr(len(AdamConstants._fields)), tl.constexpr(len(AdamConstants._fields) + 1)
MANY_READS = 16384  # from so many on, a program lists the rows that lag behind


@cache
def on_device(constants: tuple[float, ...], device: torch.device) -> Tensor:
    """A rule's constants as a float64 tensor: a kernel's scalar arguments would be rounded to float32.

    For Adam and AMSGrad the base-2 logarithms of the betas follow the constants.
    """
    if isinstance(constants, AdamConstants):
        constants += tuple(math.log2(beta) if beta else -math.inf for beta in constants[:2])
    return torch.tensor(constants or (0.0,), dtype=torch.float64, device=device)


@triton.jit
def power(log, exponent):
    """A number to the ``exponent`` in float64, by its logarithm of base 2; anything to the 0 is one."""
    return tl.where(exponent == 0, 1.0, tl.exp2(log * exponent))


def history_of(state: AdamState, constants: AdamConstants) -> tuple[Any, Tensor, int]:
    """The state, with None for moments that are not used, the constants, and H, as kernels take them."""
    moments: Any = state.moments if state.moments.shape[0] else None
    return state._replace(moments=moments), on_device(constants, state.step.device), len(state.lrs)


@triton.jit
def term_of(rate, j, t, log1, log2, AMSGRAD: tl.constexpr):
    """a_j and d_j of step t, taken at ``rate``."""
    a = rate * power(log1, j) / (1 - power(log1, t))
    d = tl.sqrt(1 - power(log2, t))
    if not AMSGRAD:
        d = d * tl.exp2(-0.5 * j * log2)
    return a, d


@triton.jit
def term(a, d, root, eps):
    """``a d / (root + eps d)``, for each row's a and d."""
    d = d.to(root.dtype)[:, None]
    return a.to(root.dtype)[:, None] * d / (root + eps.to(root.dtype) * d)


@triton.jit
def catch_up_kernel(
    batch, stored, state, constants, H, lists, layout, R, in_turn, reading, seed,
    W: tl.constexpr, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, FLAGS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Take the steps that rows have missed.

    The first ``reading`` programs: N reads of one pair. The others: N of the ``in_turn`` rows whose turn it is. Of many
    reads few are the first of a row that lags behind: if N is more than T, a program lists such rows in its part of
    ``lists[0]``, with the step that each is up to date with in ``lists[1]``, and then handles T of them at a time.
    """
    present = tl.load(state.step)
    if tl.program_id(0) < reading:
        pair = tl.program_id(0) % (S * K)
        n = (tl.program_id(0) // (S * K)).to(tl.int64) * N + tl.arange(0, N)
        slot = layout.table + pair // K
        i, _ = index.read_ids(batch, n, tl.load(slot + S * FEATURE))
        valid = index.is_valid(i, slot, S)
        i, own_row = index.place_at(i, valid, slot, layout.maps, S, FLAGS)
        row = index.row_read(i, own_row, valid, slot, layout.maps, pair % K, S, FLAGS).to(tl.int64)
        valid = row >= 0
    else:
        n = (tl.program_id(0) - reading).to(tl.int64) * N + tl.arange(0, N)
        row, valid = (present * in_turn + n) % R, n < in_turn
    row = tl.where(valid, row, 0)
    seen = tl.load(state.last + row, mask=valid, other=0)
    due = valid & (seen > 0) & (seen < present)
    if tl.max(due.to(tl.int32)) > 0:
        steps = tl.zeros((N,), tl.int32) + present.to(tl.int32)
        raised = tl.atomic_max(state.last + row, steps, mask=due, sem="relaxed")
        behind = due & (raised < present)
        if N == T:
            since = tl.where(behind, raised, 1).to(tl.int64)
            replay_rows(row, since, behind, present, stored, state, constants, H, seed, W, T, C, ACC, ROUNDED)
        else:
            nth = tl.cumsum(behind.to(tl.int32), 0)
            start = tl.program_id(0).to(tl.int64) * N
            rows, steps = lists[0] + start, lists[1] + start
            tl.store(rows + nth - 1, row.to(rows.dtype.element_ty), mask=behind)
            tl.store(steps + nth - 1, raised, mask=behind)
            tl.debug_barrier()
            for begin in range(0, tl.max(nth), T):
                position = begin + tl.arange(0, T)
                inside = position < tl.max(nth)
                listed = tl.load(rows + position, mask=inside, other=0).to(tl.int64)
                since = tl.load(steps + position, mask=inside, other=1).to(tl.int64)
                replay_rows(listed, since, inside, present, stored, state, constants, H, seed, W, T, C, ACC, ROUNDED)


@triton.jit
def replay_rows(
    row, since, behind, present, stored, state, constants, H, seed,
    W: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Take the steps after ``since`` up to ``present`` on T rows, those that are ``behind``."""
    AMSGRAD: tl.constexpr = state.max_exp_avg_sq is not None
    gap = tl.where(behind, present - since, 0)
    eps, log1, log2 = tl.load(constants + EPS), tl.load(constants + LOG_BETA1), tl.load(constants + LOG_BETA2)
    elements, mask = index.elements_of(row, behind, tl.arange(0, C), W)
    highest = state.max_exp_avg_sq if AMSGRAD else state.exp_avg_sq
    root = tl.sqrt(tl.load(highest + elements, mask=mask, other=1))
    total = tl.zeros((T, C), ACC)
    slow = behind
    if state.moments is not None:
        slow = behind & (since.to(tl.float64) < tl.load(constants + SETTLED))
        nodes = state.moments + (since % H) * MOMENT_COLUMNS + NODE_COLUMN
        for node in tl.static_range(2):
            mass = tl.load(nodes + 2 * node, mask=behind, other=0)
            total += term(mass, tl.load(nodes + 2 * node + 1, mask=behind, other=1), root, eps)
        total = tl.where(slow[:, None], 0, total)
    longest = tl.minimum(tl.max(tl.where(slow, gap, 0)), tl.load(constants + WINDOW_LENGTH).to(tl.int64))
    for j in range(1, longest + 1):
        rate = tl.load(state.lrs + (since + j) % H, mask=slow & (j <= gap), other=0)
        a, d = term_of(rate, j, since + j, log1, log2, AMSGRAD)
        total += term(a, d, root, eps)
    m = tl.load(state.exp_avg + elements, mask=mask, other=0)
    w = tl.load(stored + elements, mask=mask, other=0).to(ACC) - m * total
    v = tl.load(state.exp_avg_sq + elements, mask=mask, other=0) * power(log2, gap).to(ACC)[:, None]
    tl.debug_barrier()  # several threads may hold the same element
    tl.store(stored + elements, as_stored(w, stored, elements, present, seed, ROUNDED), mask=mask)
    tl.store(state.exp_avg + elements, m * power(log1, gap).to(ACC)[:, None], mask=mask)
    tl.store(state.exp_avg_sq + elements, v, mask=mask)


@triton.jit
def advance(lr, state, constants, H, WINDOW: tl.constexpr):
    """Count one more step: its learning rate, and its term in the moments of the steps before it, whose nodes follow
    from them."""
    AMSGRAD: tl.constexpr = state.max_exp_avg_sq is not None
    t = tl.load(state.step) + 1
    rate = tl.load(lr)
    if state.moments is not None:
        log1, log2 = tl.load(constants + LOG_BETA1), tl.load(constants + LOG_BETA2)
        j = 1 + tl.arange(0, WINDOW)
        since = t - j
        valid = (since >= 0) & (j <= tl.load(constants + WINDOW_LENGTH).to(tl.int64))
        since = tl.where(valid, since, 0)
        a, d = term_of(rate, j, t, log1, log2, AMSGRAD)
        scale = tl.sqrt(1 - power(log2, since + 1))  # d_1
        if not AMSGRAD:
            scale = scale / tl.sqrt(tl.load(constants + BETA2))
        u = d / scale - 1
        entry = state.moments + (since % H) * MOMENT_COLUMNS
        mass = tl.load(entry, mask=valid, other=0) + a
        first = tl.load(entry + 1, mask=valid, other=0) + a * u
        second = tl.load(entry + 2, mask=valid, other=0) + a * u * u
        third = tl.load(entry + 3, mask=valid, other=0) + a * u * u * u
        tl.store(entry, mass, mask=valid)
        tl.store(entry + 1, first, mask=valid)
        tl.store(entry + 2, second, mask=valid)
        tl.store(entry + 3, third, mask=valid)
        safe = tl.where(mass > 0, mass, 1)
        mean, second, third = first / safe, second / safe, third / safe
        variance = tl.maximum(second - mean * mean, 0)
        apart = variance > 1e-14  # else rounding is all there is to see, and one node is exact
        skew = (third - 3 * mean * second + 2 * mean * mean * mean) / (2 * tl.where(apart, variance, 1))
        skew = tl.where(apart, skew, 0)
        reach = tl.where(apart, tl.sqrt(variance + skew * skew), 1)
        nodes = entry + NODE_COLUMN
        tl.store(nodes, mass * (reach - skew) / (2 * reach), mask=valid)
        tl.store(nodes + 1, scale * (1 + mean + tl.where(apart, skew + reach, 0)), mask=valid)
        tl.store(nodes + 2, mass * (reach + skew) / (2 * reach), mask=valid)
        tl.store(nodes + 3, scale * (1 + mean + tl.where(apart, skew - reach, 0)), mask=valid)
        blank = tl.arange(0, MOMENT_COLUMNS)
        tl.store(state.moments + (t % H) * MOMENT_COLUMNS + blank, tl.zeros((MOMENT_COLUMNS,), tl.float64))
    tl.debug_barrier()
    tl.store(state.lrs + t % H, rate)
    tl.store(state.step, t)


def catch_up_(batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> Any:
    """``ops.replay.catch_up_`` in one launch, including the rows that each step brings up to date in turn."""
    state, constants, seed = rule.state, rule.constants, rule.rounding_seed
    host = fused_layout(stored, layout, whole_rows=True) if rule.entry.fused else None
    if host is None:
        return NotImplemented
    ids = DeviceBatch.of(batch, layout.spans.shape[0])
    reads = ids.ids.shape[0]

    def launches() -> None:
        check_state(stored, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq, last=state.last)
        num_slots, k, (num_rows, width) = host.num_slots, host.num_parts, stored.shape
        columns = power_of_2(width)
        listing = reads >= MANY_READS
        block = max(1, min(64 if listing else 128, 2048 // columns))
        each = 1024 if listing else block
        reading, in_turn = cdiv(reads, each) * num_slots * k, cdiv(2 * num_rows, len(state.lrs))
        programs, lists = reading + cdiv(in_turn, each), None
        if listing:
            lists = tuple(scratch(stored, programs * each, dtype=dtype) for dtype in (row_dtype(stored), torch.int32))
        launch(
            catch_up_kernel, (programs,),
            ids, stored, *history_of(state, constants), lists, host.on_device, num_rows, in_turn, reading,
            seed_bits(None if seed is None else ~seed),
            W=width, S=num_slots, K=k, N=each, T=block, C=columns, ACC=TYPES[stored.dtype], FLAGS=host.row_flags,
            ROUNDED=rounds(stored, seed),
        )  # fmt: skip

    shapes = (stored.shape, state.exp_avg.shape, state.lrs.shape, state.moments.shape)
    key = ("catch up", *constants, seed, ids.size, ids.stride, reads, *shapes, stored.dtype)
    planned(host.plans, key, (stored, *present(state)), present(ids[:2]), launches)
    return None

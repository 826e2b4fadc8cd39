"""Bring rows of Adam and AMSGrad that lag behind up to date, in one launch just before the rows are read.

``ops.replay`` explains the formulas and is the plain reference. Of several reads of one row, the first that sets its
``last`` to the present step applies the missed steps. The lookup is another launch, so it reads rows that are current.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import state as state_columns
from ..layout import Layout
from ..rows import IdBatch
from ..state import RULES, AdamConstants, AdamState, present
from .constants import BETA2, EPS, LOG_BETA1, LOG_BETA2, SETTLED, WINDOW_LENGTH, on_device, power
from .fast_launch import planned, scratch
from .host import check_state, fused_layout
from .launch import cdiv, launch, power_of_2
from .rounding import as_stored, rounds, seed_bits
from .rows import OWN, TYPES, if_used, is_valid, number_of, part_at, read_ids, row_dtype, row_of, slot_at

MOMENT_COLUMNS, NODE_COLUMN = tl.constexpr(state_columns.MOMENT_COLUMNS), tl.constexpr(state_columns.NODE_COLUMN)
MANY_READS = 16384  # from so many on, a program lists the rows that lag behind


class Advance(NamedTuple):
    """The arguments by which a kernel counts one more step; without tensors for a rule whose rows never lag behind."""

    tensors: tuple[Tensor | None, ...]  # lr, step, lrs, moments, constants
    history: int
    flags: dict[str, Any]


NO_ADVANCE = Advance((None,) * 5, 1, {"WINDOW": 1, "AMSGRAD": False, "CLOSED": False})


def advance_of(lr: Tensor, state: AdamState, constants: AdamConstants) -> Advance:
    """The arguments for the next step of ``state``, with learning rate ``lr``."""
    flags = {
        "WINDOW": power_of_2(max(int(constants.window), 1)),
        "AMSGRAD": state.max_exp_avg_sq is not None,
        "CLOSED": len(state.moments) > 0,
    }
    tensors = (lr, state.step, state.lrs, state.moments, on_device(constants, lr.device))
    return Advance(tensors, len(state.lrs), flags)


@triton.jit
def first_root(since, constants, AMSGRAD: tl.constexpr):
    """d_1."""
    d = tl.sqrt(1 - power(tl.load(constants + LOG_BETA2), since + 1))
    if not AMSGRAD:
        d = d / tl.sqrt(tl.load(constants + BETA2))
    return d


@triton.jit
def term(a, d, root, eps):
    """``a d / (root + eps d)``, for each row's a and d."""
    d = d.to(root.dtype)[:, None]
    return a.to(root.dtype)[:, None] * d / (root + eps.to(root.dtype) * d)


@triton.jit
def catch_up_kernel(
    ids, offsets, stored, exp_avg, exp_avg_sq, root_sq, last, step, lrs, moments, constants, rows, steps, slots, parts,
    maps, B, id_stride, R, H, in_turn, reading, seed,
    W: tl.constexpr, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, JAGGED: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr, OWNED: tl.constexpr,
    LEVELS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Take the steps that rows have missed.

    The first ``reading`` programs: N reads of one pair. The others: N of the ``in_turn`` rows whose turn it is. Of many
    reads few are the first of a row that lags behind: if N is more than T, a program lists such rows in its part of
    ``rows``, with the step that each is up to date with in ``steps``, and then handles T of them at a time.
    """
    present = tl.load(step)
    if tl.program_id(0) < reading:
        pair = tl.program_id(0) % (S * K)
        n = (tl.program_id(0) // (S * K)).to(tl.int64) * N + tl.arange(0, N)
        slot, k = slot_at(slots, pair // K), pair % K
        row, valid = n * 0, n < 0
        has_own = OWNED and (K > 1) & (tl.load(slot + OWN) > 0)
        if (has_own == 0) | (k > 0):  # a row of an id's own is read with the second part, since ids have one of them
            i, _ = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
            valid = is_valid(i, slot)
            number, is_own = number_of(tl.where(valid, i, 0), slot, maps, OWNED, LEVELS)
            row, used = row_of(number, is_own, slot, part_at(parts, pair), k, maps, OWNED)
            if OWNED:  # noqa: SIM102  # joined by `and`, it would be compiled where no id has a row of its own
                if has_own and k == 1:
                    own_row, own_used = row_of(number, is_own, slot, part_at(parts, pair - 1), 0, maps, OWNED)
                    row, used = tl.where(is_own, own_row, row), used | own_used
            valid = if_used(used, valid, OWNED)
    else:
        n = (tl.program_id(0) - reading).to(tl.int64) * N + tl.arange(0, N)
        valid = n < in_turn
        row = (present * in_turn + n) % R
    row = tl.where(valid, row, 0)
    seen = tl.load(last + row, mask=valid, other=0)
    due = valid & (seen > 0) & (seen < present)
    if tl.max(due.to(tl.int32)) > 0:
        raised = tl.atomic_max(last + row, tl.zeros((N,), tl.int32) + present.to(tl.int32), mask=due, sem="relaxed")
        behind = due & (raised < present)
        if N == T:
            replay_rows(
                row, tl.where(behind, raised, 1).to(tl.int64), behind, present, stored, exp_avg, exp_avg_sq, root_sq,
                lrs, moments, constants, H, seed, W, T, C, ACC, AMSGRAD, CLOSED, ROUNDED,
            )  # fmt: skip
        else:
            nth = tl.cumsum(behind.to(tl.int32), 0)
            start = tl.program_id(0).to(tl.int64) * N
            tl.store(rows + start + nth - 1, row.to(rows.dtype.element_ty), mask=behind)
            tl.store(steps + start + nth - 1, raised, mask=behind)
            tl.debug_barrier()
            for begin in range(0, tl.max(nth), T):
                position = begin + tl.arange(0, T)
                inside = position < tl.max(nth)
                replay_rows(
                    tl.load(rows + start + position, mask=inside, other=0).to(tl.int64),
                    tl.load(steps + start + position, mask=inside, other=1).to(tl.int64), inside, present, stored,
                    exp_avg, exp_avg_sq, root_sq, lrs, moments, constants, H, seed, W, T, C, ACC, AMSGRAD, CLOSED,
                    ROUNDED,
                )  # fmt: skip


@triton.jit
def replay_rows(
    row, since, behind, present, stored, exp_avg, exp_avg_sq, root_sq, lrs, moments, constants, H, seed,
    W: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Take the steps after ``since`` up to ``present`` on T rows, those that are ``behind``."""
    gap = tl.where(behind, present - since, 0)
    eps, log1, log2 = tl.load(constants + EPS), tl.load(constants + LOG_BETA1), tl.load(constants + LOG_BETA2)
    columns = tl.arange(0, C)
    mask = behind[:, None] & (columns < W)[None, :]
    elements = row[:, None] * W + columns[None, :]
    root = tl.sqrt(tl.load(root_sq + elements, mask=mask, other=1))
    total = tl.zeros((T, C), ACC)
    slow = behind
    if CLOSED:
        slow = behind & (since.to(tl.float64) < tl.load(constants + SETTLED))
        nodes = moments + (since % H) * MOMENT_COLUMNS + NODE_COLUMN
        for node in tl.static_range(2):
            mass = tl.load(nodes + 2 * node, mask=behind, other=0)
            total += term(mass, tl.load(nodes + 2 * node + 1, mask=behind, other=1), root, eps)
        total = tl.where(slow[:, None], 0, total)
    longest = tl.minimum(tl.max(tl.where(slow, gap, 0)), tl.load(constants + WINDOW_LENGTH).to(tl.int64))
    for j in range(1, longest + 1):
        t = since + j
        a = tl.load(lrs + t % H, mask=slow & (j <= gap), other=0) * power(log1, j) / (1 - power(log1, t))
        d = tl.sqrt(1 - power(log2, t))
        if not AMSGRAD:
            d = d * tl.exp2(-0.5 * j * log2)
        total += term(a, d, root, eps)
    m = tl.load(exp_avg + elements, mask=mask, other=0)
    w = tl.load(stored + elements, mask=mask, other=0).to(ACC) - m * total
    v = tl.load(exp_avg_sq + elements, mask=mask, other=0) * power(log2, gap).to(ACC)[:, None]
    tl.debug_barrier()  # AMSGrad aside, root_sq is exp_avg_sq
    tl.store(stored + elements, as_stored(w, stored, elements, present, seed, ROUNDED), mask=mask)
    tl.store(exp_avg + elements, m * power(log1, gap).to(ACC)[:, None], mask=mask)
    tl.store(exp_avg_sq + elements, v, mask=mask)


@triton.jit
def advance(
    lr, step, lrs, moments, constants, H, WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr
):  # fmt: skip
    """Count one more step: its learning rate, and its term in the moments of the steps before it, whose nodes follow
    from them."""
    t = tl.load(step) + 1
    rate = tl.load(lr)
    if CLOSED:
        log1, log2 = tl.load(constants + LOG_BETA1), tl.load(constants + LOG_BETA2)
        j = 1 + tl.arange(0, WINDOW)
        since = t - j
        valid = (since >= 0) & (j <= tl.load(constants + WINDOW_LENGTH).to(tl.int64))
        since = tl.where(valid, since, 0)
        a = rate * power(log1, j) / (1 - power(log1, t))
        d = tl.sqrt(1 - power(log2, t))
        if not AMSGRAD:
            d = d * tl.exp2(-0.5 * j * log2)
        scale = first_root(since, constants, AMSGRAD)
        u = d / scale - 1
        entry = moments + (since % H) * MOMENT_COLUMNS
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
        tl.store(moments + (t % H) * MOMENT_COLUMNS + blank, tl.zeros((MOMENT_COLUMNS,), tl.float64))
    tl.debug_barrier()
    tl.store(lrs + t % H, rate)
    tl.store(step, t)


def catch_up_(
    batch: IdBatch,
    stored: Tensor,
    state: AdamState,
    layout: Layout,
    *,
    rule: str,
    constants: AdamConstants,
    rounding_seed: int | None = None,
) -> Any:
    """``ops.replay.catch_up_`` in one launch, including the rows that each step brings up to date in turn."""
    host = fused_layout(stored, layout, whole_rows=True) if RULES[rule].fused else None
    if host is None:
        return NotImplemented
    batch = batch.contiguous()
    ids, offsets, *_ = batch
    reads = ids.shape[0]
    size = reads if offsets is None else (offsets.shape[0] - 1) // layout.spans.shape[0]

    def launches() -> None:
        highest = state.exp_avg_sq if state.max_exp_avg_sq is None else state.max_exp_avg_sq
        check_state(stored, state.exp_avg, state.exp_avg_sq, highest, last=state.last)
        (num_slots, k, _), (num_rows, width) = layout.parts.shape, stored.shape
        history, columns = state.lrs.shape[0], power_of_2(width)
        listing = reads >= MANY_READS
        block = max(1, min(64 if listing else 128, 2048 // columns))
        each = 1024 if listing else block
        reading, in_turn = cdiv(reads, each) * num_slots * k, cdiv(2 * num_rows, history)
        programs = reading + cdiv(in_turn, each)
        rows = steps = None
        if listing:
            rows = scratch(stored, programs * each, dtype=row_dtype(stored))
            steps = scratch(stored, programs * each, dtype=torch.int32)
        launch(
            catch_up_kernel, (programs,),
            ids, offsets, stored, state.exp_avg, state.exp_avg_sq, highest, state.last, state.step, state.lrs,
            state.moments, on_device(constants, stored.device), rows, steps,
            *host.integers(), size, batch.stride, num_rows, history, in_turn, reading,
            seed_bits(None if rounding_seed is None else ~rounding_seed), W=width, S=num_slots, K=k,
            N=each, T=block, C=columns, ACC=TYPES[stored.dtype], JAGGED=batch.jagged,
            AMSGRAD=state.max_exp_avg_sq is not None, CLOSED=len(state.moments) > 0, **host.row_flags,
            ROUNDED=rounds(stored, rounding_seed), num_warps=4,
        )  # fmt: skip

    types = (ids.dtype, stored.dtype, None if offsets is None else offsets.dtype)
    shapes = (stored.shape, state.exp_avg.shape, state.lrs.shape, state.moments.shape)
    key = ("catch up", *constants, rounding_seed, size, batch.stride, reads, *shapes, *types)
    given = (ids,) if offsets is None else (ids, offsets)
    planned(host.plans, key, (stored, *present(state)), given, launches)
    return None

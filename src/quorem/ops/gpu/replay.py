"""The steps that rows of Adam and AMSGrad have missed, taken in one launch just before the rows are read.

``ops.replay`` explains the sums and is the plain version. Of the reads of one row, the first to raise its ``last`` to
the present step takes its missed steps; the lookup is another launch, so all its reads see the row up to date.
"""

from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .constants import on_device, power
from .host import on_host
from .index import TYPES, base_of, is_valid, part_at, read_ids, row_of, slot_at
from .launch import cdiv, launch, planned, power_of_2


@dataclass(frozen=True)
class Times:
    """The times of ``ops.replay`` with what a kernel needs to advance them; empty for a rule that has none."""

    tensors: tuple[Tensor | None, ...] = (None,) * 5  # lr, step, lrs, moments, hyper
    history: int = 1
    constants: dict[str, Any] = field(default_factory=lambda: {"WINDOW": 1, "AMSGRAD": False, "CLOSED": False})


def times_of(lr: Tensor, state: list[Tensor], hyper: list[float], amsgrad: bool) -> Times:
    """The times in the ``state`` of a rule."""
    step, lrs, moments = state[-3:]
    window = power_of_2(max(int(hyper[3]), 1))
    constants = {"WINDOW": window, "AMSGRAD": amsgrad, "CLOSED": len(moments) > 0}
    return Times((lr, step, lrs, moments, on_device(tuple(hyper), lr.device)), len(lrs), constants)


@triton.jit
def first_root(since, hyper, AMSGRAD: tl.constexpr):
    """d_1."""
    d = tl.sqrt(1 - power(tl.load(hyper + 6), since + 1))
    if not AMSGRAD:
        d = d / tl.sqrt(tl.load(hyper + 1))
    return d


@triton.jit
def term(a, d, root, eps):
    """``a d / (root + eps d)``, for each row's a and d."""
    d = d.to(root.dtype)[:, None]
    return a.to(root.dtype)[:, None] * d / (root + eps.to(root.dtype) * d)


@triton.jit
def catch_up_kernel(
    ids, offsets, weight, exp_avg, exp_avg_sq, root_sq, last, step, lrs, moments, hyper, slots, parts, maps,
    B, id_stride, R, H, turn, reading,
    W: tl.constexpr, S: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    JAGGED: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr,
):  # fmt: skip
    """T reads of one pair, or T of the ``turn`` rows whose turn it is: take the steps that their rows have missed."""
    now = tl.load(step)
    if tl.program_id(0) < reading:
        pair = tl.program_id(0) % (S * K)
        n = (tl.program_id(0) // (S * K)).to(tl.int64) * T + tl.arange(0, T)
        slot = slot_at(slots, pair // K)
        i, _ = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
        valid = is_valid(i, slot) & (base_of(part_at(parts, pair)) >= 0)
        row, _ = row_of(tl.where(valid, i, 0), slot, part_at(parts, pair), maps)
    else:
        n = (tl.program_id(0) - reading).to(tl.int64) * T + tl.arange(0, T)
        valid = n < turn
        row = (now * turn + n) % R
    row = tl.where(valid, row, 0)
    seen = tl.load(last + row, mask=valid, other=0)
    due = valid & (seen > 0) & (seen < now)
    if tl.max(due.to(tl.int32)) > 0:
        raised = tl.atomic_max(last + row, tl.zeros((T,), tl.int32) + now.to(tl.int32), mask=due, sem="relaxed")
        behind = due & (raised < now)
        since = tl.where(behind, raised, 1).to(tl.int64)
        gap = tl.where(behind, now - since, 0)
        eps, log1, log2 = tl.load(hyper + 2), tl.load(hyper + 5), tl.load(hyper + 6)
        columns = tl.arange(0, C)
        mask = behind[:, None] & (columns < W)[None, :]
        here = row[:, None] * W + columns[None, :]
        root = tl.sqrt(tl.load(root_sq + here, mask=mask, other=1))
        total = tl.zeros((T, C), ACC)
        slow = behind
        if CLOSED:
            slow = behind & (since.to(tl.float64) < tl.load(hyper + 4))
            at = moments + (since % H) * 8
            for node in tl.static_range(2):
                mass = tl.load(at + 4 + 2 * node, mask=behind, other=0)
                total += term(mass, tl.load(at + 5 + 2 * node, mask=behind, other=1), root, eps)
            total = tl.where(slow[:, None], 0, total)
        most = tl.minimum(tl.max(tl.where(slow, gap, 0)), tl.load(hyper + 3).to(tl.int64))
        for j in range(1, most + 1):
            t = since + j
            a = tl.load(lrs + t % H, mask=slow & (j <= gap), other=0) * power(log1, j) / (1 - power(log1, t))
            d = tl.sqrt(1 - power(log2, t))
            if not AMSGRAD:
                d = d * tl.exp2(-0.5 * j * log2)
            total += term(a, d, root, eps)
        m = tl.load(exp_avg + here, mask=mask, other=0)
        w = tl.load(weight + here, mask=mask, other=0).to(ACC) - m * total
        v = tl.load(exp_avg_sq + here, mask=mask, other=0) * power(log2, gap).to(ACC)[:, None]
        tl.debug_barrier()  # AMSGrad aside, root_sq is exp_avg_sq
        tl.store(weight + here, w.to(weight.dtype.element_ty), mask=mask)
        tl.store(exp_avg + here, m * power(log1, gap).to(ACC)[:, None], mask=mask)
        tl.store(exp_avg_sq + here, v, mask=mask)


@triton.jit
def advance(
    lr, step, lrs, moments, hyper, H, WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr
):  # fmt: skip
    """Enter one more step into the times: its learning rate, and its term into the moments of the steps before it,
    whose nodes follow."""
    now = tl.load(step) + 1
    rate = tl.load(lr)
    if CLOSED:
        log1, log2 = tl.load(hyper + 5), tl.load(hyper + 6)
        j = 1 + tl.arange(0, WINDOW)
        since = now - j
        valid = (since >= 0) & (j <= tl.load(hyper + 3).to(tl.int64))
        since = tl.where(valid, since, 0)
        a = rate * power(log1, j) / (1 - power(log1, now))
        d = tl.sqrt(1 - power(log2, now))
        if not AMSGRAD:
            d = d * tl.exp2(-0.5 * j * log2)
        scale = first_root(since, hyper, AMSGRAD)
        u = d / scale - 1
        at = moments + (since % H) * 8
        mass = tl.load(at, mask=valid, other=0) + a
        first = tl.load(at + 1, mask=valid, other=0) + a * u
        second = tl.load(at + 2, mask=valid, other=0) + a * u * u
        third = tl.load(at + 3, mask=valid, other=0) + a * u * u * u
        tl.store(at, mass, mask=valid)
        tl.store(at + 1, first, mask=valid)
        tl.store(at + 2, second, mask=valid)
        tl.store(at + 3, third, mask=valid)
        safe = tl.where(mass > 0, mass, 1)
        mean, second, third = first / safe, second / safe, third / safe
        variance = tl.maximum(second - mean * mean, 0)
        apart = variance > 1e-14  # else rounding is all there is to see, and one node is exact
        skew = (third - 3 * mean * second + 2 * mean * mean * mean) / (2 * tl.where(apart, variance, 1))
        half = tl.where(apart, skew, 0)
        reach = tl.where(apart, tl.sqrt(variance + half * half), 1)
        tl.store(at + 4, mass * (reach - half) / (2 * reach), mask=valid)
        tl.store(at + 5, scale * (1 + mean + tl.where(apart, half + reach, 0)), mask=valid)
        tl.store(at + 6, mass * (reach + half) / (2 * reach), mask=valid)
        tl.store(at + 7, scale * (1 + mean + tl.where(apart, half - reach, 0)), mask=valid)
        tl.store(moments + (now % H) * 8 + tl.arange(0, 8), tl.zeros((8,), tl.float64))
    tl.debug_barrier()
    tl.store(lrs + now % H, rate)
    tl.store(step, now)


@triton.jit
def advance_kernel(
    lr, step, lrs, moments, hyper, H, WINDOW: tl.constexpr, AMSGRAD: tl.constexpr, CLOSED: tl.constexpr
):  # fmt: skip
    """One program: ``advance`` alone."""
    advance(lr, step, lrs, moments, hyper, H, WINDOW, AMSGRAD, CLOSED)


def advance_(times: Times) -> None:
    """``ops.replay.advance_`` in one launch, where there is no gradient."""
    launch(advance_kernel, (1,), *times.tensors, times.history, **times.constants)


def catch_up_(
    ids: Tensor, offsets: Tensor | None, weight: Tensor, state: list[Tensor], hyper: list[float], *integers: Tensor
) -> None:
    """``ops.update``'s catch-up of the rows that ``ids`` read, and of the rows whose turn it is."""
    slots, parts, maps, spans = integers
    *averages, last, step, lrs, moments = state
    (num_slots, k, _), (num_rows, width), jagged = parts.shape, weight.shape, offsets is not None
    reads, history = ids.shape[0], lrs.shape[0]
    batch = (offsets.shape[0] - 1) // spans.shape[0] if offsets is not None else reads
    columns = power_of_2(width)
    block = max(1, min(64, 1024 // columns))
    reading = cdiv(reads, block) * num_slots * k
    turn = cdiv(2 * num_rows, history)
    stride = 1 if jagged else ids.stride(0)
    constants = on_device(tuple(hyper), weight.device)

    def launches() -> None:
        launch(
            catch_up_kernel, (reading + cdiv(turn, block),),
            ids, offsets, weight, averages[0], averages[1], averages[-1], last, step, lrs, moments, constants, slots,
            parts, maps, batch, stride, num_rows, history, turn, reading,
            W=width, S=num_slots, K=k, T=block, C=columns, ACC=TYPES[weight.dtype],
            JAGGED=jagged, AMSGRAD=len(averages) == 3, CLOSED=len(moments) > 0, num_warps=2,
        )  # fmt: skip

    types = (ids.dtype, weight.dtype, None if offsets is None else offsets.dtype)
    key = ("catch up", batch, stride, reading, history, len(moments), weight.shape, *types)
    given = (ids,) if offsets is None else (ids, offsets)
    planned(on_host(*integers).plans, key, (weight, *state, constants, slots, parts, maps), given, launches)

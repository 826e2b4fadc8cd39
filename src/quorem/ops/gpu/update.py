"""The optimizers' rules: after ``gather``, one launch updates each touched row once by its summed gradient.

``ops.update`` lists the state and the constants of each rule; ``ops.rules`` is the plain version.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rules
from . import replay
from .constants import on_device, power
from .gather import gather, rows_and_sums, run_of
from .host import on_host
from .index import TYPES
from .launch import cdiv, launch, planned, power_of_2
from .places import bucket

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "amsgrad")
WIDEST = 512  # columns a program holds at a time


@triton.jit
def pace(lr, t, hyper, RULE: tl.constexpr):
    """What ``move`` needs of step ``t``, counted from 1: learning rate, and root of Adam's second correction."""
    rate = tl.load(lr)
    root = rate
    if RULE == "adagrad":
        rate = rate / (1 + (t - 1).to(tl.float64) * tl.load(hyper))
    elif RULE == "adam" or RULE == "amsgrad":
        rate = rate / (1 - power(tl.load(hyper + 5), t))
        root = tl.sqrt(1 - power(tl.load(hyper + 6), t))
    return rate, root


@triton.jit
def move(
    weight, state0, state1, state2, here, mask, g, rate, root, hyper, RULE: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """A step of a rule on the elements ``here``, whose gradients are ``g``.

    Several threads may hold the same element: a barrier stands between the loads and the stores.
    """
    w = tl.load(weight + here, mask=mask, other=0).to(ACC)
    if RULE == "sgd":
        w -= rate.to(ACC) * g
        tl.debug_barrier()
    elif RULE == "adagrad":
        h = tl.load(state0 + here, mask=mask, other=0) + g * g
        w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(hyper + 1).to(ACC))
        tl.debug_barrier()
        tl.store(state0 + here, h, mask=mask)
    else:
        beta1, beta2 = tl.load(hyper), tl.load(hyper + 1)
        m = tl.load(state0 + here, mask=mask, other=0)
        m += (g - m) * (1 - beta1).to(ACC)
        v = tl.load(state1 + here, mask=mask, other=0) * beta2.to(ACC) + g * g * (1 - beta2).to(ACC)
        most = v
        if RULE == "amsgrad":
            most = tl.maximum(tl.load(state2 + here, mask=mask, other=0), v)
        w -= rate.to(ACC) * m / (tl.sqrt(most) / root.to(ACC) + tl.load(hyper + 2).to(ACC))
        tl.debug_barrier()
        tl.store(state0 + here, m, mask=mask)
        tl.store(state1 + here, v, mask=mask)
        if RULE == "amsgrad":
            tl.store(state2 + here, most, mask=mask)
    tl.store(weight + here, w.to(weight.dtype.element_ty), mask=mask)


@triton.jit
def update_kernel(
    ids, offsets, sums, claims, places, weight, lr, state0, state1, state2, last, step, hyper, loss_scale, clip_value,
    slots, parts, maps, B, id_stride, first_pair, pairs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, JAGGED: tl.constexpr,
    RULE: tl.constexpr, CLIPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """T places of one pair: the rule, on their rows. ``step`` counts this step already."""
    pair = first_pair + tl.program_id(0) % pairs
    block = tl.program_id(0) // pairs
    if block.to(tl.int64) * T < run_of(places, pair)[1]:
        row, active, g = rows_and_sums(
            ids, offsets, sums, claims, places, pair, block, slots, parts, maps, B, id_stride, W, K, T, C, JAGGED
        )
        columns = tl.arange(0, C)
        here = row[:, None] * W + columns[None, :]
        if SCALED:
            g = g / tl.load(loss_scale).to(ACC)
            finite = tl.min((tl.abs(g) < float("inf")).to(tl.int32), 1) == 1  # a NaN is not less either
            g = tl.where(finite[:, None], g, 0)
        if CLIPPED:
            g = tl.where(g != g, g, tl.minimum(tl.maximum(g, -clip_value), clip_value))
        if RULE == "adam" or RULE == "amsgrad":
            active = active & (tl.max((g != 0).to(tl.int32), 1) == 1)  # a zero gradient is a step owed, like any other
        mask = active[:, None] & (columns < W)[None, :]
        if RULE == "rowwise_adagrad":
            rate, _ = pace(lr, tl.load(step), hyper, "adagrad")
            w = tl.load(weight + here, mask=mask, other=0).to(ACC)
            h = tl.load(state0 + row, mask=active, other=0) + tl.sum(g * g, 1) / W
            tl.debug_barrier()  # as in rows_and_sums: several threads hold the same row
            tl.store(state0 + row, h, mask=active)
            w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(hyper + 1).to(ACC))[:, None]
            tl.store(weight + here, w.to(weight.dtype.element_ty), mask=mask)
        else:
            t = tl.full((), 1, tl.int64)
            if RULE != "sgd":
                t = tl.load(step)
            if RULE == "adam" or RULE == "amsgrad":
                tl.store(last + row, t.to(tl.int32), mask=active)
            rate, root = pace(lr, t, hyper, RULE)
            move(weight, state0, state1, state2, here, mask, g, rate, root, hyper, RULE, ACC)


def lookup_update_(
    grad: Tensor, ids: Tensor, weight: Tensor, lr: Tensor, state: list[Tensor], *integers: Tensor, **options: Any
) -> Any:
    """``ops.update.lookup_update_`` fused."""
    return bag_update_(grad, ids, None, None, weight, lr, state, *integers, **options)


def bag_update_(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor,
    lr: Tensor,
    state: list[Tensor],
    *integers: Tensor,
    rule: str,
    hyper: list[float],
    mean: bool = False,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> Any:
    """``ops.update.bag_update_`` fused, or ``lookup_update_`` without offsets."""
    slots, parts, maps, _ = integers
    if rule not in RULES or weight.shape[1] > WIDEST or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    host = on_host(*integers)
    if rule == "rowwise_adagrad" and host.kinds["PITCHED"]:
        return NotImplemented
    adam = rule in rules.OWING
    averages = state[: len(state) - 4] if adam else state[:1]
    last, step = (state[-4], state[-3]) if adam else (None, state[1] if state else None)
    times = replay.times_of(lr, state, hyper, rule == "amsgrad") if adam else None
    if not grad.numel() or not ids.numel():
        if times is not None:
            replay.advance_(times)
        elif step is not None:
            step += 1
        return None
    grad, ids, batch = grad.contiguous(), ids.contiguous(), grad.shape[0]
    jagged, clipped = offsets is not None, clip_value is not None

    def launches() -> None:
        width = weight.shape[1]
        columns = power_of_2(width)
        block = max(1, min(128, 2048 // columns))
        constants = on_device(tuple(hyper), weight.device)
        counted = None if adam else step
        passes = gather(grad, ids, offsets, sample_weights, weight, *integers, mean=mean, step=counted, times=times)
        for sums, claims, places, now in passes:
            launch(
                update_kernel, (now.pairs * cdiv(places.longest, block),),
                ids, offsets, sums, claims, places.table, weight, lr, *(averages + [None] * 3)[:3], last, step,
                constants, loss_scale, clip_value or 0.0, slots, parts, maps, batch,
                1 if jagged else ids.shape[1], now.first, now.pairs, W=width, K=parts.shape[1], T=block, C=columns,
                ACC=TYPES[weight.dtype], JAGGED=jagged, RULE=rule, CLIPPED=clipped, SCALED=loss_scale is not None,
                num_warps=4,
            )  # fmt: skip

    size = bucket(ids.shape[0]) if jagged else ids.shape[1]
    types = [t if t is None else t.dtype for t in (weight, grad, ids, offsets, sample_weights, loss_scale)]
    key = ("update", rule, *hyper, clip_value, mean, batch, size, weight.shape[1], *types)
    given = [tensor for tensor in (grad, ids, offsets, sample_weights) if tensor is not None]
    known = (weight, lr, *state, loss_scale, slots, parts, maps)
    planned(host.plans, key, known, given, launches)
    return None


def lookup_catch_up_(ids: Tensor, weight: Tensor, state: list[Tensor], *integers: Tensor, **options: Any) -> Any:
    """``ops.update.lookup_catch_up_`` fused."""
    return bag_catch_up_(ids, None, weight, state, *integers, **options)


def bag_catch_up_(
    ids: Tensor,
    offsets: Tensor | None,
    weight: Tensor,
    state: list[Tensor],
    *integers: Tensor,
    rule: str,
    hyper: list[float],
) -> Any:
    """``ops.update.bag_catch_up_`` fused, or ``lookup_catch_up_`` without offsets."""
    if weight.shape[1] > WIDEST:
        return NotImplemented
    return replay.catch_up_(ids.contiguous(), offsets, weight, state, hyper, *integers)

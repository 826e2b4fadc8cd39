"""The optimizers' rules: after ``row_sums.sum_by_row``, one launch updates each touched row once, by its sum.

``ops.rules`` is the plain reference; ``ops.state`` lists the state and the constants of each rule.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .. import replay as truth_replay
from ..layout import Layout
from ..rows import IdBatch
from ..state import RULES, Constants, State, present
from . import replay
from .constants import ADAGRAD_EPS, BETA1, BETA2, EPS, LOG_BETA1, LOG_BETA2, LR_DECAY, on_device, power
from .fast_launch import planned
from .host import check_state, fused_layout
from .launch import launch, power_of_2
from .places import rounded_up
from .rounding import as_stored, as_sum, load_sum, rounds, seed_bits
from .row_sums import run_of, sum_by_row, sums_of, touched_rows
from .rows import TYPES


class RuleState(NamedTuple):
    """An optimizer's state, as the kernel takes it."""

    step: Tensor
    last: Tensor | None  # of rules under which rows lag behind
    average0: Tensor | None
    average1: Tensor | None
    average2: Tensor | None


@triton.jit
def update_kernel(
    sums, stored, lr, state, constants, loss_scale, clip_value, seed, parts, num_pairs, direct, claiming,
    W: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """A run of places, T at a time: the rule, on their rows. ``step`` counts this step already."""
    pair, begin, end, by, used = run_of(tl.program_id(0), sums, num_pairs, direct, claiming, T)
    t = tl.full((), 1, tl.int64)
    if RULE != "sgd" or ROUNDED:
        t = tl.load(state.step)
    rate = tl.load(lr)
    root = rate  # of Adam's second correction
    if RULE == "adagrad" or RULE == "rowwise_adagrad":
        rate = rate / (1 + (t - 1).to(tl.float64) * tl.load(constants + LR_DECAY))
    elif RULE != "sgd":
        rate = rate / (1 - power(tl.load(constants + LOG_BETA1), t))
        root = tl.sqrt(1 - power(tl.load(constants + LOG_BETA2), t))
    columns = tl.arange(0, C)
    for block in range(begin, end, by):
        n = tl.full((), T, tl.int64) * block + tl.arange(0, T)
        active = n < used
        row, place = touched_rows(n, used, pair, sums, parts)
        g = sums_of(sums, pair, place, active, W, C)
        elements = row[:, None] * W + columns[None, :]
        if loss_scale is not None:
            g = g / tl.load(loss_scale).to(ACC)
            finite = tl.min((tl.abs(g) < float("inf")).to(tl.int32), 1) == 1  # a NaN is not less either
            g = tl.where(finite[:, None], g, 0)
        if clip_value is not None:
            g = tl.where(g != g, g, tl.minimum(tl.maximum(g, -clip_value), clip_value))
        if RULE == "adam" or RULE == "amsgrad":  # a row whose gradient is zero lags behind, like one that was not read
            active = active & (tl.max((g != 0).to(tl.int32), 1) == 1)
            tl.store(state.last + row, t.to(tl.int32), mask=active)
        mask = active[:, None] & (columns < W)[None, :]
        w = tl.load(stored + elements, mask=mask, other=0).to(ACC)
        # Several threads may hold the same element: a barrier stands between the loads and the stores.
        if RULE == "sgd":
            w -= rate.to(ACC) * g
            tl.debug_barrier()
        elif RULE == "adagrad":
            h = load_sum(state.average0, elements, mask) + g * g
            w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(constants + ADAGRAD_EPS).to(ACC))
            tl.debug_barrier()
            tl.store(state.average0 + elements, as_sum(h, state.average0, elements, t - 1, seed), mask=mask)
        elif RULE == "rowwise_adagrad":
            h = tl.load(state.average0 + row, mask=active, other=0) + tl.sum(g * g, 1) / W
            w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(constants + ADAGRAD_EPS).to(ACC))[:, None]
            tl.debug_barrier()
            tl.store(state.average0 + row, h, mask=active)
        else:
            beta1, beta2 = tl.load(constants + BETA1), tl.load(constants + BETA2)
            m = tl.load(state.average0 + elements, mask=mask, other=0)
            m += (g - m) * (1 - beta1).to(ACC)
            v = tl.load(state.average1 + elements, mask=mask, other=0) * beta2.to(ACC) + g * g * (1 - beta2).to(ACC)
            highest = v
            if RULE == "amsgrad":
                highest = tl.maximum(tl.load(state.average2 + elements, mask=mask, other=0), v)
            w -= rate.to(ACC) * m / (tl.sqrt(highest) / root.to(ACC) + tl.load(constants + EPS).to(ACC))
            tl.debug_barrier()
            tl.store(state.average0 + elements, m, mask=mask)
            tl.store(state.average1 + elements, v, mask=mask)
            if RULE == "amsgrad":
                tl.store(state.average2 + elements, highest, mask=mask)
        tl.store(stored + elements, as_stored(w, stored, elements, t - 1, seed, ROUNDED), mask=mask)


def update_(
    grad: Tensor,
    batch: IdBatch,
    stored: Tensor,
    lr: Tensor,
    state: State,
    layout: Layout,
    *,
    rule: str,
    constants: Constants,
    rounding_seed: int | None = None,
    clip_value: float | None = None,
    loss_scale: Tensor | None = None,
) -> Any:
    """``ops.rules.update_`` in three launches."""
    host = fused_layout(stored, layout, whole_rows=True, any_order=True) if RULES[rule].fused else None
    by_table_row = rule == "rowwise_adagrad" or loss_scale is not None  # what one row gets depends on all its pieces
    if host is None or (by_table_row and host.flags.pitched):
        return NotImplemented
    lagging, step = RULES[rule].lags, state.step
    if not grad.numel() or not batch.ids.numel():
        if lagging:
            truth_replay.advance_(lr, state, constants)
        else:
            step += 1
        return None
    grad, batch = grad.contiguous(), batch.contiguous()
    averages: list[Tensor | None] = [getattr(state, name) for name in RULES[rule].averages]
    averages += [None] * (3 - len(averages))

    def launches() -> None:
        last = getattr(state, "last", None)
        check_state(stored, *averages, last=last)
        width = stored.shape[1]
        columns = power_of_2(width)
        block = max(1, min(128, 2048 // columns))
        counted = (None, lr, replay.history_of(state, constants)) if lagging else (step,)
        sums, places = sum_by_row(grad, batch, stored, layout, host, *counted)
        programs = places.programs(block)
        launch(
            update_kernel, (sum(programs),),
            sums, stored, lr, RuleState(step, last, *averages), on_device(constants, stored.device), loss_scale,
            clip_value, seed_bits(rounding_seed), host.on_device.parts, len(places.table), *programs,
            W=width, T=block, C=columns, ACC=TYPES[stored.dtype], RULE=rule, ROUNDED=rounds(stored, rounding_seed),
            num_warps=8,
        )  # fmt: skip

    ids, offsets, sample_weights, mean = batch
    if offsets is None:
        reads, given, types = ids.shape[1], (grad, ids), (ids.dtype,)
    else:
        reads = rounded_up(len(ids))
        given = (grad, ids, offsets) if sample_weights is None else (grad, ids, offsets, sample_weights)
        types = tuple(tensor.dtype for tensor in given[1:])
    fixed = (stored, lr, *present(state))
    if loss_scale is not None:
        fixed, types = (*fixed, loss_scale), (*types, loss_scale.dtype)
    # The shape of the state is in the key, since ``check_state`` runs only when a plan is made.
    about_state = None if averages[0] is None else (averages[0].shape, averages[0].dtype)
    sizes = (grad.shape[0], reads, stored.shape, about_state, stored.dtype, grad.dtype)
    key = ("update", rule, *constants, rounding_seed, clip_value, mean, *sizes, *types)
    planned(host.plans, key, fixed, given, launches)
    return None

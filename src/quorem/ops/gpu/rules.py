"""The optimizers' rules: after ``row_sums.sum_by_row``, one launch updates each touched row once, by its sum.

``ops.rules`` is the plain reference; ``ops.state`` lists the state and the constants of each rule.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch
from ..state import RowRule, present
from . import replay
from .host import check_state, fused_layout
from .launch import launch, planned, power_of_2
from .lookup import MANY_VECTORS
from .places import rounded_up
from .replay import ADAGRAD_EPS, BETA1, BETA2, EPS, LOG_BETA1, LOG_BETA2, LR_DECAY, on_device, power
from .rounding import as_stored, as_sum, load_sum, rounds, seed_bits
from .row_sums import run_of, sum_by_row, summed_rows
from .rows import TYPES, DeviceBatch


@triton.jit
def update_kernel(
    sums, stored, lr, state, constants, seed, runs,
    W: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, RULE: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """A run of places, T at a time: the rule, on their rows. ``step`` counts this step already."""
    pair, begin, end, by, used = run_of(tl.program_id(0), sums, runs, T)
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
    for block in range(begin, end, by):
        row, some, g = summed_rows(block, used, pair, sums, W, T, C)
        active = some & (tl.max((g != 0).to(tl.int32), 1) == 1)  # a direct place may be one of a row that is not read
        if RULE == "adam":
            tl.store(state.last + row, t.to(tl.int32), mask=active)
        columns = tl.arange(0, C)
        # At most four numbers a thread, of all types: so no kernel moves numbers between threads.
        elements = tl.max_contiguous(row[:, None] * W + columns[None, :], (1, 4 if C >= 4 else C))
        mask = active[:, None] & (columns < W)[None, :]
        w = tl.load(stored + elements, mask=mask, other=0).to(ACC)
        # Several threads may hold the same element: a barrier stands between the loads and the stores.
        if RULE == "sgd":
            w -= rate.to(ACC) * g
            tl.debug_barrier()
        elif RULE == "adagrad":
            h = load_sum(state.sum, elements, mask) + g * g
            w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(constants + ADAGRAD_EPS).to(ACC))
            tl.debug_barrier()
            tl.store(state.sum + elements, as_sum(h, state.sum, elements, t - 1, seed), mask=mask)
        elif RULE == "rowwise_adagrad":
            h = tl.load(state.sum + row, mask=active, other=0) + tl.sum(g * g, 1) / W
            w -= rate.to(ACC) * g / (tl.sqrt(h) + tl.load(constants + ADAGRAD_EPS).to(ACC))[:, None]
            tl.debug_barrier()
            tl.store(state.sum + row, h, mask=active)
        else:
            beta1, beta2 = tl.load(constants + BETA1), tl.load(constants + BETA2)
            m = tl.load(state.exp_avg + elements, mask=mask, other=0)
            m += (g - m) * (1 - beta1).to(ACC)
            v = tl.load(state.exp_avg_sq + elements, mask=mask, other=0) * beta2.to(ACC) + g * g * (1 - beta2).to(ACC)
            highest = v
            if state.max_exp_avg_sq is not None:
                highest = tl.maximum(tl.load(state.max_exp_avg_sq + elements, mask=mask, other=0), v)
            w -= rate.to(ACC) * m / (tl.sqrt(highest) / root.to(ACC) + tl.load(constants + EPS).to(ACC))
            tl.debug_barrier()
            tl.store(state.exp_avg + elements, m, mask=mask)
            tl.store(state.exp_avg_sq + elements, v, mask=mask)
            if state.max_exp_avg_sq is not None:
                tl.store(state.max_exp_avg_sq + elements, highest, mask=mask)
        tl.store(stored + elements, as_stored(w, stored, elements, t - 1, seed, ROUNDED), mask=mask)


def update_(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout, rule: RowRule) -> Any:
    """``ops.rules.update_`` in three launches."""
    entry, state, constants, lr, seed = rule.entry, rule.state, rule.constants, rule.lr, rule.rounding_seed
    host = fused_layout(stored, layout, whole_rows=True, any_order=True) if entry.fused else None
    is_empty = not grad.numel() or not batch.ids.numel()
    if host is None or is_empty or (entry.by_row and host.flags.pitched):  # one sum for all pieces of a row
        return NotImplemented
    grad, ids = grad.contiguous(), DeviceBatch.of(batch, layout.spans.shape[0])

    def launches() -> None:
        check_state(stored, *(getattr(state, name) for name in entry.averages), last=getattr(state, "last", None))
        width = stored.shape[1]
        columns = power_of_2(width)
        numbers = 2048 if grad.shape[0] * host.num_slots >= MANY_VECTORS else 1024  # that a program updates at a time
        block = max(1, min(128, numbers // columns))
        counted: dict[str, Any] = {"step": state.step}
        if entry.lags:
            window = power_of_2(max(int(constants.window), 1))
            counted = {"lr": lr, "history": replay.history_of(state, constants), "window": window}
        sums, runs = sum_by_row(grad, ids, stored, host, batch.mean, block, **counted)
        launch(
            update_kernel, (runs.direct + runs.claiming,),
            sums, stored, lr, state, on_device(constants, stored.device), seed_bits(seed), runs,
            W=width, T=block, C=columns, ACC=TYPES[stored.dtype], RULE=entry.kernel, ROUNDED=rounds(stored, seed),
            num_warps=8,
        )  # fmt: skip

    reads, given = ids.stride if ids.offsets is None else rounded_up(ids.ids.shape[0]), present((grad, *ids[:3]))
    # The shape of the state is in the key, since ``check_state`` runs only when a plan is made.
    about_rows = (stored.shape, stored.dtype, state[0].shape, state[0].dtype)
    key = ("update", rule.name, *constants, seed, batch.mean, len(given), grad.shape[0], reads, *about_rows)
    planned(host.plans, key, (stored, lr, *present(state)), given, launches)
    return None

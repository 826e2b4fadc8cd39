"""Gradients of the stored rows and of sample weights.

For the dense gradient of the rows, ``row_sums`` sums the gradients, and one more launch writes the sums into it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch
from .host import fused_layout
from .launch import cdiv, launch, power_of_2
from .lookup import bag_tile, composed
from .row_sums import run_of, sum_by_row, sums_of, touched_rows
from .rows import TYPES, DeviceBatch, bags_at, is_valid, slot_at


@triton.jit
def dense_kernel(
    sums, dense, parts, num_pairs, direct, claiming, W: tl.constexpr, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A run of places, T at a time: write their sums into the dense gradient."""
    pair, begin, end, by, used = run_of(tl.program_id(0), sums, num_pairs, direct, claiming, T)
    columns = tl.arange(0, C)
    for block in range(begin, end, by):
        n = tl.full((), T, tl.int64) * block + tl.arange(0, T)
        row, place = touched_rows(n, used, pair, sums, parts)
        g = sums_of(sums, pair, place, n < used, W, C)
        mask = (n < used)[:, None] & (columns < W)[None, :]
        tl.store(dense + row[:, None] * W + columns[None, :], g.to(dense.dtype.element_ty), mask=mask)


@triton.jit
def sample_weights_kernel(
    grad, batch, stored, out, layout, spans, S, F, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, MEAN: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T bags of one feature: the product of each id's composed vector with its bag's gradient."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    first = tl.load(spans + 2 * feature)
    slot = slot_at(layout.slots, first)
    start, length = bags_at(batch, feature, n)
    longest = tl.max(length)
    count = tl.zeros((T,), tl.int32)
    if MEAN:
        for nth in range(0, longest):
            count += is_valid(tl.load(batch.ids + start + nth, mask=nth < length, other=-1), slot).to(tl.int32)
    for nth in range(0, longest):
        inside = nth < length
        i = tl.load(batch.ids + start + nth, mask=inside, other=-1)
        valid = is_valid(i, slot)
        i = tl.where(valid, i, 0)
        total = tl.zeros((T,), ACC)
        for s in range(first, first + tl.load(spans + 2 * feature + 1)):
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                x = composed(i, valid, stored, None, s, layout, columns, c, W, K, C, ACC, FLAGS, 0)
                mask = valid[:, None] & (columns < W)[None, :]
                g = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
                total += tl.sum(x * g, 1)
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)
        tl.store(out + start + nth, total.to(out.dtype.element_ty), mask=inside)


def backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Any:
    """``ops.gradients.backward`` in three launches."""
    host = fused_layout(stored, layout, whole_rows=True, any_order=True)
    if host is None:
        return NotImplemented
    grad, batch, dense = grad.contiguous(), batch.contiguous(), torch.zeros_like(stored)
    if grad.numel() and batch.ids.numel():
        width = stored.shape[1]
        columns = power_of_2(width)
        block = max(1, 1024 // columns)
        sums, places = sum_by_row(grad, batch, stored, layout, host)
        programs = places.programs(block)
        launch(
            dense_kernel, (sum(programs),), sums, dense, host.on_device.parts, len(places.table), *programs,
            W=width, T=block, C=columns,
        )  # fmt: skip
    return dense


def sample_weights_backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Any:
    """``ops.gradients.sample_weights_backward`` in one launch."""
    host = fused_layout(stored, layout)
    if host is None:
        return NotImplemented
    batch = batch.contiguous()
    out = torch.zeros(batch.ids.shape, dtype=grad.dtype, device=grad.device)
    if grad.numel() and batch.ids.numel():
        block, columns, warps = bag_tile(stored.shape[1])
        launch(
            sample_weights_kernel, (cdiv(len(grad), block) * len(layout.spans),),
            grad.contiguous(), DeviceBatch.of(batch, len(grad)), stored, out, host.on_device, host.device_spans,
            host.num_slots, len(layout.spans), W=stored.shape[1], K=layout.parts.shape[1], T=block, C=columns,
            ACC=TYPES[stored.dtype], MEAN=batch.mean, FLAGS=host.row_flags, num_warps=warps,
        )  # fmt: skip
    return out

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
from .lookup import bag_tile, combined
from .row_sums import run_of, sum_by_row, summed_rows
from .rows import TYPES, DeviceBatch, bags_at, divisor_of, elements_of, is_valid, nth_ids, place_at


@triton.jit
def dense_kernel(
    sums, dense, runs, W: tl.constexpr, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A run of places, T at a time: write their sums into the dense gradient."""
    pair, begin, end, by, used = run_of(tl.program_id(0), sums, runs, T)
    for block in range(begin, end, by):
        row, some, g = summed_rows(block, used, pair, sums, W, T, C)
        elements, mask = elements_of(row, some, tl.arange(0, C), W)
        tl.store(dense + elements, g.to(dense.dtype.element_ty), mask=mask)


@triton.jit
def sample_weights_kernel(
    grad, batch, stored, out, layout, F, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr, ACC: tl.constexpr, MEAN: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T bags of one feature: the product of each id's composed vector with its bag's gradient."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    first = tl.load(layout.spans + 2 * feature)
    start, length = bags_at(batch, feature, n)
    num_valid = divisor_of(batch, start, length, layout.table + first, S, T, ACC) if MEAN else 1
    for nth in range(0, tl.max(length)):
        ids = nth_ids(batch, start, length, nth)
        valid = is_valid(ids, layout.table + first, S)
        total = tl.zeros((T,), ACC)
        for s in range(first, first + tl.load(layout.spans + 2 * feature + 1)):
            slot = layout.table + s
            i, own_row = place_at(ids, valid, slot, layout.maps, S, FLAGS)
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                x = combined(i, own_row, valid, stored, None, slot, layout.maps, columns, c, S, W, K, C, ACC, 0, FLAGS)
                elements, mask = elements_of(n * S + s, valid, columns, W)
                total += tl.sum(x * tl.load(grad + elements, mask=mask, other=0).to(ACC), 1)
        if MEAN:
            total /= num_valid
        tl.store(out + start + nth, total.to(out.dtype.element_ty), mask=nth < length)


def backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Any:
    """``ops.gradients.backward`` in three launches."""
    host = fused_layout(stored, layout, whole_rows=True, any_order=True)
    if host is None:
        return NotImplemented
    dense = torch.zeros_like(stored)
    if grad.numel() and batch.ids.numel():
        width = stored.shape[1]
        columns = power_of_2(width)
        block = max(1, 1024 // columns)
        ids = DeviceBatch.of(batch, len(layout.spans))
        sums, runs = sum_by_row(grad.contiguous(), ids, stored, host, batch.mean, block)
        launch(dense_kernel, (runs.direct + runs.claiming,), sums, dense, runs, W=width, T=block, C=columns)
    return dense


def sample_weights_backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Any:
    """``ops.gradients.sample_weights_backward`` in one launch."""
    host = fused_layout(stored, layout)
    if host is None:
        return NotImplemented
    out = torch.zeros(batch.ids.shape, dtype=grad.dtype, device=grad.device)
    if grad.numel() and batch.ids.numel():
        features = len(layout.spans)
        block, columns, warps = bag_tile(stored.shape[1])
        launch(
            sample_weights_kernel, (cdiv(len(grad), block) * features,),
            grad.contiguous(), DeviceBatch.of(batch, features), stored, out, host.on_device, features,
            S=host.num_slots, W=stored.shape[1], K=host.num_parts, T=block, C=columns, ACC=TYPES[stored.dtype],
            MEAN=batch.mean, FLAGS=host.flags, num_warps=warps,
        )  # fmt: skip
    return out

"""The composed bag of a whole collection in one launch, and its gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index import TYPES, feature_of, is_valid, operation_of, part_at, row_of, slot_at
from .launch import cdiv, launch, power_of_2
from .lookup import dense_gradient


@triton.jit
def composed(i, valid, weight, slot, part, maps, columns, W: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """The composed vectors ``[T, C]`` of ids through one slot, zeros where an id is not valid."""
    mask = valid[:, None] & (columns < W)[None, :]
    mult = operation_of(slot) == 1
    row, _ = row_of(i, slot, part, maps)
    x = tl.load(weight + row[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
    for k in tl.static_range(1, K):
        row, used = row_of(i, slot, part_at(part, k), maps)
        y = tl.load(weight + row[:, None] * W + columns[None, :], mask=mask & used, other=0).to(ACC)
        x = tl.where(used & mult, x * y, x + y)
    return x


@triton.jit
def bag_kernel(
    ids, offsets, sample_weights, weight, out, slots, parts, maps, B, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """T bags of one slot, C columns at a time."""
    s = tl.program_id(0) % S
    n = (tl.program_id(0) // S).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, s)
    bag = feature_of(slot) * B + n
    start = tl.load(offsets + bag, mask=n < B, other=0)
    length = tl.load(offsets + bag + 1, mask=n < B, other=0) - start
    most = tl.max(length)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        total = tl.zeros((T, C), ACC)
        count = tl.zeros((T,), tl.int32)
        for step in range(0, most):
            i = tl.load(ids + start + step, mask=step < length, other=-1)
            valid = is_valid(i, slot)
            count += valid.to(tl.int32)
            i = tl.where(valid, i, 0)
            x = composed(i, valid, weight, slot, part_at(parts, s * K), maps, columns, W, K, ACC)
            if WEIGHTED:
                x *= tl.load(sample_weights + start + step, mask=valid, other=0).to(ACC)[:, None]
            total += x
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)[:, None]
        place = out + (n * S + s)[:, None] * W + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(n < B)[:, None] & (columns < W)[None, :])


@triton.jit
def sample_weights_kernel(
    grad, ids, offsets, weight, out, slots, parts, maps, spans, B, S, F,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """T bags of one feature: the product of each id's composed vector with its bag's gradient."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    first = tl.load(spans + 2 * feature)
    slot = slot_at(slots, first)
    start = tl.load(offsets + feature * B + n, mask=n < B, other=0)
    length = tl.load(offsets + feature * B + n + 1, mask=n < B, other=0) - start
    most = tl.max(length)
    count = tl.zeros((T,), tl.int32)
    if MEAN:
        for step in range(0, most):
            count += is_valid(tl.load(ids + start + step, mask=step < length, other=-1), slot).to(tl.int32)
    for step in range(0, most):
        inside = step < length
        i = tl.load(ids + start + step, mask=inside, other=-1)
        valid = is_valid(i, slot)
        i = tl.where(valid, i, 0)
        total = tl.zeros((T,), ACC)
        for s in range(first, first + tl.load(spans + 2 * feature + 1)):
            for c in range(0, W, C):
                columns = c + tl.arange(0, C)
                x = composed(i, valid, weight, slot_at(slots, s), part_at(parts, s * K), maps, columns, W, K, ACC)
                mask = valid[:, None] & (columns < W)[None, :]
                g = tl.load(grad + (n * S + s)[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
                total += tl.sum(x * g, 1)
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)
        tl.store(out + start + step, total.to(out.dtype.element_ty), mask=inside)


def tile(width: int) -> tuple[int, int, int]:
    """Ids and columns of a program, and its warps: one warp up to 64 columns measured fastest on an H200."""
    columns = min(power_of_2(width), 128)
    return 32, columns, 1 if columns <= 64 else 2


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
    names: str = "",
) -> Tensor:
    """``reference.bag`` in one launch."""
    slots, parts, maps, spans = integers
    batch, width = (len(offsets) - 1) // len(spans), weight.shape[1]
    out = weight.new_empty(batch, len(slots), width)
    if out.numel():
        block, columns, warps = tile(width)
        launch(
            bag_kernel, (cdiv(batch, block) * len(slots),),
            ids.contiguous(), offsets, sample_weights, weight, out, slots, parts, maps, batch, len(slots),
            W=width, K=parts.shape[1], T=block, C=columns, ACC=TYPES[weight.dtype],
            WEIGHTED=sample_weights is not None, MEAN=mean, num_warps=warps,
        )  # fmt: skip
    return out


def bag_backward(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
) -> Any:
    """``reference.accumulate(*reference.bag_row_grads(...))``."""
    return dense_gradient(grad, ids, offsets, sample_weights, weight, *integers, mean=mean)


def bag_sample_weights_backward(
    grad: Tensor, ids: Tensor, offsets: Tensor, weight: Tensor, *integers: Tensor, mean: bool
) -> Tensor:
    """``reference.bag_sample_weights_grad`` in one launch."""
    slots, parts, maps, spans = integers
    out = torch.zeros(ids.shape, dtype=grad.dtype, device=grad.device)
    if grad.numel() and ids.numel():
        block, columns, warps = tile(weight.shape[1])
        launch(
            sample_weights_kernel, (cdiv(len(grad), block) * len(spans),),
            grad.contiguous(), ids.contiguous(), offsets, weight, out, slots, parts, maps, spans, len(grad),
            len(slots), len(spans), W=weight.shape[1], K=parts.shape[1], T=block, C=columns, ACC=TYPES[weight.dtype],
            MEAN=mean, num_warps=warps,
        )  # fmt: skip
    return out

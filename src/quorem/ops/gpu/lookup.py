"""The composed lookup of a whole collection in one launch, and its dense gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gather import TYPES, gather, read_ids, rows_and_sums
from .index import feature_of, is_valid, limit_of, operation_of, part_at, row_of, slot_at
from .launch import Plan, cdiv, launch, planned, power_of_2

_plans: dict[Any, Plan] = {}


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
def lookup_kernel(
    ids, weight, out, invalid, slots, parts, maps, spans, B, id_stride, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """T ids of one slot: K rows each, combined in ACC, W columns written C at a time.

    With COUNT, the first slot of a feature adds the number of its ids outside the table to ``invalid``.
    """
    s = tl.program_id(0) % S
    n = (tl.program_id(0) // S).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, s)
    i = tl.load(ids + n * id_stride + feature_of(slot), mask=n < B, other=-1)
    valid = is_valid(i, slot)
    if COUNT:
        bad = tl.sum(((n < B) & ((i < 0) | (i >= limit_of(slot)))).to(tl.int32))
        if (bad > 0) & (tl.load(spans + 2 * feature_of(slot)) == s):
            tl.atomic_add(invalid, bad.to(tl.int64), sem="relaxed")
    i = tl.where(valid, i, 0)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        x = composed(i, valid, weight, slot, part_at(parts, s * K), maps, columns, W, K, ACC)
        place = out + (n * S + s)[:, None] * W + columns[None, :]
        tl.store(place, x.to(out.dtype.element_ty), mask=(n < B)[:, None] & (columns < W)[None, :])


@triton.jit
def scatter_kernel(
    ids, offsets, sums, claims, places, dense, slots, parts, maps, B, id_stride, first_pair,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T places of one pair: write their sums into the dense gradient."""
    pair = first_pair + tl.program_id(0)
    row, active, g = rows_and_sums(
        ids, offsets, sums, claims, places, pair, slots, parts, maps, B, id_stride, W, K, T, C, JAGGED
    )
    columns = tl.arange(0, C)
    mask = active[:, None] & (columns < W)[None, :]
    tl.store(dense + row[:, None] * W + columns[None, :], g.to(dense.dtype.element_ty), mask=mask)


@triton.jit
def count_invalid_kernel(
    ids, offsets, count, slots, spans, B, id_stride, F, T: tl.constexpr, JAGGED: tl.constexpr
):  # fmt: skip
    """T ids of one feature: add the number outside the table to ``count``."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, tl.load(spans + 2 * feature))
    i, place = read_ids(ids, offsets, n, slot, B, id_stride, JAGGED)
    inside = place < tl.load(offsets + (feature + 1) * B) if JAGGED else n < B
    bad = tl.sum((inside & ((i < 0) | (i >= limit_of(slot)))).to(tl.int64))
    if bad > 0:
        tl.atomic_add(count, bad, sem="relaxed")


def count_invalid_(ids: Tensor, offsets: Tensor | None, count: Tensor, *integers: Tensor) -> None:
    """``ops.lookup.count_invalid_`` in one launch."""
    slots, _, _, spans = integers
    ids = ids.contiguous()
    if ids.numel():
        batch = len(ids) if offsets is None else (len(offsets) - 1) // len(spans)
        launch(
            count_invalid_kernel, (cdiv(len(ids), 512) * len(spans),),
            ids, offsets, count, slots, spans, batch, 1 if offsets is not None else ids.stride(0), len(spans),
            T=512, JAGGED=offsets is not None,
        )  # fmt: skip


def tile(width: int) -> tuple[int, int, int]:
    """Ids and columns of a program, and its warps: one warp up to 64 columns measured fastest on an H200."""
    columns = min(power_of_2(width), 128)
    return 32, columns, 1 if columns <= 64 else 2


def lookup(ids: Tensor, weight: Tensor, *integers: Tensor, names: str = "") -> Tensor:
    """``reference.lookup`` in one launch."""
    return lookup_counting(ids, weight, *integers, None, names=names)


def lookup_counting(ids: Tensor, weight: Tensor, *rest: Any, names: str = "") -> Tensor:
    """``reference.lookup`` in one launch, which also counts ids out of range if there is a count."""
    slots, parts, maps, spans, invalid = rest
    ids = ids if ids.stride(-1) == 1 else ids.contiguous()
    batch, num_slots, width = ids.shape[0], slots.shape[0], weight.shape[1]
    out = weight.new_empty(batch, num_slots, width)
    if not out.numel():
        return out
    k, stride = parts.shape[1], ids.stride(0)

    def launches() -> None:
        block, columns, warps = tile(width)
        launch(
            lookup_kernel, (cdiv(batch, block) * num_slots,),
            ids, weight, out, invalid, slots, parts, maps, spans, batch, stride, num_slots,
            W=width, K=k, T=block, C=columns, ACC=TYPES[weight.dtype], COUNT=invalid is not None, num_warps=warps,
        )  # fmt: skip

    key = (batch, stride, num_slots, width, k, ids.dtype, weight.dtype)
    planned(_plans, key, (weight, slots, parts, maps, spans, invalid), (ids, out), launches)
    return out


def lookup_backward(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> Any:
    """``reference.accumulate(*reference.lookup_row_grads(...))``."""
    return dense_gradient(grad, ids, None, None, weight, *integers)


def dense_gradient(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool = False,
) -> Any:
    """The gradient ``[R, W]`` of a lookup, or of a bag if there are ``offsets``."""
    if weight.shape[1] > 512 or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    slots, parts, maps, _ = integers
    grad, ids = grad.contiguous(), ids.contiguous()
    dense = torch.zeros_like(weight)
    if grad.numel() and ids.numel():
        width, k, jagged = weight.shape[1], parts.shape[1], offsets is not None
        columns = power_of_2(width)
        block = max(1, 1024 // columns)
        passes = gather(grad, ids, offsets, sample_weights, weight, *integers, mean=mean)
        for sums, claims, places, now in passes:
            launch(
                scatter_kernel, (now.pairs, cdiv(places.longest, block)),
                ids, offsets, sums, claims, places.table, dense, slots, parts, maps, grad.shape[0],
                1 if jagged else ids.stride(0), now.first, W=width, K=k, T=block, C=columns, JAGGED=jagged,
            )  # fmt: skip
    return dense

"""The composed lookup of a whole collection in one launch, and its dense gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gather import gather, rows_and_sums
from .host import on_host
from .index import TYPES, limit_of, read_ids, slot_at
from .launch import cdiv, launch, planned, power_of_2


@triton.jit
def lookup_kernel(
    ids, weight, out, invalid, table, maps, B, id_stride, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, COUNT: tl.constexpr,
    PLAIN: tl.constexpr, PADDED: tl.constexpr, PERMUTED: tl.constexpr, PITCHED: tl.constexpr, MAPPED: tl.constexpr,
    MULT: tl.constexpr,
):  # fmt: skip
    """T vectors that follow each other in the output, of one slot after another: K rows each, combined in ACC.

    ``table`` and what kinds of slots there are come from ``Host``: its rows are 0 feature, 1 operation, 2 limit, 3
    multiplier, 4 shift, 5 padding, 6 first of its feature; from 7 + 5 k on stride, size, base, pitch and map. PLAIN
    means also that ids lie as vectors do. With COUNT, the first slot of a feature adds the number of its ids outside
    the table to ``invalid``.
    """
    begin = tl.program_id(0).to(tl.int64) * T
    turn = (begin % S).to(tl.int32) + tl.arange(0, T)
    slot = table + turn % S
    at = begin + tl.arange(0, T)
    inside = at < tl.full((), 1, tl.int64) * B * S
    if not PLAIN:
        at = (begin // S + turn // S) * id_stride + tl.load(slot)
    i = tl.load(ids + at, mask=inside, other=-1)
    limit = tl.load(slot + 2 * S)
    valid = (i >= 0) & (i < limit)
    if COUNT:
        wrong = inside & (valid == 0)
        if not PLAIN:
            wrong = wrong & (tl.load(slot + 6 * S) != 0)
        bad = tl.sum(wrong.to(tl.int32))
        if bad > 0:
            tl.atomic_add(invalid, bad.to(tl.int64), sem="relaxed")
    if PADDED:
        valid = valid & (i != tl.load(slot + 5 * S))
    i = tl.where(valid, i, 0).to(table.dtype.element_ty)
    if PERMUTED:
        wide = i.to(tl.int64) * tl.load(slot + 3 * S) + tl.load(slot + 4 * S)
        i = (wide % limit).to(table.dtype.element_ty)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        mask = valid[:, None] & (columns < W)[None, :]
        x = tl.zeros((T, C), ACC)
        for k in tl.static_range(K):
            part = slot + (7 + 5 * k) * S
            base = tl.load(part + 2 * S)
            row = (unsigned(i) // unsigned(tl.load(part)) % unsigned(tl.load(part + S))).to(table.dtype.element_ty)
            if MAPPED:
                start = tl.load(part + 4 * S).to(tl.int64)
                named = tl.load(maps + start + i, mask=valid & (start >= 0), other=0)
                row = tl.where(start >= 0, named.to(table.dtype.element_ty), row)
            if PITCHED:
                row = row * tl.load(part + 3 * S)
            here = (base + row).to(tl.int64)
            used = (base >= 0)[:, None]
            y = tl.load(weight + here[:, None] * W + columns[None, :], mask=mask & used, other=0).to(ACC)
            if k == 0:
                x = y
            elif MULT == 0:
                x += y
            elif MULT == 1:
                x = tl.where(used, x * y, x)
            else:
                x = tl.where(used & (tl.load(slot + S) == 1)[:, None], x * y, x + y)
        place = out + (begin + tl.arange(0, T))[:, None] * W + columns[None, :]
        x = x.to(out.dtype.element_ty)
        tl.store(place, x, mask=inside[:, None] & (columns < W)[None, :], eviction_policy="evict_first")


@triton.jit
def unsigned(x):
    """Unsigned integers of the same size, whose divisions are shorter."""
    return x.to(tl.uint32) if x.dtype == tl.int32 else x.to(tl.uint64)


@triton.jit
def scatter_kernel(
    ids, offsets, sums, claims, places, dense, slots, parts, maps, B, id_stride, first_pair, pairs,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, JAGGED: tl.constexpr,
):  # fmt: skip
    """T places of one pair: write their sums into the dense gradient."""
    pair = first_pair + tl.program_id(0) % pairs
    block = tl.program_id(0) // pairs
    row, active, g = rows_and_sums(
        ids, offsets, sums, claims, places, pair, block, slots, parts, maps, B, id_stride, W, K, T, C, JAGGED
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
    k, stride, host = parts.shape[1], ids.stride(0), on_host(slots, parts, maps, spans)

    def launches() -> None:
        columns = min(power_of_2(width), 128)
        kinds = host.kinds if stride == num_slots else host.kinds | {"PLAIN": False}
        launch(
            lookup_kernel, (cdiv(batch * num_slots, 32),),
            ids, weight, out, invalid, host.table, maps, batch, stride, num_slots,
            W=width, K=k, T=32, C=columns, ACC=TYPES[weight.dtype], COUNT=invalid is not None, **kinds, num_warps=1,
        )  # fmt: skip

    key = ("lookup", batch, stride, width, ids.dtype, weight.dtype)
    planned(host.plans, key, (weight, maps, invalid), (ids, out), launches)
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
                scatter_kernel, (now.pairs * cdiv(places.longest, block),),
                ids, offsets, sums, claims, places.table, dense, slots, parts, maps, grad.shape[0],
                1 if jagged else ids.stride(0), now.first, now.pairs, W=width, K=k, T=block, C=columns, JAGGED=jagged,
            )  # fmt: skip
    return dense

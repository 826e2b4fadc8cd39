"""The composed lookup and bag of a whole collection, one launch each; and the count of invalid ids."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from .fast_launch import planned
from .host import fused_layout, host_layout
from .launch import cdiv, launch, power_of_2
from .rows import (
    BASE,
    FEATURE,
    LIMIT,
    MAP,
    MULTIPLIER,
    OPERATION,
    PADDING,
    PART_COLUMNS,
    PITCH,
    PRODUCT,
    SHIFT,
    SIZE,
    SLOT_COLUMNS,
    STRIDE,
    TYPES,
    bucket_of,
    is_valid,
    mask_if,
    part_at,
    permuted,
    read_ids,
    row_of,
    slot_at,
    unsigned,
)


@triton.jit
def lookup_kernel(
    ids, stored, out, invalid, table, maps, B, id_stride, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, COUNT: tl.constexpr,
    PLAIN: tl.constexpr, PADDED: tl.constexpr, PERMUTED: tl.constexpr, PITCHED: tl.constexpr, MAPPED: tl.constexpr,
    MULT: tl.constexpr,
):  # fmt: skip
    """T vectors that follow each other in the output, of one slot after another: K rows each, combined in ACC.

    ``table`` and the flags from PLAIN on come from ``HostLayout``: its rows are the columns of ``slots``, then whether
    a slot is the first of its feature, then the columns of ``parts`` for each k. PLAIN means also that ids lie as
    vectors do. With COUNT, the first slot of a feature adds the number of its ids outside the table to ``invalid``.
    """
    begin = tl.program_id(0).to(tl.int64) * T
    turn = (begin % S).to(tl.int32) + tl.arange(0, T)
    slot = table + turn % S
    vector = begin + tl.arange(0, T)
    inside = vector < tl.full((), 1, tl.int64) * B * S
    source = vector
    if not PLAIN:
        source = (begin // S + turn // S) * id_stride + tl.load(slot + S * FEATURE)
    i = tl.load(ids + source, mask=inside, other=-1)
    limit = tl.load(slot + S * LIMIT)
    valid = (i >= 0) & (i < limit)
    if COUNT:
        wrong = inside & (valid == 0)
        if not PLAIN:
            wrong = wrong & (tl.load(slot + S * SLOT_COLUMNS) != 0)
        count = tl.sum(wrong.to(tl.int32))
        if count > 0:
            tl.atomic_add(invalid, count.to(tl.int64), sem="relaxed")
    if PADDED:
        valid = valid & (i != tl.load(slot + S * PADDING))
    i = tl.where(valid, i, 0).to(table.dtype.element_ty)
    if PERMUTED:
        i = permuted(i, tl.load(slot + S * MULTIPLIER), tl.load(slot + S * SHIFT), limit).to(table.dtype.element_ty)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        mask = valid[:, None] & (columns < W)[None, :]
        x = tl.zeros((T, C), ACC)
        for k in tl.static_range(K):
            part = slot + S * (SLOT_COLUMNS + 1 + PART_COLUMNS * k)
            stride, size, base = tl.load(part + S * STRIDE), tl.load(part + S * SIZE), tl.load(part + S * BASE)
            bucket = bucket_of(unsigned(i), unsigned(stride), unsigned(size), limit, False).to(table.dtype.element_ty)
            if MAPPED:
                start = tl.load(part + S * MAP).to(tl.int64)
                entry = tl.load(maps + start + i, mask=valid & (start >= 0), other=0)
                bucket = tl.where(start >= 0, entry.to(table.dtype.element_ty), bucket)
            if PITCHED:
                bucket = bucket * tl.load(part + S * PITCH)
            row = (base + bucket).to(tl.int64)
            used = (base >= 0)[:, None]
            y = tl.load(stored + row[:, None] * W + columns[None, :], mask=mask & used, other=0).to(ACC)
            if k == 0:
                x = y
            elif MULT == 0:
                x += y
            elif MULT == 1:
                x = tl.where(used, x * y, x)
            else:
                x = tl.where(used & (tl.load(slot + S * OPERATION) == PRODUCT)[:, None], x * y, x + y)
        address = out + vector[:, None] * W + columns[None, :]
        x = x.to(out.dtype.element_ty)
        tl.store(address, x, mask=inside[:, None] & (columns < W)[None, :], eviction_policy="evict_first")


@triton.jit
def composed(i, valid, stored, slot, part, maps, columns, W: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """The composed vectors ``[T, C]`` of ids through one slot, zeros where an id is not valid."""
    mask = valid[:, None] & (columns < W)[None, :]
    product = tl.load(slot + OPERATION) == PRODUCT
    row, _ = row_of(i, slot, part, maps)
    x = tl.load(stored + row[:, None] * W + columns[None, :], mask=mask, other=0).to(ACC)
    for k in tl.static_range(1, K):
        row, used = row_of(i, slot, part_at(part, k), maps)
        y = tl.load(stored + row[:, None] * W + columns[None, :], mask=mask_if(used, mask), other=0).to(ACC)
        x = tl.where(used & product, x * y, x + y)
    return x


@triton.jit
def bag_kernel(
    ids, offsets, sample_weights, stored, out, slots, parts, maps, B, S,
    W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """T bags of one slot, C columns at a time."""
    s = tl.program_id(0) % S
    n = (tl.program_id(0) // S).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, s)
    bag = tl.load(slot + FEATURE) * B + n
    start = tl.load(offsets + bag, mask=n < B, other=0)
    length = tl.load(offsets + bag + 1, mask=n < B, other=0) - start
    longest = tl.max(length)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        total = tl.zeros((T, C), ACC)
        count = tl.zeros((T,), tl.int32)
        for nth in range(0, longest):
            i = tl.load(ids + start + nth, mask=nth < length, other=-1)
            valid = is_valid(i, slot)
            count += valid.to(tl.int32)
            i = tl.where(valid, i, 0)
            x = composed(i, valid, stored, slot, part_at(parts, s * K), maps, columns, W, K, ACC)
            if WEIGHTED:
                x *= tl.load(sample_weights + start + nth, mask=valid, other=0).to(ACC)[:, None]
            total += x
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)[:, None]
        address = out + (n * S + s)[:, None] * W + columns[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=(n < B)[:, None] & (columns < W)[None, :])


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
    wrong = tl.sum((inside & ((i < 0) | (i >= tl.load(slot + LIMIT)))).to(tl.int64))
    if wrong > 0:
        tl.atomic_add(count, wrong, sem="relaxed")


def lookup(ids: Tensor, stored: Tensor, layout: Layout, *, names: str = "") -> Any:
    """``ops.lookup.lookup`` in one launch."""
    return lookup_counting(ids, stored, layout, None, names=names)


def lookup_counting(ids: Tensor, stored: Tensor, layout: Layout, invalid: Tensor | None, *, names: str = "") -> Any:
    """``ops.lookup.lookup_counting`` in one launch; without a count, invalid ids are not counted."""
    host = fused_layout(stored, layout)
    if host is None:
        return NotImplemented
    ids = ids if ids.stride(-1) == 1 else ids.contiguous()
    (batch, _), (num_slots, k, _), width, stride = ids.shape, layout.parts.shape, stored.shape[1], ids.stride(0)
    out = stored.new_empty(batch, num_slots, width)
    if not out.numel():
        return out

    def launches() -> None:
        flags = host.flags if stride == num_slots else host.flags | {"PLAIN": False}
        launch(
            lookup_kernel, (cdiv(batch * num_slots, 32),),
            ids, stored, out, invalid, host.table, layout.maps, batch, stride, num_slots, W=width, K=k, T=32,
            C=min(power_of_2(width), 128), ACC=TYPES[stored.dtype], COUNT=invalid is not None, **flags, num_warps=1,
        )  # fmt: skip

    key = ("lookup", batch, stride, stored.shape, ids.dtype, stored.dtype)
    planned(host.plans, key, (stored, layout.maps, invalid), (ids, out), launches)
    return out


def count_invalid_(ids: Tensor, offsets: Tensor | None, count: Tensor, layout: Layout) -> None:
    """``ops.lookup.count_invalid_`` in one launch."""
    host_layout(layout)  # checks it
    ids, features = ids.contiguous(), len(layout.spans)
    if ids.numel():
        jagged, batch = offsets is not None, len(ids) if offsets is None else (len(offsets) - 1) // features
        launch(
            count_invalid_kernel, (cdiv(len(ids), 512) * features,),
            ids, offsets, count, layout.slots, layout.spans, batch, 1 if jagged else ids.stride(0), features,
            T=512, JAGGED=jagged,
        )  # fmt: skip


def bag_tile(width: int) -> tuple[int, int, int]:
    """Bags and columns of a program, and its warps: one warp up to 64 columns measured fastest on an H200."""
    columns = min(power_of_2(width), 128)
    return 32, columns, 1 if columns <= 64 else 2


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
    names: str = "",
) -> Any:
    """``ops.lookup.bag`` in one launch."""
    if fused_layout(stored, layout) is None:
        return NotImplemented
    slots, parts, maps, spans, _ = layout
    batch, width = (len(offsets) - 1) // len(spans), stored.shape[1]
    out = stored.new_empty(batch, len(slots), width)
    if out.numel():
        block, columns, warps = bag_tile(width)
        launch(
            bag_kernel, (cdiv(batch, block) * len(slots),),
            ids.contiguous(), offsets.contiguous(), sample_weights if sample_weights is None else
            sample_weights.contiguous(), stored, out, slots, parts, maps, batch, len(slots),
            W=width, K=parts.shape[1], T=block, C=columns, ACC=TYPES[stored.dtype],
            WEIGHTED=sample_weights is not None, MEAN=mean, num_warps=warps,
        )  # fmt: skip
    return out

"""The composed lookup and the composed bag of a whole collection, one launch each; and the count of invalid ids."""

from dataclasses import replace
from typing import Any, Unpack

import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions
from ..rows import IdBatch
from . import host as host_table
from .codes import StoredRows, coded_rows, numbers_at
from .fast_launch import planned
from .host import HostLayout, checked_rows, fused_layout, host_layout
from .launch import cdiv, launch, power_of_2
from .ranks import rank_of
from .rows import (
    BASE,
    BITS,
    COLD,
    COMPOSED,
    FEATURE,
    HOT,
    LIMIT,
    MAP,
    MULTIPLIER,
    OFFSET,
    OPERATION,
    OWN,
    PADDING,
    PITCH,
    PRODUCT,
    REST,
    SHIFT,
    SIZE,
    SLOT_COLUMNS,
    STRIDE,
    DeviceBatch,
    bags_at,
    is_valid,
    mixed,
    number_of,
    part_at,
    permuted,
    place_of,
    read_ids,
    row_of,
    slot_at,
)

TABLE_PART_COLUMNS = tl.constexpr(host_table.TABLE_PART_COLUMNS)
BY_STRIDE, BY_SIZE, SHIFTS = map(tl.constexpr, (host_table.BY_STRIDE, host_table.BY_SIZE, host_table.SHIFTS))
MANY_VECTORS = 2**18  # from so many on, a program handles more of them if they are narrow


@triton.jit
def bucket_at(i, part, S: tl.constexpr):
    """``rows.bucket_of`` the numbers ``i``, by the integers of their parts in ``HostLayout.table``."""
    size = tl.load(part + S * SIZE)
    if i.dtype == tl.int32:
        shifts = tl.load(part + S * SHIFTS)
        quotient = divided(i, tl.load(part + S * BY_STRIDE), shifts & 31)
        return quotient - divided(quotient, tl.load(part + S * BY_SIZE), shifts >> 5) * size
    else:
        stride = tl.load(part + S * STRIDE)
        return (i.to(tl.uint64) // stride.to(tl.uint64) % size.to(tl.uint64)).to(tl.int64)  # shorter than signed ones


@triton.jit
def divided(i, multiplier, shift):
    """int32 numbers over a divisor, whose multiplier and shift ``host.reciprocals`` gives."""
    doubled = i.to(tl.uint32) << 1
    return (tl.umulhi(doubled, multiplier.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def lookup_kernel(
    ids, stored, ends, out, invalid, table, maps, B, id_stride,
    S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    NBITS: tl.constexpr, LEVELS: tl.constexpr, MULT: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T vectors that follow each other in the output, of one slot after another: K rows each, combined in ACC.

    ``table``, LEVELS, MULT (``product``) and FLAGS come from ``HostLayout``. If there is an ``invalid``, the first slot
    of a feature adds the number of its ids outside the table to it. With NBITS, rows are stored in so many bits a
    number. A row of an id's own takes the place of the first of K.
    """
    PLAIN: tl.constexpr = FLAGS.plain
    PITCHED: tl.constexpr = FLAGS.pitched
    OWNED: tl.constexpr = FLAGS.owned
    RESTED: tl.constexpr = FLAGS.rested
    begin = tl.program_id(0).to(tl.int64) * T
    turn = tl.program_id(0) % S * T % S + tl.arange(0, T)
    slot = table + turn % S
    vector = begin + tl.arange(0, T)
    inside = vector < tl.full((), 1, tl.int64) * B * S
    source = vector
    if not PLAIN:
        source = (begin // S + turn // S) * id_stride + tl.load(slot + S * FEATURE)
    i = tl.load(ids + source, mask=inside, other=-1)
    limit = tl.load(slot + S * LIMIT)
    valid = (i >= 0) & (i < limit)
    if invalid is not None:
        wrong = inside & (valid == 0)
        if not PLAIN:
            wrong = wrong & (tl.load(slot + S * SLOT_COLUMNS) != 0)
        count = tl.sum(wrong.to(tl.int32))
        if count > 0:
            tl.atomic_add(invalid, count.to(tl.int64), sem="relaxed")
    if FLAGS.padded:
        valid = valid & (i != tl.load(slot + S * PADDING))
    i = tl.where(valid, i, 0).to(table.dtype.element_ty)
    if OWNED:
        own, rest = tl.load(slot + S * OWN), tl.load(slot + S * REST)
        if LEVELS > 0:
            hot_words, cold_words = tl.load(slot + S * HOT), tl.load(slot + S * COLD)
            i = rank_of(i, valid, maps, hot_words, cold_words, own, rest, limit, LEVELS, RESTED)
        place = i
        if RESTED:
            place = place_of(i, own, rest, limit)
        is_own, own_row = place < own, place
        if PITCHED:
            own_row = place * tl.load(slot + S * (SLOT_COLUMNS + 2))
        own_row += tl.load(slot + S * (SLOT_COLUMNS + 1))
        i = tl.where(is_own, 0, place - own)
        limit = tl.load(slot + S * COMPOSED)
    if FLAGS.permuted:
        i = permuted(i, tl.load(slot + S * MULTIPLIER), tl.load(slot + S * SHIFT), limit).to(table.dtype.element_ty)
    if FLAGS.mixed:
        bits = tl.load(slot + S * BITS)
        i = tl.where(bits > 0, mixed(i + tl.load(slot + S * OFFSET), bits), i)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        x = tl.zeros((T, C), ACC)
        for k in tl.static_range(K):
            part = slot + S * (SLOT_COLUMNS + 3 + TABLE_PART_COLUMNS * k)
            base, bucket = tl.load(part + S * BASE), bucket_at(i, part, S)
            if FLAGS.mapped:
                start = tl.load(part + S * MAP).to(tl.int64)
                entry = tl.load(maps + start + i, mask=valid & (start >= 0), other=0)
                bucket = tl.where(start >= 0, entry.to(table.dtype.element_ty), bucket)
            if PITCHED:
                bucket = bucket * tl.load(part + S * PITCH)
            row, used = base + bucket, base >= 0
            if OWNED:
                row = tl.where(is_own & (k == 0), own_row, row)
                used = (used | is_own) if k == 0 else used & (is_own == 0)
            rows = tl.where(valid & used, row, -1)[:, None]
            y = numbers_at(stored, ends, rows, columns, c, W, C, ACC, NBITS)
            if k == 0:
                x = y
            elif MULT == 0:
                x += y
            elif MULT == 1:
                x = tl.where(rows >= 0, x * y, x)
            else:
                product = (tl.load(slot + S * OPERATION) == PRODUCT)[:, None]
                x = tl.where((rows >= 0) & product, x * y, x + y)
        address = out + vector[:, None] * W + columns[None, :]
        x = x.to(out.dtype.element_ty)
        tl.store(address, x, mask=inside[:, None] & (columns < W)[None, :], eviction_policy="evict_first")


@triton.jit
def composed(
    i, valid, stored, ends, s, layout, columns, c, W: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, FLAGS: tl.constexpr, NBITS: tl.constexpr,
):  # fmt: skip
    """The composed vectors ``[T, C]`` of ids through one slot, zeros where an id is not valid."""
    slot, part, maps = slot_at(layout.slots, s), part_at(layout.parts, s * K), layout.maps
    product = tl.load(slot + OPERATION) == PRODUCT
    number, is_own = number_of(i, slot, maps, FLAGS)
    row, used = row_of(number, is_own, slot, part, 0, maps, FLAGS)
    rows = tl.where(valid & used, row, -1)[:, None]
    x = numbers_at(stored, ends, rows, columns, c, W, C, ACC, NBITS)
    for k in tl.static_range(1, K):
        row, more = row_of(number, is_own, slot, part_at(part, k), k, maps, FLAGS)
        rows = tl.where(valid & more, row, -1)[:, None]
        y = numbers_at(stored, ends, rows, columns, c, W, C, ACC, NBITS)
        x = tl.where((used & more & product)[:, None], x * y, x + y)
        used = used | more  # the first row that an id reads may be any but the last
    return x


@triton.jit
def bag_kernel(
    batch, stored, ends, out, layout, S, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ACC: tl.constexpr, MEAN: tl.constexpr, FLAGS: tl.constexpr, NBITS: tl.constexpr,
):  # fmt: skip
    """T bags of one slot, C columns at a time."""
    s = tl.program_id(0) % S
    n = (tl.program_id(0) // S).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(layout.slots, s)
    start, length = bags_at(batch, tl.load(slot + FEATURE), n)
    longest = tl.max(length)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        total = tl.zeros((T, C), ACC)
        count = tl.zeros((T,), tl.int32)
        for nth in range(0, longest):
            i = tl.load(batch.ids + start + nth, mask=nth < length, other=-1)
            valid = is_valid(i, slot)
            count += valid.to(tl.int32)
            i = tl.where(valid, i, 0)
            x = composed(i, valid, stored, ends, s, layout, columns, c, W, K, C, ACC, FLAGS, NBITS)
            if batch.sample_weights is not None:
                x *= tl.load(batch.sample_weights + start + nth, mask=valid, other=0).to(ACC)[:, None]
            total += x
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)[:, None]
        address = out + (n * S + s)[:, None] * W + columns[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=(n < batch.size)[:, None] & (columns < W)[None, :])


@triton.jit
def count_invalid_kernel(batch, count, slots, spans, F, T: tl.constexpr):
    """T ids of one feature: add the number outside the table to ``count``."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    slot = slot_at(slots, tl.load(spans + 2 * feature))
    i, inside = read_ids(batch, n, slot)
    wrong = tl.sum((inside & ((i < 0) | (i >= tl.load(slot + LIMIT)))).to(tl.int64))
    if wrong > 0:
        tl.atomic_add(count, wrong, sem="relaxed")


def lookup(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor | None = None,
    *,
    names: str = "",
    **codes: Unpack[CodeOptions],
) -> Any:
    """``ops.lookup.lookup`` in one launch."""
    if codes:
        rows = coded_rows(stored, **codes)
        host = None if rows is None else checked_rows(stored, layout)
    else:
        rows, host = StoredRows(stored, None, stored.shape[1], 0, stored.dtype), fused_layout(stored, layout)
    if rows is None or host is None:
        return NotImplemented
    return _vectors(batch.ids, rows, host, invalid) if batch.offsets is None else _pooled(batch, rows, layout, host)


def _vectors(ids: Tensor, rows: StoredRows, host: HostLayout, invalid: Tensor | None) -> Tensor:
    """The vectors ``[B, S, W]`` of single ids."""
    stored, ends, width, bits, dtype = rows
    num_slots, (size, _), (stride, step) = host.num_slots, ids.shape, ids.stride()
    if step != 1:
        ids = ids.contiguous()
        stride = ids.stride(0)
    out = stored.new_empty((size, num_slots, width), dtype=dtype)
    if not size:
        return out

    def launches() -> None:
        flags = host.flags if stride == num_slots else replace(host.flags, plain=False)
        columns = columns_of(width, bits)
        block = 64 if columns <= 16 and size * num_slots >= MANY_VECTORS else 32
        launch(
            lookup_kernel, (cdiv(size * num_slots, block),),
            ids, stored, ends, out, invalid, host.table, host.on_device.maps, size, stride, S=num_slots, W=width,
            K=host.num_parts, T=block, C=columns, ACC=rows.accumulator,
            NBITS=bits, LEVELS=host.levels, MULT=host.product, FLAGS=flags, num_warps=1,
        )  # fmt: skip

    fixed = (stored,) if invalid is None else (stored, invalid)
    fixed = fixed if ends is None else (*fixed, ends)
    key = ("lookup", size, stride, width, bits, invalid is None, dtype, ids.dtype, stored.dtype)
    planned(host.plans, key, fixed, (ids, out), launches)
    return out


def _pooled(batch: IdBatch, rows: StoredRows, layout: Layout, host: HostLayout) -> Tensor:
    """The pooled vectors ``[B, S, W]`` of bags."""
    assert batch.offsets is not None
    size = (len(batch.offsets) - 1) // len(layout.spans)
    out = rows.stored.new_empty(size, len(host.slots), rows.width, dtype=rows.dtype)
    if out.numel():
        read = batch.contiguous()
        block, columns, warps = bag_tile(rows.width, rows.bits)
        launch(
            bag_kernel, (cdiv(size, block) * host.num_slots,),
            DeviceBatch.of(read, size), rows.stored, rows.ends, out, host.on_device, host.num_slots,
            W=rows.width, K=layout.parts.shape[1], T=block, C=columns, ACC=rows.accumulator,
            MEAN=read.mean, FLAGS=host.row_flags, NBITS=rows.bits, num_warps=warps,
        )  # fmt: skip
    return out


def count_invalid_(batch: IdBatch, count: Tensor, layout: Layout) -> None:
    """``ops.lookup.count_invalid_`` in one launch."""
    host = host_layout(layout)
    batch, features = batch.contiguous(), len(layout.spans)
    if batch.ids.numel():
        size = len(batch.ids) if batch.offsets is None else (len(batch.offsets) - 1) // features
        launch(
            count_invalid_kernel, (cdiv(len(batch.ids), 512) * features,),
            DeviceBatch.of(batch, size), count, host.on_device.slots, host.device_spans, features, T=512,
        )  # fmt: skip


def columns_of(width: int, bits: int) -> int:
    """Number of columns of a program; at least two if two numbers share a byte."""
    return max(min(power_of_2(width), 128), 2 if bits == 4 else 1)


def bag_tile(width: int, bits: int = 0) -> tuple[int, int, int]:
    """Bags, columns and warps of a program: one warp for up to 64 columns was the fastest on an H200."""
    columns = columns_of(width, bits)
    return 32, columns, 1 if columns <= 64 else 2

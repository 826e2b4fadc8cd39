"""The composed lookup and the composed bag of a whole collection, one launch each; and the count of invalid ids."""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..codes import num_stored
from ..layout import Layout
from ..rows import IdBatch
from . import rows as index
from .codes import StoredRows, numbers_at, stored_rows
from .host import HostLayout, host_layout
from .launch import cdiv, launch, planned, power_of_2
from .rows import FEATURE, LIMIT, OPERATION, PADDING, PRODUCT, SLOT_COLUMNS, DeviceBatch

MANY_VECTORS = 2**18  # from so many on, a program handles more of them if they are narrow


@triton.jit
def lookup_kernel(
    ids, stored, ends, out, invalid, table, maps, B, id_stride,
    S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
    NBITS: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """T vectors that follow each other in the output, of one slot after another: K rows each, combined in ACC.

    ``table`` and FLAGS come from ``HostLayout``. If there is an ``invalid``, the first slot of a feature adds the
    number of its ids outside the table to it. With NBITS, rows are stored in so many bits a number.
    """
    PLAIN: tl.constexpr = FLAGS.plain
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
    i, own_row = index.place_at(i, valid, slot, maps, S, FLAGS)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        x = combined(i, own_row, valid, stored, ends, slot, maps, columns, c, S, W, K, C, ACC, NBITS, FLAGS)
        elements, mask = index.elements_of(vector, inside, columns, W)
        tl.store(out + elements, x.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def combined(
    i, own_row, valid, stored, ends, slot, maps, columns, c, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, ACC: tl.constexpr, NBITS: tl.constexpr, FLAGS: tl.constexpr, width=None,
):  # fmt: skip
    """The K rows of each id, combined in ACC: columns ``[T, C]``. ``i`` and ``own_row`` come from ``place_at``; with a
    ``width`` a row is several of ``stored`` (see ``numbers_at``)."""
    rows = index.row_read(i, own_row, valid, slot, maps, 0, S, FLAGS)[:, None]
    x = numbers_at(stored, ends, rows, columns, c, W, C, ACC, NBITS, width)
    for k in tl.static_range(1, K):
        rows = index.row_read(i, own_row, valid, slot, maps, k, S, FLAGS)[:, None]
        y = numbers_at(stored, ends, rows, columns, c, W, C, ACC, NBITS, width)
        if FLAGS.product == 0:
            x += y
        elif FLAGS.product == 1:
            x = tl.where(rows >= 0, x * y, x)
        else:
            product = tl.load(slot + S * OPERATION + tl.zeros_like(i)) == PRODUCT
            x = tl.where(product[:, None] & (rows >= 0), x * y, x + y)
    return x


@triton.jit
def bag_kernel(
    batch, stored, ends, out, layout, S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr, ACC: tl.constexpr, MEAN: tl.constexpr, FLAGS: tl.constexpr, NBITS: tl.constexpr,
):  # fmt: skip
    """T bags of one slot, C columns at a time."""
    s = tl.program_id(0) % S
    n = (tl.program_id(0) // S).to(tl.int64) * T + tl.arange(0, T)
    slot = layout.table + s
    start, length = index.bags_at(batch, tl.load(slot + S * FEATURE), n)
    for c in range(0, W, C):
        columns = c + tl.arange(0, C)
        total = tl.zeros((T, C), ACC)
        count = tl.zeros((T,), tl.int32)
        for nth in range(0, tl.max(length)):
            i = index.nth_ids(batch, start, length, nth)
            valid = index.is_valid(i, slot, S)
            count += valid.to(tl.int32)
            i, own_row = index.place_at(i, valid, slot, layout.maps, S, FLAGS)
            x = combined(i, own_row, valid, stored, ends, slot, layout.maps, columns, c, S, W, K, C, ACC, NBITS, FLAGS)
            if batch.sample_weights is not None:
                x *= tl.load(batch.sample_weights + start + nth, mask=valid, other=0).to(ACC)[:, None]
            total += x
        if MEAN:
            total /= tl.maximum(count, 1).to(ACC)[:, None]
        elements, mask = index.elements_of(n * S + s, n < batch.size, columns, W)
        tl.store(out + elements, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def count_invalid_kernel(batch, count, layout, F, S: tl.constexpr, T: tl.constexpr):
    """T ids of one feature: add the number outside the table to ``count``."""
    feature = tl.program_id(0) % F
    n = (tl.program_id(0) // F).to(tl.int64) * T + tl.arange(0, T)
    i, inside = index.read_ids(batch, n, feature)
    limit = tl.load(layout.table + tl.load(layout.spans + 2 * feature) + S * LIMIT)
    wrong = tl.sum((inside & ((i < 0) | (i >= limit))).to(tl.int64))
    if wrong > 0:
        tl.atomic_add(count, wrong, sem="relaxed")


def lookup(batch: IdBatch, stored: Tensor, layout: Layout, invalid: Tensor | None = None, **options: Any) -> Any:
    """``ops.lookup.lookup`` in one launch."""
    rows = stored_rows(stored, **options)
    if rows is None:
        return NotImplemented
    host = host_layout(layout, num_stored(stored, rows.width) if rows.bits else stored.shape[0])
    return _vectors(batch.ids, rows, host, invalid) if batch.offsets is None else _pooled(batch, rows, host)


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
            ids, stored, ends, out, invalid, *host.on_device[:2], size, stride, S=num_slots, W=width,
            K=host.num_parts, T=block, C=columns, ACC=rows.accumulator,
            NBITS=bits, FLAGS=flags, num_warps=1,
        )  # fmt: skip

    key = ("lookup", size, stride, width, bits, invalid is None, stored.dtype)
    planned(host.plans, key, (stored,) if invalid is None else (stored, invalid), (ids, out), launches)
    return out


def _pooled(batch: IdBatch, rows: StoredRows, host: HostLayout) -> Tensor:
    """The pooled vectors ``[B, S, W]`` of bags."""
    bags = DeviceBatch.of(batch, host.spans.shape[0])
    out = rows.stored.new_empty(bags.size, host.num_slots, rows.width, dtype=rows.dtype)
    if out.numel():
        block, columns, warps = bag_tile(rows.width, rows.bits)
        launch(
            bag_kernel, (cdiv(bags.size, block) * host.num_slots,),
            bags, rows.stored, rows.ends, out, host.on_device,
            S=host.num_slots, W=rows.width, K=host.num_parts, T=block, C=columns, ACC=rows.accumulator,
            MEAN=batch.mean, FLAGS=host.flags, NBITS=rows.bits, num_warps=warps,
        )  # fmt: skip
    return out


def count_invalid_(batch: IdBatch, count: Tensor, layout: Layout) -> None:
    """``ops.lookup.count_invalid_`` in one launch."""
    host = host_layout(layout)
    ids, features = DeviceBatch.of(batch, len(host.spans)), len(host.spans)
    if len(ids.ids):
        grid = (cdiv(len(ids.ids), 512) * features,)
        launch(count_invalid_kernel, grid, ids, count, host.on_device, features, S=host.num_slots, T=512)


def columns_of(width: int, bits: int) -> int:
    """Number of columns of a program; at least two if two numbers share a byte."""
    return max(min(power_of_2(width), 128), 2 if bits == 4 else 1)


def bag_tile(width: int, bits: int = 0) -> tuple[int, int, int]:
    """Bags, columns and warps of a program: one warp for up to 64 columns was the fastest on an H200."""
    columns = columns_of(width, bits)
    return 32, columns, 1 if columns <= 64 else 2

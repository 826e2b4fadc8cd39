"""Composed lookup and bag: rows are found, combined and pooled in one pass; only the output is written."""

from typing import Unpack

import torch
from torch import Tensor

from .. import layout as column
from ..layout import Layout
from ..lookup import CodeOptions
from ..memory import in_huge_pages
from ..rows import IdBatch, accumulator, raise_out_of_range
from .codes import load_row
from .compiled import inner, kernel
from .launch import KINDS, STREAMED, kernel_input, ranges, run_tasks, threads_for
from .rows import BLOCK, Composition, Source, block_rows, composition_of, prefetch_words, rows_bytes, run_of, slot_item
from .vector import INT64, choose, fence, item, load, over_columns, reserve, size_of, store, times, wide


@inner
def compose(zero, j, kind, source, rows, i, how):
    """The vector of the block's id ``i``: as many columns as ``zero`` has lanes, zeros where it reads no row.

    ``rows`` are those of ``block_rows`` for all parts.
    """
    first = 1 if how.both else 0
    row = item(INT64, rows, first * BLOCK + i)
    if row < 0:
        return zero
    vector = load_row(kind, zero, source.stored, source.row_size, row, j)
    for k in range(first + 1, how.num_parts):
        other = load_row(kind, zero, source.stored, source.row_size, item(INT64, rows, k * BLOCK + i), j)
        combined = vector * other if how.mult else vector + other
        vector = choose(item(INT64, rows, i) >= 0, vector, combined) if how.both else combined
    return vector


@inner
def _compose_ids(zero, j, kind, source, out_kind, out, step, n, rows, how, streamed):
    for i in range(n):
        store(out_kind, out, i * step + j, compose(zero, j, kind, source, rows, i, how), streamed)


@over_columns
def _compose_block(zero, j, kind, W, source, out_kind, out, step, n, rows, how, streamed):
    """Write the vectors of the block's ``n`` ids, ``step`` elements apart."""
    if how.num_parts == 3 and how.both:  # a pool; this and the next are the most common, fastest if the compiler knows
        _compose_ids(zero, j, kind, source, out_kind, out, step, n, rows, Composition(3, True, how.mult), streamed)
    elif how.num_parts == 2 and how.mult and not how.both:
        _compose_ids(zero, j, kind, source, out_kind, out, step, n, rows, Composition(2, False, True), streamed)
    else:
        _compose_ids(zero, j, kind, source, out_kind, out, step, n, rows, how, streamed)


@inner
def compose_run(kind, W, source, s, b, n, rows, out_kind, out, step, streamed):
    """Write the vectors of ``n`` ids from ``b`` on, ``step`` elements apart, of slots that read the same rows.

    Returns how many slots from ``s`` on these are, and whether an id was out of range.
    """
    how = composition_of(source, s)
    run = run_of(source, s, how.num_parts) if source.row_size == W * size_of(kind) else 1  # codes are read row by row
    if s + run < source.num_slots:
        prefetch_words(source, s + run, b, n)
    invalid = block_rows(source, s, b, n, 0, how.num_parts, run * source.row_size, rows)
    _compose_block(kind, times(W, run), source, out_kind, out, step, n, rows, how, streamed)
    return run, invalid


@kernel
def lookup_kernel(kind, W, source, out_kind, out, streamed, first, last):
    """Write composed vectors ``[B, S, W]`` of batch entries ``first`` to ``last``.

    Returns whether an id was out of range.
    """
    source = Source(*source)
    S, rows, any_invalid = source.num_slots, reserve(rows_bytes(source)), False
    for b in range(first, last, BLOCK):
        n, s = min(BLOCK, last - b), 0
        while s < S:
            vectors = out + (b * S + s) * W * size_of(out_kind)
            run, invalid = compose_run(kind, W, source, s, b, n, rows, out_kind, vectors, S * W, streamed)
            any_invalid |= invalid
            s += run
    if streamed:
        fence()
    return any_invalid


@over_columns
def _pool(zero, j, kind, W, source, out_kind, out, carry, resumed, finished, rows, begin, end, factors, how):
    """Add ids ``begin`` to ``end`` of the block to their bag; write it to ``out`` if finished, else to ``carry``."""
    pooled = load(wide(kind), zero, carry, j) if resumed else zero
    for i in range(begin, end):
        if item(INT64, rows, (BLOCK if how.both else 0) + i) >= 0:
            pooled = pooled + compose(zero, j, kind, source, rows, i, how) * item(wide(kind), factors, i)
    if finished:
        store(out_kind, out, j, pooled)
    else:
        store(wide(kind), carry, j, pooled)


@kernel
def bag_kernel(kind, W, source, out_kind, out, carry, first, last):
    """Write composed, then pooled vectors ``[B, S, W]``; otherwise as ``lookup_kernel``.

    A block of ids may end within a bag; ``carry`` ``[W]`` then keeps the sum so far.
    """
    source = Source(*source)
    S, rows, any_invalid = source.num_slots, reserve(rows_bytes(source)), False
    for s in range(S):
        ends = source.offsets + (slot_item(source, s, column.FEATURE) * source.batch_size + 1) * 8
        p, stop = item(INT64, ends, first - 1), item(INT64, ends, last - 1)
        how, b, resumed = composition_of(source, s), first, False
        while b < last:
            n = min(BLOCK, stop - p)
            any_invalid |= block_rows(source, s, p, n, 0, how.num_parts, source.row_size, rows)
            factors = source.factors + p * size_of(wide(kind))
            begin, finished = 0, True
            while b < last and finished:
                finished = item(INT64, ends, b) <= p + n
                end = item(INT64, ends, b) - p if finished else n
                vector = out + (b * S + s) * W * size_of(out_kind)
                _pool(kind, W, source, out_kind, vector, carry, resumed, finished, rows, begin, end, factors, how)
                begin, resumed, b = end, not finished, b + finished
            p += n
    return any_invalid


def lookup(batch: IdBatch, stored: Tensor, layout: Layout, *, names: str, **codes: Unpack[CodeOptions]) -> Tensor:
    """``ops.lookup.lookup``, or IndexError for an id out of range."""
    inputs = kernel_input(batch, stored, layout, codes=codes)
    if inputs is None:
        return NotImplemented
    (slots, partitions, _), width = layout.parts.shape, codes.get("width", stored.shape[1])
    wanted = codes.get("dtype", stored.dtype)
    dtype = torch.float32 if codes and wanted is torch.float64 else wanted  # what kernels write if rows are codes
    out = in_huge_pages(stored.new_empty((inputs.size, slots, width), dtype=dtype))
    streamed = out.nbytes >= STREAMED and (out.data_ptr() | width * out.itemsize) % 64 == 0
    fixed = (inputs.kind, inputs.width, inputs.source, KINDS[dtype], out.data_ptr())

    def run(first: int, last: int) -> bool:
        if batch.offsets is None:
            invalid: bool = lookup_kernel(*fixed, streamed, first, last)
        else:
            carry = out.new_empty(width, dtype=accumulator(out))
            invalid = bag_kernel(*fixed, carry.data_ptr(), first, last)
        return invalid

    threads = threads_for(inputs.num_ids * slots // layout.spans.shape[0] * width * partitions)
    if run(0, inputs.size) if threads == 1 else run_tasks(run, ranges(inputs.size, threads), threads):
        raise_out_of_range(batch, layout, names)
    return out.to(wanted)

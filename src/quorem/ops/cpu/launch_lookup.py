"""Lookup, bag and their gradients on a CPU.

A small batch runs on the calling thread, a large one on as many threads as torch may use.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import count_invalid_
from ..rows import accumulator, raise_out_of_range
from . import gradients
from . import lookup as kernels
from .launch import KINDS, Codes, IdBatch, bag_batch, lookup_batch, raise_misfit, sum_by_row
from .pages import in_huge_pages
from .rows import BLOCK, INVALID_IDS, MISFIT
from .threads import run_tasks, threads_for

STREAMED = 1 << 23  # bytes of output from which on it is written past the caches


def lookup(ids: Tensor, stored: Tensor, layout: Layout, *, names: str) -> Tensor:
    """``ops.lookup.lookup``, or IndexError for an id out of range."""
    batch = lookup_batch(ids, stored, layout, check=False)
    if batch is None:
        return NotImplemented
    out = _vectors(batch, stored, layout, stored.shape[1], stored.dtype)
    if not _write_vectors(batch, layout, out):
        raise_out_of_range(ids, None, layout, names)
    return out


def lookup_counting(ids: Tensor, stored: Tensor, layout: Layout, invalid: Tensor, *, names: str) -> Tensor:
    """``ops.lookup.lookup_counting``."""
    batch = lookup_batch(ids, stored, layout, check=False)
    if batch is None:
        return NotImplemented
    out = _vectors(batch, stored, layout, stored.shape[1], stored.dtype)
    if not _write_vectors(batch, layout, out):
        count_invalid_(ids, None, invalid, layout)
    return out


def lookup_quantized(
    ids: Tensor, stored: Tensor, layout: Layout, *, width: int, bits: int, dtype: torch.dtype, names: str
) -> Tensor:
    """``ops.lookup.lookup`` in rows of bytes, or IndexError for an id out of range."""
    batch = lookup_batch(ids, stored, layout, check=False, codes=Codes(width, bits))
    if batch is None:
        return NotImplemented
    out = _vectors(batch, stored, layout, width, _written(dtype))
    if not _write_vectors(batch, layout, out):
        raise_out_of_range(ids, None, layout, names)
    return out if out.dtype == dtype else out.to(dtype)


def _vectors(batch: IdBatch, stored: Tensor, layout: Layout, width: int, dtype: torch.dtype) -> Tensor:
    """What a lookup writes to, ``[B, S, W]``."""
    return in_huge_pages(stored.new_empty(batch.size, layout.parts.shape[0], width, dtype=dtype))


def _written(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which quantized rows are written: they are summed in float32."""
    return torch.float32 if dtype == torch.float64 else dtype


def _write_vectors(batch: IdBatch, layout: Layout, out: Tensor) -> bool:
    """Write the vectors of a lookup; whether all ids are in range."""
    address, row = out.data_ptr(), out.shape[2] * out.itemsize
    streamed = out.nbytes >= STREAMED and (address | row) % 64 == 0
    fixed = (batch.kind, batch.source, KINDS[out.dtype], address, streamed)
    with threads_for("lookup", out.numel() * layout.parts.shape[1]) as threads:
        if threads == 1:
            status = kernels.lookup(*fixed, 0, batch.size)
        else:
            status = run_tasks(lambda: partial(kernels.lookup, *fixed), _ranges(batch.size, threads), threads)
    if status == MISFIT:
        raise_misfit(batch.source)
    return status != INVALID_IDS


def lookup_backward(grad: Tensor, ids: Tensor, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    return _dense(grad, stored, layout, lookup_batch(ids, stored, layout, grad))


def lookup_row_grads(grad: Tensor, ids: Tensor, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    return _by_row(grad, stored, layout, lookup_batch(ids, stored, layout, grad))


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
    names: str,
) -> Tensor:
    """``ops.lookup.bag``, or IndexError for an id out of range."""
    batch = bag_batch(ids, offsets, sample_weights, stored, layout, mean)
    if batch is None:
        return NotImplemented
    out = _vectors(batch, stored, layout, stored.shape[1], stored.dtype)
    if not _write_pooled(batch, layout, out, accumulator(stored)):
        raise_out_of_range(ids, offsets, layout, names)
    return out


def bag_quantized(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
    mean: bool,
    names: str,
) -> Tensor:
    """``ops.lookup.bag`` in rows of bytes, or IndexError for an id out of range."""
    batch = bag_batch(ids, offsets, sample_weights, stored, layout, mean, codes=Codes(width, bits))
    if batch is None:
        return NotImplemented
    out = _vectors(batch, stored, layout, width, _written(dtype))
    if not _write_pooled(batch, layout, out, torch.float32):
        raise_out_of_range(ids, offsets, layout, names)
    return out.to(dtype)


def _write_pooled(batch: IdBatch, layout: Layout, out: Tensor, sums: torch.dtype) -> bool:
    """Write the vectors of bags, summed in the dtype ``sums``; whether all ids are in range."""
    slots, partitions, _ = layout.parts.shape
    width, fixed = out.shape[2], (batch.kind, batch.source, KINDS[out.dtype], out.data_ptr())

    def worker() -> Callable[..., int]:
        carry = out.new_empty(width, dtype=sums)
        return lambda first, last: kernels.bag(*fixed, carry.data_ptr(), first, last)

    with threads_for("bag", batch.num_ids * slots // len(layout.spans) * width * partitions) as threads:
        return run_tasks(worker, _ranges(batch.size, threads), threads) != INVALID_IDS


def bag_backward(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
) -> Tensor:
    """The gradient ``[R, W]`` of ``bag``."""
    return _dense(grad, stored, layout, bag_batch(ids, offsets, sample_weights, stored, layout, mean, grad))


def bag_row_grads(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``bag`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    return _by_row(grad, stored, layout, bag_batch(ids, offsets, sample_weights, stored, layout, mean, grad))


def bag_sample_weights_backward(
    grad: Tensor, ids: Tensor, offsets: Tensor, stored: Tensor, layout: Layout, *, mean: bool
) -> Tensor:
    """The gradient ``[V]`` of the sample weights of ``bag``."""
    batch = bag_batch(ids, offsets, None, stored, layout, mean, grad)
    if batch is None:
        return NotImplemented
    features, grad = len(layout.spans), grad.contiguous()
    out = stored.new_zeros(ids.shape, dtype=accumulator(stored))
    run = partial(gradients.sample_weights, KINDS[stored.dtype], batch.source, out.data_ptr(), grad.data_ptr())
    starts = offsets[:: batch.size].tolist() if batch.size else [0] * (features + 1)
    bounds = enumerate(pairwise(starts))
    with threads_for("sample weights", batch.num_ids * len(layout.slots) // features * stored.shape[1]) as threads:
        tasks = [(f, *ids) for f, (start, end) in bounds for ids in _ranges(end - start, threads, start)]
        run_tasks(lambda: run, tasks, threads)
    return out.to(grad.dtype)


def _dense(grad: Tensor, stored: Tensor, layout: Layout, batch: IdBatch | None) -> Tensor:
    if batch is None:
        return NotImplemented
    out = in_huge_pages(stored.new_empty(stored.shape)).zero_()
    run = partial(gradients.write_dense, KINDS[stored.dtype], out.data_ptr())
    sum_by_row(grad, stored, batch, layout, lambda areas, unit: run(areas))
    return out


def _by_row(grad: Tensor, stored: Tensor, layout: Layout, batch: IdBatch | None) -> tuple[Tensor, Tensor]:
    if batch is None:
        return NotImplemented
    kind, width = KINDS[stored.dtype], stored.shape[1]
    pieces: list[tuple[tuple[int, int], Tensor, Tensor]] = []  # unit and first row, rows, values

    def collect(areas: tuple[int, ...], unit: int) -> None:
        count = gradients.count_rows(areas)
        rows = stored.new_empty(count, dtype=torch.int64)
        values = stored.new_empty(count, width, dtype=accumulator(stored))
        gradients.write_sparse(kind, rows.data_ptr(), values.data_ptr(), areas)
        pieces.append(((unit, int(rows[0]) if count else -1), rows, values))

    sum_by_row(grad, stored, batch, layout, collect)
    pieces.sort(key=lambda piece: piece[0])  # in the same order, whichever thread was first
    _, rows, values = zip(*pieces, strict=True)
    return torch.cat(rows), torch.cat(values)


def _ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, start + n)) for first in range(start, start + n, max(step, 1)))

"""Lookup and bag on a CPU: of numbers, and of rows in 8 or 4 bits.

A small batch runs on the calling thread, a large one on as many threads as torch may use.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions, count_invalid_
from ..rows import accumulator, raise_out_of_range
from . import lookup as kernels
from .launch import KINDS, IdBatch, bag_batch, lookup_batch, raise_misfit
from .pages import in_huge_pages
from .source import BLOCK, INVALID_IDS, MISFIT
from .threads import run_tasks, threads_for

STREAMED = 1 << 23  # bytes of output from which on it is written past the caches


def lookup(ids: Tensor, stored: Tensor, layout: Layout, *, names: str, **codes: Unpack[CodeOptions]) -> Tensor:
    """``ops.lookup.lookup``, or IndexError for an id out of range."""
    batch = lookup_batch(ids, stored, layout, check=False, codes=codes)
    if batch is None:
        return NotImplemented
    out = _new_vectors(batch, stored, layout, codes)
    if not _write_vectors(batch, layout, out):
        raise_out_of_range(ids, None, layout, names)
    return out.double() if codes.get("dtype") is torch.float64 else out


def lookup_counting(
    ids: Tensor, stored: Tensor, layout: Layout, invalid: Tensor, *, names: str, **codes: Unpack[CodeOptions]
) -> Tensor:
    """``ops.lookup.lookup_counting``."""
    batch = lookup_batch(ids, stored, layout, check=False, codes=codes)
    if batch is None:
        return NotImplemented
    out = _new_vectors(batch, stored, layout, codes)
    if not _write_vectors(batch, layout, out):
        count_invalid_(ids, None, invalid, layout)
    return out.double() if codes.get("dtype") is torch.float64 else out


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    mean: bool,
    names: str,
    **codes: Unpack[CodeOptions],
) -> Tensor:
    """``ops.lookup.bag``, or IndexError for an id out of range."""
    batch = bag_batch(ids, offsets, sample_weights, stored, layout, mean, codes=codes)
    if batch is None:
        return NotImplemented
    out = _new_vectors(batch, stored, layout, codes)
    slots, partitions, _ = layout.parts.shape
    width, fixed = out.shape[2], (batch.kind, batch.source, KINDS[out.dtype], out.data_ptr())

    def worker() -> Callable[..., int]:
        carry = out.new_empty(width, dtype=accumulator(stored))
        return lambda first, last: kernels.bag(*fixed, carry.data_ptr(), first, last)

    with threads_for("bag", batch.num_ids * slots // len(layout.spans) * width * partitions) as threads:
        if run_tasks(worker, ranges(batch.size, threads), threads) == INVALID_IDS:
            raise_out_of_range(ids, offsets, layout, names)
    return out.double() if codes.get("dtype") is torch.float64 else out


def _new_vectors(batch: IdBatch, stored: Tensor, layout: Layout, codes: CodeOptions) -> Tensor:
    """What is written to, ``[B, S, W]``. Kernels write quantized rows in float32 where float64 is wanted."""
    dtype = codes.get("dtype", stored.dtype)
    dtype = torch.float32 if codes and dtype == torch.float64 else dtype
    width = codes.get("width", stored.shape[1])
    return in_huge_pages(stored.new_empty(batch.size, layout.parts.shape[0], width, dtype=dtype))


def _write_vectors(batch: IdBatch, layout: Layout, out: Tensor) -> bool:
    """Write the vectors of a lookup; whether all ids are in range."""
    address, row = out.data_ptr(), out.shape[2] * out.itemsize
    streamed = out.nbytes >= STREAMED and (address | row) % 64 == 0
    fixed = (batch.kind, batch.source, KINDS[out.dtype], address, streamed)
    with threads_for("lookup", out.numel() * layout.parts.shape[1]) as threads:
        if threads == 1:
            status = kernels.lookup(*fixed, 0, batch.size)
        else:
            status = run_tasks(lambda: partial(kernels.lookup, *fixed), ranges(batch.size, threads), threads)
    if status == MISFIT:
        raise_misfit(batch.source)
    return status != INVALID_IDS


def ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, start + n)) for first in range(start, start + n, max(step, 1)))

"""Lookups of single ids and of bags on a CPU: of numbers, and of rows in 8 or 4 bits.

A small batch runs on the calling thread, a large one on as many threads as torch may use.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions, count_invalid_
from ..rows import IdBatch, accumulator, raise_out_of_range
from . import lookup as kernels
from .launch import KINDS, KernelInput, kernel_input
from .pages import in_huge_pages
from .source import BLOCK, INVALID_IDS
from .threads import run_tasks, threads_for

STREAMED = 1 << 23  # bytes of output from which on it is written past the caches


def lookup(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor | None = None,
    *,
    names: str,
    **codes: Unpack[CodeOptions],
) -> Tensor:
    """``ops.lookup.lookup``, or IndexError for an id out of range."""
    inputs = kernel_input(batch, stored, layout, codes=codes)
    if inputs is None:
        return NotImplemented
    dtype = wanted = codes.get("dtype", stored.dtype)
    if codes and wanted is torch.float64:
        dtype = torch.float32  # what kernels write if rows are codes
    shape = (inputs.size, layout.parts.shape[0], codes.get("width", stored.shape[1]))
    out = in_huge_pages(stored.new_empty(shape, dtype=dtype))
    status = _write_vectors(inputs, layout, out) if batch.offsets is None else _write_pooled(inputs, layout, out)
    if status == INVALID_IDS:
        if invalid is None:
            raise_out_of_range(batch, layout, names)
        else:
            count_invalid_(batch, invalid, layout)
    return out if dtype is wanted else out.double()


def _write_vectors(inputs: KernelInput, layout: Layout, out: Tensor) -> int:
    """Write the vectors of single ids; VALID or INVALID_IDS."""
    address, row = out.data_ptr(), out.shape[2] * out.itemsize
    streamed = out.nbytes >= STREAMED and (address | row) % 64 == 0
    fixed = (inputs.kind, inputs.width, inputs.source, KINDS[out.dtype], address, streamed)
    threads = threads_for(out.numel() * layout.parts.shape[1])
    if threads == 1:
        status: int = kernels.lookup(*fixed, 0, inputs.size)
        return status
    return run_tasks(lambda: partial(kernels.lookup, *fixed), ranges(inputs.size, threads), threads)


def _write_pooled(inputs: KernelInput, layout: Layout, out: Tensor) -> int:
    """Write the pooled vectors of bags; VALID or INVALID_IDS."""
    slots, partitions, _ = layout.parts.shape
    width, fixed = out.shape[2], (inputs.kind, inputs.width, inputs.source, KINDS[out.dtype], out.data_ptr())

    def worker() -> Callable[..., int]:
        carry = out.new_empty(width, dtype=accumulator(out))
        return lambda first, last: kernels.bag(*fixed, carry.data_ptr(), first, last)

    threads = threads_for(inputs.num_ids * slots // len(layout.spans) * width * partitions)
    return run_tasks(worker, ranges(inputs.size, threads), threads)


def ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, start + n)) for first in range(start, start + n, max(step, 1)))

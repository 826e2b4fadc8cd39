"""Lookups of single ids and of bags on a CPU: of numbers, and of rows in 8 or 4 bits.

A small batch runs on the calling thread, a large one on as many threads as torch may use.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions, count_invalid_
from ..rows import IdBatch, accumulator, raise_out_of_range
from . import lookup as kernels
from .launch import KINDS, KernelInput, kernel_input
from .pages import in_huge_pages
from .source import BLOCK
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
    if _write(inputs, layout, out, single=batch.offsets is None):
        if invalid is None:
            raise_out_of_range(batch, layout, names)
        else:
            count_invalid_(batch, invalid, layout)
    return out if dtype is wanted else out.double()


def _write(inputs: KernelInput, layout: Layout, out: Tensor, single: bool) -> bool:
    """Write the vectors of single ids, or the pooled vectors of bags. Returns whether an id was out of range."""
    (slots, partitions, _), width, address = layout.parts.shape, out.shape[2], out.data_ptr()
    streamed = out.nbytes >= STREAMED and (address | width * out.itemsize) % 64 == 0
    fixed = (inputs.kind, inputs.width, inputs.source, KINDS[out.dtype], address)

    def run(first: int, last: int) -> bool:
        if single:
            invalid: bool = kernels.lookup(*fixed, streamed, first, last)
        else:
            carry = out.new_empty(width, dtype=accumulator(out))
            invalid = kernels.bag(*fixed, carry.data_ptr(), first, last)
        return invalid

    threads = threads_for(inputs.num_ids * slots // len(layout.spans) * width * partitions)
    return run_tasks(run, ranges(inputs.size, threads), threads)


def ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, start + n)) for first in range(start, start + n, max(step, 1)))

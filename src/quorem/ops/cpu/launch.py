"""From tensors to what the kernels take: the ids of a batch, the rows that they read, and rules that move these.

And the threads that run them. Kernels run without the interpreter's lock, so Python's own threads serve. Unlike
Numba's, they can be used from any thread, survive a fork, and do not spin while they wait.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ...paper.schemes import Full
from ..codes import NARROW, code_bytes, num_stored, stored_shape
from ..layout import Layout, build, check_rows, num_rows_read
from ..lookup import CodeOptions
from ..memory import PerTensor
from ..pieces import Gradient
from ..rows import IdBatch, accumulator
from ..state import RowRule
from ..words import with_words
from .codes import CODE_KINDS
from .rows import BLOCK, fill_bags
from .vector import columns

# What the kernels take as ``kind`` (see ``vector``).
KINDS = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
MOST_PARTITIONS = 128  # kernels keep the rows of a block on the stack, 1 KB for each partition
STREAMED = 1 << 23  # bytes of output from which on it is written past the caches
_NO_CODES = CodeOptions()


@dataclass(eq=False)
class KernelInput:
    """The ids of a batch and the rows that they read, as kernels take them."""

    kind: Any  # of the rows
    width: Any  # W, as ``columns`` gives it
    source: tuple[int, ...]  # a ``Source``
    size: int  # B
    num_ids: int  # of all features
    longest: int  # the most ids of one feature
    memory: tuple[Any, ...]  # keeps alive what ``source`` points to


def kernel_input(
    batch: IdBatch, stored: Tensor, layout: Layout, grad: Gradient | None = None, codes: CodeOptions = _NO_CODES
) -> KernelInput | None:
    """What kernels take of a batch; None if they cannot take it, or ``grad``, the gradient of its vectors."""
    ids, offsets, sample_weights, mean = batch
    features, width = layout.spans.shape[0], codes.get("width", stored.shape[1])
    if offsets is None:
        size, is_shaped = ids.shape[0], ids.dim() == 2 and ids.shape[1] == features
    else:
        size, rest = divmod(len(offsets) - 1, features)
        is_shaped = ids.dim() == 1 and not rest and (sample_weights is None or sample_weights.shape == ids.shape)
    if ids.dtype not in (torch.int32, torch.int64):
        return None
    if isinstance(grad, Tensor):
        is_known = grad.dtype == stored.dtype or grad.dtype == accumulator(stored)
        if not is_known or grad.shape != (size, layout.slots.shape[0], width):
            return None
    kind: Any = KINDS.get(stored.dtype)
    num_rows, row_size = len(stored), stored.shape[1] * stored.itemsize
    if codes and stored.dtype == torch.uint8 and stored.shape[1] == stored_shape(1, width, codes["bits"])[1]:
        kind, num_rows = CODE_KINDS[codes["bits"], width <= NARROW], num_stored(stored, width)
        row_size = code_bytes(width, codes["bits"]) if width <= NARROW else row_size
    known = kernel_layout(layout) if is_shaped and kind is not None else None
    if known is None:
        return None
    stored = stored.contiguous()
    if num_rows < known.num_rows:
        check_rows(num_rows, known.num_rows)
    rows = (stored.data_ptr(), row_size, *known.fields)
    if offsets is None:
        source = (*rows, ids.data_ptr(), int(ids.dtype == torch.int64), *ids.stride(), size, 0, 0, 0)
        return KernelInput(kind, columns(width), source, size, size * features, size, (ids, stored, known))
    ids, offsets = ids.contiguous(), offsets.long().contiguous()
    entries = ids.new_empty(ids.shape, dtype=torch.int32)  # the batch entry of each id
    factors = stored.new_empty(ids.shape, dtype=accumulator(stored))
    weights = None if sample_weights is None else sample_weights.to(factors.dtype).contiguous()
    jagged = (offsets.data_ptr(), entries.data_ptr(), factors.data_ptr())
    source = (*rows, ids.data_ptr(), int(ids.dtype == torch.int64), 1, 0, size, *jagged)
    if not fill_bags(kind, source, 0 if weights is None else weights.data_ptr(), len(ids), mean):
        return None
    longest = int(offsets[::size].diff().max()) if size else 0
    memory = (ids, stored, known, offsets, entries, factors)
    return KernelInput(kind, columns(width), source, size, len(ids), longest, memory)


class KernelLayout(NamedTuple):
    """A layout that was checked, as kernels take it."""

    stamp: tuple[int, ...]
    num_rows: int  # that ``stored`` must have
    fields: tuple[Any, ...]  # of ``Source``, from ``slots`` to ``integer``
    maps: Tensor  # with the words of lists
    kept: tuple[Tensor, ...]  # with the addresses of ``fields`` and ``stamp``; not ``layout.slots``: this dies with it


_layouts = PerTensor()  # layout.slots -> KernelLayout


def kernel_layout(layout: Layout) -> KernelLayout | None:
    """A layout, checked, as kernels take it, kept until one of its tensors changes; None if they cannot take it."""
    stamp, known = _stamp(layout), _layouts.get(layout.slots)
    if known is not None and known.stamp == stamp:
        return cast(KernelLayout, known)
    if layout.parts.shape[1] > MOST_PARTITIONS or not all(t.is_contiguous() for t in layout):
        return None
    num_rows, words = num_rows_read(layout), with_words(layout, layout.slots)
    slots, parts, maps, spans = (t.data_ptr() for t in (words.slots, layout.parts, words.maps, layout.spans))
    integer = np.int32(0) if layout.slots.dtype == torch.int32 else np.int64(0)
    fields = (slots, parts, maps, spans, words.levels, *layout.parts.shape[:2], layout.spans.shape[0], integer)
    kept = (*layout[1:], words.slots) if words.levels else layout[1:]
    return _layouts.set(layout.slots, KernelLayout(stamp, num_rows, fields, words.maps, kept))


def _stamp(layout: Layout) -> tuple[int, ...]:
    """Numbers of which one changes if a tensor is written to or its memory is exchanged."""
    slots, parts, maps, spans, ranks = layout
    addresses = (slots.data_ptr(), parts.data_ptr(), maps.data_ptr(), spans.data_ptr(), ranks.data_ptr())
    try:
        return (slots._version, parts._version, maps._version, spans._version, ranks._version, *addresses)
    except RuntimeError:  # tensors that were made in inference mode do not count writes
        return (*(hash(tensor.numpy().tobytes()) for tensor in layout), *addresses)


def ranges(n: int, threads: int) -> Iterator[tuple[int, int]]:
    """``n`` entries in ranges of whole blocks, four a thread, so that a slow thread can leave some to the others."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((first, min(first + step, n)) for first in range(0, n, max(step, 1)))


def rows_as_ids(rows: Tensor, stored: Tensor) -> tuple[IdBatch, Layout]:
    """``rows`` as ids of one table, which is ``stored``, or IndexError. Those below 0 are no ids."""
    rows = rows.flatten()
    if len(rows) and int(rows.max()) >= len(stored):
        raise IndexError(f"rows ({int(rows.max())}) must be below the number of rows ({len(stored)})")
    return IdBatch(rows[:, None].long()), _rows_as_table(len(stored))


@lru_cache(maxsize=16)
def _rows_as_table(num_rows: int) -> Layout:
    return build([Full().spec(num_rows, 1)], [None]).layout


def fits(stored: Tensor, rule: RowRule) -> bool:
    """Whether there are kernels for the rule, and they can change ``stored`` and its state in place."""
    if not rule.entry.fused or stored.dtype not in KINDS or not stored.is_contiguous():
        return False
    shape = stored.shape[:1] if rule.entry.by_row else stored.shape
    averages = [getattr(rule.state, name) for name in rule.entry.averages]
    return all(average.shape == shape and average.is_contiguous() for average in averages)


GRAIN = 1 << 20  # elements of a lookup that are worth a thread
STEP_COST = 4  # times as long as to look a number up does it take to sum its gradient and update it


def threads_for(elements: int) -> int:
    """How many threads to use for the work of looking up that many numbers. They do not change the results."""
    return max(min(torch.get_num_threads(), elements // GRAIN), 1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quorem")


def run_tasks(run: Callable[..., bool | None], tasks: Iterable[tuple[Any, ...]], threads: int) -> bool:
    """Call ``run`` with each task, on whichever of some threads is free first; returns whether a call returned True."""
    if threads == 1:
        return any([run(*task) for task in tasks])
    futures = [_pool(threads).submit(run, *task) for task in tasks]
    try:
        return any([future.result() for future in futures])
    finally:  # even after an exception: other threads still use memory that this one owns
        wait(futures)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of the threads

"""Lookup, bag and their gradients on a CPU: what ``ops.lookup`` registers where Numba is present.

A small batch runs on the calling thread, a large one on as many as torch may use.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..lookup import raise_out_of_range
from ..reference import accumulator
from . import backward, forward
from .arguments import KINDS, Batch, Integers, bag_batch, layout_of, lookup_batch, table_of
from .rows import BLOCK
from .threads import spread, threads_for

STREAMED = 1 << 23  # bytes of output from which on it is written past the caches
CACHED = 1 << 20  # bytes of summed gradients at a time, so that they are still in a core's cache when they are used


def lookup(ids: Tensor, weight: Tensor, *integers: Tensor, names: str) -> Tensor:
    """``reference.lookup``, or IndexError for an id out of range."""
    batch = lookup_batch(ids, weight, integers)
    if batch is None:
        return NotImplemented
    slots, parts, _, spans = integers
    out = weight.new_empty(ids.shape[0], slots.shape[0], weight.shape[1])
    weight = weight.contiguous()
    aligned = (out.data_ptr() | weight.shape[1] * weight.itemsize) % 64 == 0
    streamed = aligned and out.nbytes >= STREAMED
    fixed = (KINDS[weight.dtype], out.data_ptr(), streamed, table_of(weight), batch.source, layout_of(integers))
    threads = threads_for(out.numel() * parts.shape[1])
    if threads == 1:
        outside = forward.lookup(*fixed, 0, batch.longest)
    else:
        outside = spread(lambda: partial(forward.lookup, *fixed), _ranges(batch.longest, threads), threads)
    if outside:
        raise_out_of_range(ids, None, slots, spans, names)
    return out


def lookup_backward(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    return _dense(grad, weight, integers, lookup_batch(ids, weight, integers, grad))


def lookup_row_grads(grad: Tensor, ids: Tensor, weight: Tensor, *integers: Tensor) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    return _rows(grad, weight, integers, lookup_batch(ids, weight, integers, grad))


def bag(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
    names: str,
) -> Tensor:
    """``reference.bag``, or IndexError for an id out of range."""
    batch = bag_batch(ids, offsets, sample_weights, weight, integers, mean)
    if batch is None:
        return NotImplemented
    slots, parts, _, spans = integers
    weight = weight.contiguous()
    starts, _, scale, size = batch.bags
    out = weight.new_empty(size, len(slots), weight.shape[1])
    fixed = (KINDS[weight.dtype], out.data_ptr(), table_of(weight), batch.source, layout_of(integers), starts, scale)

    def worker() -> Callable[..., bool]:
        carry = torch.empty(weight.shape[1], dtype=accumulator(weight))
        return lambda first, last: forward.bag(*fixed, carry.data_ptr(), size, first, last)

    threads = threads_for(batch.ids * len(slots) // len(spans) * weight.shape[1] * parts.shape[1])
    if spread(worker, _ranges(size, threads), threads):
        raise_out_of_range(ids, offsets, slots, spans, names)
    return out


def bag_backward(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
) -> Tensor:
    """The gradient ``[R, W]`` of ``bag``."""
    return _dense(grad, weight, integers, bag_batch(ids, offsets, sample_weights, weight, integers, mean, grad))


def bag_row_grads(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    *integers: Tensor,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``bag`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    return _rows(grad, weight, integers, bag_batch(ids, offsets, sample_weights, weight, integers, mean, grad))


def bag_sample_weights_backward(
    grad: Tensor, ids: Tensor, offsets: Tensor, weight: Tensor, *integers: Tensor, mean: bool
) -> Tensor:
    """The gradient ``[V]`` of the sample weights of ``bag``."""
    batch = bag_batch(ids, offsets, None, weight, integers, mean, grad)
    if batch is None:
        return NotImplemented
    slots, _, _, spans = integers
    grad, weight = grad.contiguous(), weight.contiguous()
    _, where, scale, size = batch.bags
    out = torch.zeros(ids.shape, dtype=accumulator(weight))
    fixed = (out.data_ptr(), grad.data_ptr(), table_of(weight), batch.source, layout_of(integers), spans.data_ptr())
    run = partial(forward.bag_sample_weights_backward, KINDS[weight.dtype], *fixed, where, scale)
    threads = threads_for(batch.ids * len(slots) // len(spans) * weight.shape[1])
    bounds = offsets[::size].tolist() if size else [0] * (len(spans) + 1)
    tasks = [(f, *pair) for f, at in enumerate(bounds[:-1]) for pair in _ranges(bounds[f + 1] - at, threads, at)]
    spread(lambda: run, tasks, threads)
    return out.to(grad.dtype)


def sum_by_row(
    grad: Tensor,
    weight: Tensor,
    integers: tuple[Tensor, ...],
    batch: Batch,
    apply: Callable[[Integers, int], None],
    together: bool = False,
) -> None:
    """Sum the row gradients of a batch, some slots at a time, and hand the sums on while they are in the cache.

    Args:
        grad: of what the batch read.
        weight: contiguous.
        integers: the layout.
        batch: the ids.
        apply: takes the areas with the sums (see ``backward``) and their first slot, on the thread that filled them.
            It runs after all gradients of these slots are taken, and no other slot reads their rows.
        together: hand all slots on at once.
    """
    grad = grad.contiguous()
    slots, k, _ = integers[1].shape
    kind, width = KINDS[weight.dtype], weight.shape[1]
    step = backward.area_bytes(batch.longest, k, width, accumulator(weight).itemsize)
    fixed = (kind, grad.data_ptr(), table_of(weight), batch.source, layout_of(integers), batch.bags)
    threads = 1 if together else threads_for(batch.longest * slots * k * width)

    def areas_for(count: int) -> tuple[Tensor, Integers]:
        scratch = torch.empty(count * step + 64, dtype=torch.uint8)
        return scratch, (-(-scratch.data_ptr() // 64) * 64, step, count, k, width)

    if threads > 1 and slots < 2 * threads:
        shares = -(-2 * threads // slots)
        tasks = [(s, residue) for s in range(slots) for residue in range(shares)]
        memory = {task: areas_for(1) for task in tasks}

        def sum_share(s: int, residue: int) -> None:
            backward.sum_slots(*fixed, memory[s, residue][1], s, residue, shares)

        spread(lambda: sum_share, tasks, threads)
        spread(lambda: lambda s, residue: apply(memory[s, residue][1], s), tasks, threads)
        return

    count = slots if together else max(1, min(CACHED // step, slots if threads == 1 else slots // (4 * threads)))

    def worker() -> Callable[..., None]:
        scratch, areas = areas_for(count)

        def run(first: int) -> None:
            here = (*areas[:2], min(count, slots - first), *areas[3:])
            backward.sum_slots(*fixed, here, first, 0, 1)
            apply(here, first)
            scratch.data_ptr()  # alive until here

        return run

    spread(worker, [(first,) for first in range(0, slots, count)], threads)


def _dense(grad: Tensor, weight: Tensor, integers: tuple[Tensor, ...], batch: Batch | None) -> Tensor:
    if batch is None:
        return NotImplemented
    weight = weight.contiguous()
    out = torch.zeros_like(weight)
    run = partial(backward.scatter, KINDS[weight.dtype], out.data_ptr())
    sum_by_row(grad, weight, integers, batch, lambda areas, first: run(areas))
    return out


def _rows(grad: Tensor, weight: Tensor, integers: tuple[Tensor, ...], batch: Batch | None) -> tuple[Tensor, Tensor]:
    if batch is None:
        return NotImplemented
    weight = weight.contiguous()
    kind, width = KINDS[weight.dtype], weight.shape[1]
    found: list[tuple[tuple[int, int], Tensor, Tensor]] = []

    def collect(areas: Integers, first: int) -> None:
        most = areas[2] * areas[3] * batch.longest
        rows, values = torch.empty(most, dtype=torch.int64), torch.empty(most, width, dtype=accumulator(weight))
        count = backward.collect(kind, rows.data_ptr(), values.data_ptr(), areas)
        found.append(((first, int(rows[0]) if count else -1), rows[:count], values[:count]))

    sum_by_row(grad, weight, integers, batch, collect)
    found.sort(key=lambda part: part[0])  # whichever thread was first
    _, rows, values = zip(*found, strict=True)
    return torch.cat(rows), torch.cat(values)


def _ranges(n: int, threads: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """``n`` entries in blocks, four ranges a thread so that a delayed one holds up little."""
    step = n if threads == 1 else -(-n // (4 * threads * BLOCK)) * BLOCK
    return ((at, min(at + step, start + n)) for at in range(start, start + n, max(step, 1)))

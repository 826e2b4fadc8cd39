"""Gradients of a lookup on a CPU, summed by row, on several threads."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from . import gradients
from .launch import KernelInput, kernel_input, ranges
from .pages import Scratch, in_huge_pages
from .sharing import Unit, sharing_of
from .threads import STEP_COST, run_tasks, threads_for

Apply = Callable[[tuple[int, ...]], None]  # what is done to summed gradients, given in ``Areas``


def backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None:
        return NotImplemented
    out = in_huge_pages(stored.new_empty(stored.shape)).zero_()
    sum_by_row(grad, stored, inputs, layout, partial(gradients.write_dense, inputs.kind, inputs.width, out.data_ptr()))
    return out


def row_grads(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None:
        return NotImplemented
    pieces: list[tuple[int, Tensor, Tensor]] = []  # first row, rows, values

    def collect(areas: tuple[int, ...]) -> None:
        count = gradients.count_rows(areas)
        rows = stored.new_empty(count, dtype=torch.int64)
        values = stored.new_empty(count, stored.shape[1], dtype=accumulator(stored))
        gradients.write_sparse(inputs.kind, inputs.width, rows.data_ptr(), values.data_ptr(), areas)
        pieces.append((int(rows[0]) if count else -1, rows, values))

    sum_by_row(grad, stored, inputs, layout, collect)
    pieces.sort(key=lambda piece: piece[0])  # in the same order, whichever thread was first
    _, rows, values = zip(*pieces, strict=True)
    return torch.cat(rows), torch.cat(values)


def sample_weights_backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[V]`` of the sample weights of a batch of bags."""
    ids, offsets, _, mean = batch
    inputs = kernel_input(IdBatch(ids, offsets, mean=mean), stored, layout, grad)
    if inputs is None or offsets is None:
        return NotImplemented
    features, grad = len(layout.spans), grad.contiguous()
    out = stored.new_zeros(ids.shape, dtype=accumulator(stored))
    fixed = (inputs.kind, inputs.width, inputs.source, out.data_ptr(), grad.data_ptr())
    run = partial(gradients.sample_weights, *fixed)
    starts = offsets[:: inputs.size].tolist() if inputs.size else [0] * (features + 1)
    bounds = enumerate(pairwise(starts))
    threads = threads_for(inputs.num_ids * len(layout.slots) // features * stored.shape[1])
    tasks = [(f, *ids) for f, (start, end) in bounds for ids in ranges(end - start, threads, start)]
    run_tasks(run, tasks, threads)
    return out.to(grad.dtype)


def sum_by_row(grad: Tensor, stored: Tensor, inputs: KernelInput, layout: Layout, apply: Apply) -> None:
    """Sum the row gradients of a batch, some slots at a time, and use the sums while they are in the cache.

    Args:
        grad: of what the batch read.
        stored: what it read from.
        inputs: the ids, as kernels take them.
        layout: of ``stored``.
        apply: called with areas of sums, on the thread that filled them. By then all gradients of these slots are
            computed. No other slot reads their rows, so these may be changed.
    """
    slots, partitions, _ = layout.parts.shape
    grad, sharing = grad.contiguous(), sharing_of(layout)
    threads = threads_for(STEP_COST * inputs.longest * slots * partitions * stored.shape[1])
    shares = -(-2 * threads * sharing.largest_group // slots) if threads > 1 else 1  # threads that share a unit's rows
    most_slots = slots if threads == 1 else 1 if shares > 1 else max(slots // (4 * threads), 1)
    placement = sharing.placement(inputs.longest, stored.shape[1], accumulator(stored).itemsize, most_slots)
    units, fixed = placement.units, (inputs.kind, inputs.width, inputs.source, grad.data_ptr())
    tables = (placement.order.data_ptr(), placement.offsets.data_ptr(), sharing.owners.data_ptr())

    def areas(scratch: Scratch, unit: Unit) -> tuple[int, ...]:
        return (scratch.address, unit.num_slots, partitions, sharing.pitches.data_ptr(), unit.first, *tables)

    if shares > 1:
        tasks = [(u, share) for u in range(len(units)) for share in range(shares)]
        scratch = {task: Scratch(units[task[0]].num_bytes) for task in tasks}

        def sum_share(u: int, share: int) -> None:
            gradients.sum_slots(*fixed, areas(scratch[u, share], units[u]), share, shares)

        run_tasks(sum_share, tasks, threads)
        run_tasks(lambda u, share: apply(areas(scratch[u, share], units[u])), tasks, threads)
        return

    def sum_unit(u: int) -> None:
        scratch = Scratch(units[u].num_bytes)
        unit = areas(scratch, units[u])
        gradients.sum_slots(*fixed, unit, 0, 1)
        apply(unit)

    run_tasks(sum_unit, [(u,) for u in range(len(units))], threads)

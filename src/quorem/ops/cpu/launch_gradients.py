"""Gradients of a lookup on a CPU, summed by row, on several threads."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..layout import Layout
from ..rows import IdBatch, accumulator
from . import gradients
from .areas import ALL_PARTS, PRIVATE_PARTS, SHARED_PARTS, Areas
from .launch import KINDS, KernelInput, kernel_input
from .launch_lookup import ranges
from .pages import in_huge_pages
from .scratch import Scratch
from .sharing import Sharing, Unit, sharing_of
from .threads import STEP_COST, run_tasks, threads_for

Apply = Callable[[tuple[int, ...]], None]  # what is done to summed gradients, given in ``Areas``


def backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None:
        return NotImplemented
    out = in_huge_pages(stored.new_empty(stored.shape)).zero_()
    sum_by_row(grad, stored, inputs, layout, partial(gradients.write_dense, KINDS[stored.dtype], out.data_ptr()))
    return out


def row_grads(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None:
        return NotImplemented
    kind, width = KINDS[stored.dtype], stored.shape[1]
    pieces: list[tuple[int, Tensor, Tensor]] = []  # first row, rows, values

    def collect(areas: tuple[int, ...]) -> None:
        count = gradients.count_rows(areas)
        rows = stored.new_empty(count, dtype=torch.int64)
        values = stored.new_empty(count, width, dtype=accumulator(stored))
        gradients.write_sparse(kind, rows.data_ptr(), values.data_ptr(), areas)
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
    run = partial(gradients.sample_weights, KINDS[stored.dtype], inputs.source, out.data_ptr(), grad.data_ptr())
    starts = offsets[:: inputs.size].tolist() if inputs.size else [0] * (features + 1)
    bounds = enumerate(pairwise(starts))
    threads = threads_for(inputs.num_ids * len(layout.slots) // features * stored.shape[1])
    tasks = [(f, *ids) for f, (start, end) in bounds for ids in ranges(end - start, threads, start)]
    run_tasks(lambda: run, tasks, threads)
    return out.to(grad.dtype)


def sum_by_row(
    grad: Tensor, stored: Tensor, inputs: KernelInput, layout: Layout, apply: Apply, all_at_once: bool = False
) -> None:
    """Sum the row gradients of a batch, some slots at a time, and use the sums while they are in the cache.

    Args:
        grad: of what the batch read.
        stored: what it read from.
        inputs: the ids, as kernels take them.
        layout: of ``stored``.
        apply: called with areas of sums, on the thread that filled them. By then all gradients of these slots are
            computed. No other slot reads their rows, so these may be changed.
        all_at_once: call ``apply`` once, with all slots in their order.
    """
    slots, partitions, _ = layout.parts.shape
    elements = 0 if all_at_once else inputs.longest * slots * partitions * stored.shape[1]
    grad, sharing = grad.contiguous(), sharing_of(layout)
    # Parts that several slots read are summed over all these slots before one of their rows changes: last, so that the
    # sums of all other parts are used while they are in the cache.
    passes = (PRIVATE_PARTS, SHARED_PARTS) if sharing.splits and not all_at_once else (ALL_PARTS,)
    threads = threads_for(STEP_COST * elements)
    for parts_taken in passes:
        _sum_parts(grad, stored, inputs, layout, sharing, apply, parts_taken, 0 if all_at_once else threads)


def _sum_parts(
    grad: Tensor,
    stored: Tensor,
    inputs: KernelInput,
    layout: Layout,
    sharing: Sharing,
    apply: Apply,
    parts_taken: int,
    threads: int,
) -> None:
    """Sum the gradients of some parts and use the sums; 0 threads mean one thread and all slots at once."""
    slots, partitions, _ = layout.parts.shape
    largest = 1 if parts_taken == PRIVATE_PARTS else sharing.largest_group
    shares = -(-2 * threads * largest // slots) if threads > 1 else 1  # threads that share the rows of a unit
    most_slots = threads if threads == 0 else slots if threads == 1 else max(slots // (4 * threads), 1)
    sizes = (stored.shape[1], accumulator(stored).itemsize)
    placement = sharing.placement(inputs.longest, *sizes, parts_taken, 1 if shares > 1 else most_slots)
    units, fixed = placement.units, (KINDS[stored.dtype], inputs.source, grad.data_ptr())
    tables = (placement.order.data_ptr(), placement.offsets.data_ptr(), sharing.owners.data_ptr())

    def areas(scratch: Scratch, unit: Unit) -> tuple[int, ...]:
        shape = (unit.num_slots, partitions, stored.shape[1], sharing.pitches.data_ptr(), unit.first)
        return tuple(Areas(scratch.address, *shape, *tables, parts_taken, sharing.private.data_ptr()))

    if shares > 1:
        tasks = [(u, share) for u in range(len(units)) for share in range(shares)]
        scratch = {task: Scratch(units[task[0]].num_bytes) for task in tasks}

        def sum_share(u: int, share: int) -> None:
            gradients.sum_slots(*fixed, areas(scratch[u, share], units[u]), share, shares)

        run_tasks(lambda: sum_share, tasks, threads)
        run_tasks(lambda: lambda u, share: apply(areas(scratch[u, share], units[u])), tasks, threads)
        return

    def worker() -> Callable[..., None]:
        scratch = Scratch(max(unit.num_bytes for unit in units))

        def run(u: int) -> None:
            unit = areas(scratch, units[u])
            gradients.sum_slots(*fixed, unit, 0, 1)
            apply(unit)

        return run

    run_tasks(worker, [(u,) for u in range(len(units))], max(threads, 1))

"""From tensors to what the kernels take; and gradients summed by row, on several threads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..codes import code_bytes
from ..layout import Layout
from ..rows import accumulator
from . import gradients, lookup
from .gradients import ALL_PARTS, PRIVATE_PARTS, SHARED_PARTS, Areas, area_bytes
from .pages import in_huge_pages
from .rows import Source, source_fits
from .scratch import Scratch
from .sharing import Placement, Sharing, Unit, sharing_of
from .threads import run_tasks, threads_for

# What the kernels take as ``kind`` (see ``vector``).
KINDS = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
CODE_KINDS = {8: np.uint8(0), 4: np.int8(0)}  # of quantized rows, by their bits
MOST_PARTITIONS = 128  # kernels keep the rows of a block on the stack, 512 bytes for each partition
CACHED = 1 << 20  # bytes of summed gradients at a time, so that they are still in a core's cache when they are used


class Codes(NamedTuple):
    """What quantized rows stand for."""

    width: int
    bits: int


@dataclass(eq=False)
class IdBatch:
    """The ids of a batch and the rows that they read."""

    kind: Any  # of the rows, as kernels take it
    source: tuple[int, ...]  # a ``Source``, as kernels take it
    size: int  # B
    num_ids: int  # of all features
    longest: int  # the most ids of one feature
    memory: tuple[Tensor, ...]  # keeps alive what ``source`` points to


def lookup_batch(
    ids: Tensor,
    stored: Tensor,
    layout: Layout,
    grad: Tensor | None = None,
    check: bool = True,
    codes: Codes | None = None,
) -> IdBatch | None:
    """The batch of a lookup, ids ``[B, F]``; None if the kernels cannot take it.

    Args:
        ids: int32 or int64.
        stored: what they read from.
        layout: of ``stored``.
        grad: of the vectors, where there is one.
        check: raise ValueError if ``stored`` does not have all rows of its layout; else the kernel has to look.
        codes: of ``stored``, where its rows are quantized.
    """
    kind = _kind(ids, stored, layout, grad, len(ids), codes)
    if kind is None or ids.dim() != 2 or ids.shape[1] != layout.spans.shape[0]:
        return None
    if grad is not None and ids.nbytes > CACHED:
        ids = in_huge_pages(ids.new_empty(ids.shape[::-1])).copy_(ids.t()).t()  # by feature, as gradients are summed
    size, features = ids.shape
    stored, width = stored.contiguous(), stored.shape[1] if codes is None else codes.width
    source = _source(stored, width, layout, ids, *ids.stride(), size, 0, 0, 0)
    if check:
        check_source(source)
    return IdBatch(kind, source, size, size * features, size, (ids, stored))


def bag_batch(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    mean: bool,
    grad: Tensor | None = None,
    codes: Codes | None = None,
) -> IdBatch | None:
    """The batch of a bag, with the batch entry and factor of each jagged id ``[V]``; None if kernels cannot take it."""
    features = len(layout.spans)
    size, rest = divmod(len(offsets) - 1, features)
    weights_fit = sample_weights is None or sample_weights.shape == ids.shape
    kind = _kind(ids, stored, layout, grad, size, codes)
    if kind is None or ids.dim() != 1 or rest or not weights_fit:
        return None
    stored, ids, offsets = stored.contiguous(), ids.contiguous(), offsets.long().contiguous()
    entries = ids.new_empty(ids.shape, dtype=torch.int32)
    width, numbers = (stored.shape[1], accumulator(stored)) if codes is None else (codes.width, torch.float32)
    factors = stored.new_empty(ids.shape, dtype=numbers)
    weights = None if sample_weights is None else sample_weights.to(factors.dtype).contiguous()
    jagged = (offsets.data_ptr(), entries.data_ptr(), factors.data_ptr())
    source = _source(stored, width, layout, ids, 1, 0, size, *jagged)
    check_source(source)
    if not lookup.fill_bags(kind, source, 0 if weights is None else weights.data_ptr(), len(ids), mean):
        return None
    longest = int(offsets[::size].diff().max()) if size else 0
    return IdBatch(kind, source, size, len(ids), longest, (ids, stored, offsets, entries, factors))


def _kind(
    ids: Tensor, stored: Tensor, layout: Layout, grad: Tensor | None, size: int, codes: Codes | None
) -> Any | None:
    """The kind of the rows; None if kernels cannot take the arguments."""
    if codes is None:
        kind = KINDS.get(stored.dtype)
    else:
        fits = stored.dtype == torch.uint8 and stored.shape[1] == code_bytes(*codes) + 4
        kind = CODE_KINDS.get(codes.bits) if fits else None
    if ids.dtype not in (torch.int32, torch.int64):
        return None
    for tensor in layout:
        if not tensor.is_contiguous():
            return None
    num_slots, num_partitions, _ = layout.parts.shape
    if num_partitions > MOST_PARTITIONS:
        return None
    if grad is not None and (grad.dtype != stored.dtype or grad.shape != (size, num_slots, stored.shape[1])):
        return None
    return kind


def _source(stored: Tensor, width: int, layout: Layout, ids: Tensor, *rest: int) -> tuple[int, ...]:
    """The fields of ``Source`` in their order, of which ``rest`` are those from ``entry_stride`` on.

    Raises:
        TypeError: if a tensor of the layout is not int64; ``ranks`` may be int32.
    """
    slots, parts, maps, spans, ranks = layout
    dtypes = slots.dtype == parts.dtype == maps.dtype == spans.dtype == torch.int64
    if not dtypes or ranks.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"layout ({', '.join(str(t.dtype) for t in layout)}) must be torch.int64")
    tensors = (slots.data_ptr(), parts.data_ptr(), maps.data_ptr(), spans.data_ptr(), ranks.data_ptr())
    sizes = (*parts.shape[:2], maps.shape[0], spans.shape[0], ranks.shape[0], int(ranks.dtype == torch.int64))
    rows = (stored.data_ptr(), stored.shape[0], width)
    return *rows, *tensors, *sizes, ids.data_ptr(), int(ids.dtype == torch.int64), *rest


def check_source(source: tuple[int, ...]) -> None:
    """Raise ValueError unless every row that the layout names is one of ``stored``."""
    if not source_fits(source):
        raise_misfit(source)


def raise_misfit(source: tuple[int, ...]) -> NoReturn:
    """Say that ``stored`` and its layout do not belong together."""
    rows = Source(*source).num_rows
    raise ValueError(f"stored ({rows} rows) must have every row that its layout names: was one of them replaced?")


def sum_by_row(
    grad: Tensor,
    stored: Tensor,
    batch: IdBatch,
    layout: Layout,
    apply: Callable[[tuple[int, ...], int], None],
    all_at_once: bool = False,
) -> None:
    """Sum the row gradients of a batch, some slots at a time, and use the sums while they are in the cache.

    Args:
        grad: of what the batch read.
        stored: what it read from.
        batch: the ids.
        layout: of ``stored``.
        apply: called with areas of sums (see ``gradients``) and a rising number, on the thread that filled them. By
            then all gradients of these slots are computed. No other slot reads their rows, so these may be changed.
        all_at_once: call ``apply`` once, with all slots in their order.
    """
    slots, partitions, _ = layout.parts.shape
    elements = 0 if all_at_once else batch.longest * slots * partitions * stored.shape[1]
    with threads_for("gradients", elements) as threads:
        _sum_by_row(grad.contiguous(), stored, batch, layout, apply, all_at_once, threads)


def _sum_by_row(
    grad: Tensor,
    stored: Tensor,
    batch: IdBatch,
    layout: Layout,
    apply: Callable[[tuple[int, ...], int], None],
    all_at_once: bool,
    threads: int,
) -> None:
    sharing = sharing_of(layout)
    if sharing is None or all_at_once or not sharing.splits:
        work = _work(stored, batch, layout, sharing, ALL_PARTS, all_at_once, threads)
        _run(grad, stored, batch, work, apply, threads)
        return
    # Parts that several slots read are summed over all these slots before one of their rows changes: last, so that the
    # sums of all other parts are used while they are in the cache.
    work = _work(stored, batch, layout, sharing, PRIVATE_PARTS, False, threads)
    _run(grad, stored, batch, work, apply, threads)
    first = len(work.units)
    work = _work(stored, batch, layout, sharing, SHARED_PARTS, False, threads)
    _run(grad, stored, batch, work, lambda areas, unit: apply(areas, first + unit), threads)


class _Work(NamedTuple):
    """Units of work, and how many threads share the rows of each."""

    units: tuple[Unit, ...]
    shares: int
    areas: Callable[[Scratch, Unit], tuple[int, ...]]  # of a unit, in memory of its own


def _work(
    stored: Tensor,
    batch: IdBatch,
    layout: Layout,
    sharing: Sharing | None,
    parts_taken: int,
    all_at_once: bool,
    threads: int,
) -> _Work:
    """How the sums of some parts are shared out to threads."""
    slots, partitions, _ = layout.parts.shape
    width, float_bytes = stored.shape[1], accumulator(stored).itemsize
    placement: Placement | None = None  # kept by ``areas`` as long as kernels use it
    if sharing is None or parts_taken == PRIVATE_PARTS:
        step = area_bytes([batch.longest] * partitions, width, float_bytes)
        shares = -(-2 * threads // slots) if threads > 1 and slots < 2 * threads else 1
        count = max(1, min(CACHED // step, slots if threads == 1 else slots // (4 * threads)))
        count = slots if all_at_once else 1 if shares > 1 else count
        firsts = range(0, slots, count)
        units = tuple(Unit(first, min(count, slots - first), min(count, slots - first) * step) for first in firsts)
    else:
        step, shares = 0, 1 if threads == 1 or sharing.is_even(2 * threads) else 2 * threads
        most_bytes = -1 if all_at_once else CACHED if threads == 1 else 0
        shared_only = parts_taken == SHARED_PARTS
        placement = sharing.placement(batch.longest, width, float_bytes, most_bytes, shared_only)
        units = placement.units

    def areas(scratch: Scratch, unit: Unit) -> tuple[int, ...]:
        sizes = (step, unit.num_slots, partitions, width, layout.parts.data_ptr())
        places = (0, 0, 0)
        if placement is not None and sharing is not None:
            places = (placement.order.data_ptr(), placement.offsets.data_ptr(), sharing.owners.data_ptr())
        private = 0 if sharing is None else sharing.private.data_ptr()
        return tuple(Areas(scratch.address, *sizes, unit.first, *places, parts_taken, private))

    return _Work(units, shares, areas)


def _run(
    grad: Tensor,
    stored: Tensor,
    batch: IdBatch,
    work: _Work,
    apply: Callable[[tuple[int, ...], int], None],
    threads: int,
) -> None:
    """Sum the units of some work and use the sums."""
    units, shares, areas = work
    fixed = (KINDS[stored.dtype], batch.source, grad.data_ptr())
    if shares > 1:
        tasks = [(u, share) for u in range(len(units)) for share in range(shares)]
        scratch = {task: Scratch(units[task[0]].num_bytes) for task in tasks}

        def sum_share(u: int, share: int) -> None:
            gradients.sum_slots(*fixed, areas(scratch[u, share], units[u]), share, shares)

        run_tasks(lambda: sum_share, tasks, threads)
        run_tasks(lambda: lambda u, share: apply(areas(scratch[u, share], units[u]), u), tasks, threads)
        return

    def worker() -> Callable[..., None]:
        scratch = Scratch(max(unit.num_bytes for unit in units))

        def run(u: int) -> None:
            unit = areas(scratch, units[u])
            gradients.sum_slots(*fixed, unit, 0, 1)
            apply(unit, u)

        return run

    run_tasks(worker, [(u,) for u in range(len(units))], threads)

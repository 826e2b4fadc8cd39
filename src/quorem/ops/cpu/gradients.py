"""Gradients of the rows that a batch reads, summed by row before they touch the tables.

One slot at a time. Each distinct row that the slot's ids read gets an index, in order of first appearance, and its
gradients are added up under that index. So the sums take no more memory than the batch needs. An index is found by the
row itself if the table has no more rows than the batch has ids, else by a hash table.

The gradients of a row are always added in the same order: slot by slot, and within a slot in the order of the batch. So
the bits do not depend on the number of threads.
"""

from array import array
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from ..pieces import Gradient, SplitGradient
from ..rows import IdBatch, accumulator
from .codes import load_row
from .compiled import helper, inner, kernel
from .launch import KINDS, KernelInput, kernel_input
from .pages import in_huge_pages, scratch
from .rows import BLOCK, Source, block_rows, composition_of, prefetch_words, rows_bytes, slot_ids
from .sharing import Work, sharing_of
from .sums import Unit, init_places, place_at, place_of, put_count
from .threads import STEP_COST, run_tasks, threads_for
from .vector import INT32, INT64, item, load, over_columns, prefetch, put, reserve, size_of, store, times, wide

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
Apply = Callable[[tuple[int, ...]], None]  # what is done to summed gradients, given in a ``Unit``


@helper
def _positions(rows, n, positions):
    """Fill ``positions`` with the positions of the block's ``n`` rows that are not -1; returns how many there are."""
    count = 0
    for i in range(n):  # without branches, which could not be predicted
        put(INT64, positions, count, i)
        count += 1 if item(INT64, rows, i) >= 0 else 0
    return count


@over_columns
def _clear(zero, j, kind, W, sum_):
    store(wide(kind), sum_, j, zero)


@helper
def _index_rows(kind, W, place, share, num_shares, positions, num_ids, rows, indices):
    """Fill ``indices`` for the block's rows at ``positions``; -1 for a row of another thread's share."""
    by_row, count, last = place.num_rows <= place.entries, place.count, place.entries - 1
    size = W * size_of(wide(kind))
    for p in range(num_ids):
        row = item(INT64, rows, item(INT64, positions, p))
        hashed = np.int64((np.uint64(row) * _GOLDEN_RATIO) >> np.uint64(32)) & last
        put(INT64, indices, p, row - place.base if by_row else hashed)
        prefetch(place.table + item(INT64, indices, p) * 4)
    for p in range(num_ids):
        row, position = item(INT64, rows, item(INT64, positions, p)), item(INT64, indices, p)
        if num_shares > 1 and (row - place.base) // place.pitch % num_shares != share:
            put(INT64, indices, p, -1)
            continue
        index = np.int64(item(INT32, place.table, position)) - 1
        while not by_row and index >= 0 and item(INT64, place.distinct, index) != row:
            position = (position + 1) & last
            index = np.int64(item(INT32, place.table, position)) - 1
        if index < 0:
            index = count
            count += 1
            put(INT32, place.table, position, count)
            put(INT64, place.distinct, index, row)
            _clear(kind, W, place.sums + index * size)
        put(INT64, indices, p, index)
        prefetch(place.sums + index * size)
    put_count(place, count)


@inner
def _add_ids(
    zero, j, kind, W, source, grad_kind, grad, starts, factors, positions, num_ids, rows, num_parts, mult, indices, sums
):
    float_kind = wide(kind)
    for p in range(num_ids):
        i = item(INT64, positions, p)
        gradient = load(grad_kind, zero, grad, item(INT64, starts, p) + j)
        if factors:
            gradient = gradient * item(float_kind, factors, i)
        for k in range(num_parts):
            value = gradient
            if mult:
                for other in range(num_parts):
                    if other != k:
                        row = item(INT64, rows, other * BLOCK + i)
                        value = value * load_row(kind, zero, source.stored, source.row_size, row, j)
            index = item(INT64, indices, k * BLOCK + p)
            if index >= 0:
                sum_, column = item(INT64, sums, k), index * W + j
                store(float_kind, sum_, column, load(float_kind, zero, sum_, column) + value)


@over_columns
def _add_block(
    zero, j, kind, W, source, grad_kind, grad, starts, factors, positions, num_ids, rows, num_parts, mult, indices, sums
):
    """Add the gradients of ids of a block to the sums of the rows they read; ``sums`` has K addresses."""
    ids = (source, grad_kind, grad, starts, factors, positions, num_ids, rows)
    if num_parts == 2 and mult:  # the most common case, fastest if the compiler knows it
        _add_ids(zero, j, kind, W, *ids, 2, True, indices, sums)
    else:
        _add_ids(zero, j, kind, W, *ids, num_parts, mult, indices, sums)


@kernel
def sum_slots(kind, W, source, grad_kind, grads, unit, share, num_shares):
    """Sum the gradients of the slots of a unit by row.

    ``grads`` ``[S, 2]`` are the address of each slot's gradients, and the numbers from one batch entry to the next.

    Several threads may work on the same slots, each with memory of its own: one takes the rows of tables that leave the
    remainder ``share`` when divided by ``num_shares``.
    """
    source, unit = Source(*source), Unit(*unit)
    K, row_size = source.num_partitions, source.row_size
    sums, rows, indices = reserve(K * 8), reserve(rows_bytes(source)), reserve(K * BLOCK * 8)
    positions, starts = reserve(BLOCK * 8), reserve(BLOCK * 8)
    init_places(unit)
    for slot in range(unit.num_slots):
        s = item(INT64, unit.slots, slot)
        begin, end = slot_ids(source, s)
        how, grad, step = composition_of(source, s), item(INT64, grads, 2 * s), item(INT64, grads, 2 * s + 1)
        units = place_at(unit, place_of(unit, K, s, 0)).units
        width = times(W, units)
        first, last = 0, 1 if how.both else how.num_parts
        while first < last:  # where there are both: rows of ids' own, then composed ones
            num_parts, first_rows = last - first, rows + first * BLOCK * 8
            for k in range(num_parts):
                put(INT64, sums, k, place_at(unit, place_of(unit, K, s, first + k)).sums)
            for p in range(begin, end, BLOCK):
                n = min(BLOCK, end - p)
                prefetch_words(source, s, p + BLOCK, min(BLOCK, end - p - n))
                block_rows(source, s, p, n, first, last, units * row_size if how.mult and num_parts > 1 else 0, rows)
                count = _positions(first_rows, n, positions)
                for q in range(count):
                    i = p + item(INT64, positions, q)
                    b = np.int64(item(INT32, source.entries, i)) if source.entries else i
                    put(INT64, starts, q, b * step)
                    prefetch(grad + b * step * size_of(grad_kind))
                for k in range(num_parts):
                    place = place_at(unit, place_of(unit, K, s, first + k))
                    part = (first_rows + k * BLOCK * 8, indices + k * BLOCK * 8)
                    _index_rows(kind, width, place, share, num_shares, positions, count, *part)
                factors = source.factors + p * size_of(wide(kind)) if source.factors else 0
                ids = (positions, count, first_rows, num_parts, how.mult, indices, sums)
                _add_block(kind, width, source, grad_kind, grad, starts, factors, *ids)
            first, last = last, how.num_parts


@kernel
def count_rows(unit):
    """How many distinct rows a unit has."""
    unit, count = Unit(*unit), 0
    for p in range(unit.first, unit.first + unit.num_places):
        place = place_at(unit, p)
        count += place.count * place.units
    return count


@over_columns
def _copy(zero, j, kind, W, out, sum_):
    store(kind, out, j, load(kind, zero, sum_, j))


@kernel
def write_rows(float_kind, W, rows, values, unit):
    """Write the distinct rows ``[U]`` of a unit and their sums ``[U, W]``."""
    unit, written, size = Unit(*unit), 0, W * size_of(float_kind)
    for p in range(unit.first, unit.first + unit.num_places):
        place = place_at(unit, p)
        for u in range(place.count * place.units):
            put(INT64, rows, written, item(INT64, place.distinct, u // place.units) + u % place.units)
            _copy(float_kind, W, values + written * size, place.sums + u * size)
            written += 1


def backward(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    row_gradients = row_grads(grad, batch, stored, layout)
    if row_gradients is NotImplemented:
        return NotImplemented
    rows, values = row_gradients
    return in_huge_pages(stored.new_empty(stored.shape)).zero_().index_copy_(0, rows, values.to(stored.dtype))


def row_grads(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    inputs = kernel_input(batch, stored, layout, grad)
    if inputs is None:
        return NotImplemented
    pieces: list[tuple[int, Tensor, Tensor]] = []  # first row, rows, values

    def collect(unit: tuple[int, ...]) -> None:
        count = count_rows(unit)
        rows = stored.new_empty(count, dtype=torch.int64)
        values = stored.new_empty(count, stored.shape[1], dtype=accumulator(stored))
        write_rows(KINDS[values.dtype], inputs.width, rows.data_ptr(), values.data_ptr(), unit)
        pieces.append((int(rows[0]) if count else -1, rows, values))

    sum_by_row(grad, stored, inputs, layout, collect)
    pieces.sort(key=lambda piece: piece[0])  # in the same order, whichever thread was first
    _, rows, values = zip(*pieces, strict=True)
    return torch.cat(rows), torch.cat(values)


def _addresses(parts: list[Tensor], width: int) -> "array[int]":
    """``grads`` of ``sum_slots``; each of ``parts`` is the gradient of one or several slots."""
    numbers: list[int] = []
    for part in parts:  # asking each slot for its address would take as long as a small batch
        first, step, size = part.data_ptr(), part.stride(0), part.itemsize
        for address in range(first, first + part.shape[1] * size, width * size):
            numbers += (address, step)
    return array("q", numbers)


def sum_by_row(grad: Gradient, stored: Tensor, inputs: KernelInput, layout: Layout, apply: Apply) -> None:
    """Sum the row gradients of a batch, some slots at a time, and use the sums while they are in the cache.

    ``apply`` is called with each ``Unit`` of sums, when all gradients of its slots are computed. No other slot reads
    their rows, so it may change them.
    """
    slots, partitions, _ = layout.parts.shape
    parts = grad.parts() if isinstance(grad, SplitGradient) else [grad.contiguous().flatten(1)]
    sharing, grads = sharing_of(layout), _addresses(parts, stored.shape[1])
    threads = threads_for(STEP_COST * inputs.longest * slots * partitions * stored.shape[1])
    units, places = sharing.placement(inputs.longest, stored.shape[1], accumulator(stored).itemsize)
    shares = -(-threads // len(units))  # threads that share the rows of a unit
    fixed = (inputs.kind, inputs.width, inputs.source, KINDS[parts[0].dtype], grads.buffer_info()[0])
    order, tables = sharing.order.data_ptr(), (sharing.place_of.data_ptr(), places.data_ptr())

    def filled(memory: Tensor, work: Work, share: int) -> tuple[int, ...]:
        slots = (order + 8 * work.first_slot, work.num_slots)
        unit = (memory.data_ptr(), *slots, *tables, work.first_place, work.num_places)
        sum_slots(*fixed, unit, share, shares)
        return unit

    if shares == 1:
        run_tasks(lambda work: apply(filled(scratch(work.num_bytes), work, 0)), [(work,) for work in units], threads)
        return
    shared = [(work, share) for work in units for share in range(shares)]
    tasks = [(torch.empty(work.num_bytes, dtype=torch.uint8, device="cpu"), work, share) for work, share in shared]
    sums: list[tuple[int, ...]] = []
    run_tasks(lambda *task: sums.append(filled(*task)), tasks, threads)
    run_tasks(apply, [(unit,) for unit in sums], threads)

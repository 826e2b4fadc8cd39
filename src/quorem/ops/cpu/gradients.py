"""Gradients of the rows that a batch reads, summed by row before they touch the tables.

One slot at a time. Each distinct row that the slot's ids read gets an index, in order of first appearance, and its
gradients are added up under that index. So the sums take no more memory than the batch needs. An index is found by the
row itself if the table has no more rows than the batch has ids, else by a hash table.

The gradients of a row are always added in the same order: slot by slot, and within a slot in the order of the batch. So
the bits do not depend on the number of threads. ``Sharing`` says which slots are summed together.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layout import BASE, FEATURE, GROUP, PITCH, SIZE, UNUSED, Layout
from ..memory import PerTensor, in_huge_pages, scratch
from ..pieces import Gradient, SplitGradient
from ..rows import IdBatch, accumulator
from .codes import load_row
from .compiled import helper, kernel
from .launch import KINDS, STEP_COST, KernelInput, kernel_input, run_tasks, threads_for
from .rows import BLOCK, Source, block_rows, composition_of, prefetch_words, rows_bytes, slot_ids
from .sums import Unit, init_places, place_at, place_bytes, place_of, put_count
from .vector import INT32, INT64, item, load, over_columns, prefetch, put, reserve, size_of, store, times, wide

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
Apply = Callable[[tuple[int, ...]], None]  # what is done to summed gradients, given in a ``Unit``
CACHED_SUMS = 1 << 20  # bytes of summed gradients at a time, which are still in a core's cache when they are used
_MOST_PLACEMENTS = 16  # of one layout, for as many sizes of batches


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


@over_columns
def _add_block(
    zero, j, kind, W, source, grad_kind, grad, starts, factors, positions, num_ids, rows, num_parts, mult, indices, sums
):
    """Add the gradients of ids of a block to the sums of the rows they read; ``sums`` has K addresses."""
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


@kernel
def sum_slots(kind, W, source, grad_kind, grads, unit, share, num_shares):
    """Sum the gradients of the slots of a unit by row.

    ``grads`` are one or two tensors, each an address and the numbers from one batch entry to the next; and
    ``Pieces.gradient_columns``, 0 where the only tensor has the slots in their order.

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
        how, (first_grad, first_step, second_grad, second_step, columns) = composition_of(source, s), grads
        second, column = (
            (item(INT64, columns, 2 * s * W), item(INT64, columns, 2 * s * W + 1)) if columns else (0, s * W)
        )
        grad, step = (second_grad, second_step) if second else (first_grad, first_step)
        grad += column * size_of(grad_kind)
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


def _in_memory(grad: Gradient) -> tuple[int, ...]:
    """``grads`` of ``sum_slots``."""
    if isinstance(grad, SplitGradient):
        narrow, vectors = ((part.data_ptr(), part.stride(0)) for part in grad[:2])
        return (*narrow, *vectors, grad.pieces.gradient_columns.buffer_info()[0])
    return (grad.data_ptr(), grad.stride(0), 0, 0, 0)


class Work(NamedTuple):
    """Slots whose gradients are summed together."""

    first_slot: int  # the position of their first slot in ``Sharing.order``
    num_slots: int
    first_place: int
    num_places: int
    num_bytes: int  # of their places


class Sharing:
    """Which slots of a layout share rows: those of one group, part by part where the parts start at the same row."""

    def __init__(self, layout: Layout) -> None:
        self.num_slots, num_partitions, _ = layout.parts.shape
        groups: list[int] = layout.slots[:, GROUP].tolist()
        leaders: list[int] = []  # the first slot of each slot's group
        for slot, group in enumerate(groups):
            leaders.append(leaders[group] if group < slot else slot)
        self.groups: list[list[int]] = []  # of slots that are columns of the same rows only the first
        self._units: list[int] = []  # the number of these
        follows, members = _follows(layout), list[int]()
        for leader in sorted({*leaders}):
            before, members = members, [s for s in range(self.num_slots) if leaders[s] == leader]
            if members == [s + 1 for s in before] and follows[members].all():
                self._units[-1] += 1
            else:
                self.groups.append(members)
                self._units.append(1)
        self.order = torch.tensor([slot for group in self.groups for slot in group], device="cpu")
        self.place_of = torch.zeros(self.num_slots, num_partitions, dtype=torch.int64, device="cpu")
        self._places: list[list[tuple[int, int, int, int]]] = []  # of each group: base, size, pitch, number of readers
        self._placements = lru_cache(_MOST_PLACEMENTS)(self._place)
        parts, first = layout.parts[..., [BASE, SIZE, PITCH]].tolist(), 0
        for members in self.groups:
            places: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
            for slot in members:
                for k, (base, size, pitch) in enumerate(parts[slot]):
                    if base != UNUSED:
                        places.setdefault((groups[slot], base, size, pitch), []).append((slot, k))
            for number, readers in enumerate(places.values(), start=first):
                self.place_of[tuple(zip(*readers, strict=True))] = number
            self._places.append([(*key[1:], len(readers)) for key, readers in places.items()])
            first += len(places)
        both = zip(self._units, self._places, strict=True)
        # Whether a row of a table, which may be several rows of ``stored``, is summed as one.
        self.sums_whole_rows = all(pitch == units for units, places in both for _, _, pitch, _ in places)

    def placement(self, num_ids: int, width: int, float_bytes: int) -> tuple[list[Work], Tensor]:
        """Units of work of at most ``num_ids`` of each slot, and where places lie, int64 ``[P, PLACE_COLUMNS]``."""
        num_ids = 1 << max(num_ids - 1, 0).bit_length()  # so that batches of similar sizes share a placement
        return self._placements(num_ids, width, float_bytes)

    def _place(self, num_ids: int, width: int, float_bytes: int) -> tuple[list[Work], Tensor]:
        works, table = [Work(0, 0, 0, 0, 0)], list[tuple[int, ...]]()
        for slots, units, places in zip(self.groups, self._units, self._places, strict=True):
            limits = [min(readers * num_ids, rows) for _, rows, _, readers in places]
            sizes = [place_bytes(limit, units * width, float_bytes) for limit in limits]
            first_slot, num_slots, first_place, _, start = works[-1]
            if num_slots and start + sum(end for *_, end in sizes) > CACHED_SUMS:
                first_slot, num_slots, first_place, start = first_slot + num_slots, 0, len(table), 0
                works.append(Work(first_slot, 0, first_place, 0, 0))
            for (base, rows, pitch, _), (entries, hashes, sums, end) in zip(places, sizes, strict=True):
                table.append((base, rows * pitch, pitch, units, entries, start, start + hashes, start + sums))
                start += end
            works[-1] = Work(first_slot, num_slots + len(slots), first_place, len(table) - first_place, start)
        return works, torch.tensor(table, device="cpu")


def _follows(layout: Layout) -> Tensor:
    """Which slots ``[S]`` are the columns after those of the slot before, of the same rows."""
    change, used = layout.parts.diff(dim=0, prepend=layout.parts[:1]), layout.parts[..., BASE] != UNUSED
    change[..., BASE] -= used.to(change.dtype)
    same_rows = ((change == 0).all(2) & (~used | (layout.parts[..., PITCH] > 1))).all(1)
    same_rows[1:] &= layout.slots[1:, FEATURE] == layout.slots[:-1, FEATURE]
    return same_rows


_sharing = PerTensor()  # of ``slots``


def sharing_of(layout: Layout) -> Sharing:
    """Which slots share rows."""
    return _sharing.get(layout.slots) or _sharing.set(layout.slots, Sharing(layout))


def sum_by_row(grad: Gradient, stored: Tensor, inputs: KernelInput, layout: Layout, apply: Apply) -> None:
    """Sum the row gradients of a batch, some slots at a time, and use the sums while they are in the cache.

    ``apply`` is called with each ``Unit`` of sums, when all gradients of its slots are computed. No other slot reads
    their rows, so it may change them.
    """
    slots, partitions, _ = layout.parts.shape
    grad = grad if isinstance(grad, SplitGradient) else grad.contiguous()
    kind = KINDS[grad.vectors.dtype if isinstance(grad, SplitGradient) else grad.dtype]
    sharing, grads = sharing_of(layout), _in_memory(grad)
    threads = threads_for(STEP_COST * inputs.longest * slots * partitions * stored.shape[1])
    units, places = sharing.placement(inputs.longest, stored.shape[1], max(stored.itemsize, 4))
    shares = -(-threads // len(units))  # threads that share the rows of a unit
    fixed = (inputs.kind, inputs.width, inputs.source, kind, grads)
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

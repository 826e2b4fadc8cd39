"""Composed rows times the matrices of their tables: a block of the batch at a time, written where it belongs."""

import math
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions
from ..memory import in_huge_pages, scratch
from ..pieces import PIECE_COLUMNS, Pieces
from ..rows import IdBatch, accumulator, raise_out_of_range
from .compiled import helper, inner, kernel
from .launch import KINDS, STEP_COST, STREAMED, kernel_input, ranges, run_tasks, threads_for
from .lookup import compose_run
from .rows import BLOCK, Source, rows_bytes
from .vector import (
    INT64,
    columns,
    fence,
    item,
    load,
    multiply_add,
    over_columns,
    put,
    reserve,
    size_of,
    store,
    times,
    total,
    wide,
    zeros,
)

WIDEST = 256  # numbers of a narrow row; those of a block are kept on the stack
FEW = 32  # batch entries whose gradients are read together, nearly in the order in which they are in memory
CHUNK = 16 * BLOCK  # batch entries whose gradients of matrices are summed alone, on any number of threads


@over_columns
def _add_product(
    zero, j, kind, dim, x, x_step, number_step, y, y_step, out_kind, out, out_step, num_rows, num_terms, adds, streamed
):
    """Write ``x @ y`` into ``out``, or add it: four rows at a time, which share each row of ``y``, then the others."""
    one, whole = zeros(kind, 1), num_rows & -4
    for r in range(0, whole, 4):
        place = r * out_step + j
        first = load(out_kind, zero, out, place) if adds else zero
        second = load(out_kind, zero, out, place + out_step) if adds else zero
        third = load(out_kind, zero, out, place + 2 * out_step) if adds else zero
        fourth = load(out_kind, zero, out, place + 3 * out_step) if adds else zero
        for k in range(num_terms):
            row, number = load(kind, zero, y, k * y_step + j), r * x_step + k * number_step
            first = multiply_add(row, total(load(kind, one, x, number)), first)
            second = multiply_add(row, total(load(kind, one, x, number + x_step)), second)
            third = multiply_add(row, total(load(kind, one, x, number + 2 * x_step)), third)
            fourth = multiply_add(row, total(load(kind, one, x, number + 3 * x_step)), fourth)
        store(out_kind, out, place, first, streamed)
        store(out_kind, out, place + out_step, second, streamed)
        store(out_kind, out, place + 2 * out_step, third, streamed)
        store(out_kind, out, place + 3 * out_step, fourth, streamed)
    for r in range(whole, num_rows):
        vector = load(out_kind, zero, out, r * out_step + j) if adds else zero
        for k in range(num_terms):
            row = load(kind, zero, y, k * y_step + j)
            vector = multiply_add(row, total(load(kind, one, x, r * x_step + k * number_step)), vector)
        store(out_kind, out, r * out_step + j, vector, streamed)


@over_columns
def _copy(zero, j, kind, dim, x, x_step, out, out_step, n, streamed):
    for i in range(n):
        store(kind, out, i * out_step + j, load(kind, zero, x, i * x_step + j), streamed)


@inner
def _project(kind, dim, x, x_step, width, matrix, out, out_step, n, streamed):
    """Write the vectors of one piece of ``n`` batch entries; ``matrix`` is 0 for a copy."""
    if matrix:
        _add_product(kind, dim, x, x_step, 1, matrix, dim, kind, out, out_step, n, width, False, streamed)
    else:
        _copy(kind, dim, x, x_step, out, out_step, n, streamed)


class _Piece(NamedTuple):
    """A piece, as kernels see it (``Pieces.integers``)."""

    start: int
    width: int
    column: int
    dim: int
    matrix: int  # its address, 0 for a copy
    kept: int
    sums: int


@helper
def _piece_at(pieces, p):
    """Piece ``p``; ``pieces`` are the addresses of ``Pieces.integers`` and of the addresses of matrices."""
    integers, matrices = pieces
    place = integers + p * PIECE_COLUMNS * 8
    start, width, column = item(INT64, place, 0), item(INT64, place, 1), item(INT64, place, 2)
    dim, matrix = item(INT64, place, 3), item(INT64, place, 4)
    address = item(INT64, matrices, matrix) if matrix >= 0 else 0
    return _Piece(start, width, column, dim, address, item(INT64, place, 5), item(INT64, place, 6))


@kernel
def project_entries(x, x_step, D, kind, out, out_step, pieces, num_pieces, streamed, first, last):
    """Write the vectors of batch entries ``first`` to ``last``."""
    size = size_of(kind)
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for p in range(num_pieces):
            piece = _piece_at(pieces, p)
            source, target = x + (b * x_step + piece.start) * size, out + (b * out_step + piece.column) * size
            dim = times(D, piece.dim // D)
            _project(kind, dim, source, x_step, piece.width, piece.matrix, target, out_step, n, streamed)
    if streamed:
        fence()
    return False


@kernel
def project_backward_entries(W, D, kind, x, grad, of_x, transposed, sums, pieces, num_pieces, first, last):
    """Write the gradients ``of_x`` of composed rows ``first`` to ``last``, and add those of the matrices to ``sums``.

    ``x``, ``grad``, ``of_x`` and ``sums`` are an address and the numbers from one row to the next. ``sums`` are zeros,
    a row for each CHUNK of batch entries; ``transposed`` has room for the matrices.
    """
    (x, x_step), (grad, grad_step), (of_x, of_x_step), (sums, sums_step) = x, grad, of_x, sums
    size, sum_size = size_of(kind), size_of(wide(kind))
    sums += first // CHUNK * sums_step * sum_size
    for p in range(num_pieces):
        piece = _piece_at(pieces, p)
        for k in range(piece.width if piece.matrix else 0):
            for j in range(piece.dim):
                place = piece.sums + j * piece.width + k
                put(kind, transposed, place, item(kind, piece.matrix, k * piece.dim + j))
    for b in range(first, last, FEW):
        n = min(FEW, last - b)
        for p in range(num_pieces):
            piece = _piece_at(pieces, p)
            g, width = grad + (b * grad_step + piece.column) * size, times(W, piece.width // W)
            matrix = transposed + piece.sums * size if piece.matrix else 0
            target = of_x + (b * of_x_step + piece.start) * size
            _project(kind, width, g, grad_step, piece.dim, matrix, target, of_x_step, n, False)
            if piece.matrix:
                rows = (x + (b * x_step + piece.start) * size, 1, x_step, g, grad_step)
                target, dim = sums + piece.sums * sum_size, times(D, piece.dim // D)
                _add_product(kind, dim, *rows, wide(kind), target, piece.dim, piece.width, n, True, False)
    return False


@kernel
def look_up_and_project(
    kind, W, source, kept, kept_step, D, out_kind, out, out_step, pieces, num_pieces, streamed, first, last
):
    """The same of ids, whose composed rows go no further than the nearest cache, or into ``kept`` if it is not 0.

    Returns whether an id was out of range.
    """
    source, size = Source(*source), size_of(out_kind)
    rows, composed, any_invalid = reserve(rows_bytes(source)), reserve(BLOCK * WIDEST * size), False
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for p in range(num_pieces):
            piece = _piece_at(pieces, p)
            target = out + (b * out_step + piece.column) * size
            x, x_step = (composed, piece.width) if piece.matrix else (target, out_step)
            if piece.matrix and kept:
                x, x_step = kept + (b * kept_step + piece.kept) * size, kept_step
            s = piece.start
            while s < piece.start + piece.width:
                place = x + (s - piece.start) * size
                block = (s // W, b, n, rows, out_kind, place, x_step, streamed and piece.matrix == 0)
                run, invalid = compose_run(kind, W, source, *block)
                any_invalid |= invalid
                s += run * W
            if piece.matrix:
                dim = times(D, piece.dim // D)
                _project(out_kind, dim, x, x_step, piece.width, piece.matrix, target, out_step, n, streamed)
    if streamed:
        fence()
    return any_invalid


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """``ops.projection.project``."""
    addresses = _addresses(matrices, composed.dtype)
    if addresses is None:
        return NotImplemented
    composed = composed if composed.stride(1) == 1 else composed.contiguous()
    out = in_huge_pages(composed.new_empty(len(composed), pieces.num_columns))
    _run(project_entries, (composed.data_ptr(), composed.stride(0)), pieces, addresses, out)
    return out


def project_backward(
    grad: Tensor, composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """``ops.projection.project_backward``."""
    addresses = _addresses(matrices, composed.dtype)
    if addresses is None or grad.dtype != composed.dtype:
        return NotImplemented
    grad, composed = grad.contiguous(), composed.contiguous()
    of_composed, lengths = in_huge_pages(torch.empty_like(composed)), [width * dim for width, dim in pieces.shapes]
    chunks = [(first, min(first + CHUNK, len(grad))) for first in range(0, len(grad), CHUNK)]
    sums = grad.new_zeros((len(chunks), sum(lengths)), dtype=accumulator(grad))
    units, step = [columns(unit) for unit in pieces.units], composed.stride(0)
    tensors = ((composed.data_ptr(), step), (grad.data_ptr(), grad.stride(0)), (of_composed.data_ptr(), step))
    fixed, of_sums = (*units, KINDS[grad.dtype], *tensors), (sums.data_ptr(), sums.shape[1])

    def run(first: int, last: int) -> None:
        transposed = scratch(sums.shape[1] * grad.itemsize).data_ptr()
        project_backward_entries(*fixed, transposed, of_sums, *_in_memory(pieces, addresses), first, last)

    run_tasks(run, chunks, threads_for(STEP_COST * grad.numel()))
    # torch's sum may depend on the number of threads.
    whole = sums[0] if len(chunks) == 1 else torch.from_numpy(sums.numpy().sum(0))
    return of_composed, _as_matrices(whole.to(grad.dtype), pieces)


def _as_matrices(numbers: Tensor, pieces: Pieces) -> list[Tensor]:
    """The matrices that follow one another in ``numbers``, by few operators: one for each would take longest here."""
    found: list[Tensor] = []
    lengths = [dim * sum(widths) for dim, widths in pieces.widths_by_dim]
    for (dim, widths), part in zip(pieces.widths_by_dim, numbers.split(lengths), strict=True):
        found += part.view(-1, dim).split(widths)
    return found


def lookup_split(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    pieces: Pieces,
    matrices: Sequence[Tensor],
    *,
    names: str,
    keep: bool = False,
    **codes: Unpack[CodeOptions],
) -> Any:
    """The composed rows of ``pieces.narrow`` (None without ``keep``) and the vectors of single ids, in one pass.

    IndexError for an id out of range.
    """
    inputs, dtype = kernel_input(batch, stored, layout, codes=codes), codes.get("dtype", stored.dtype)
    addresses = _addresses(matrices, dtype)
    if inputs is None or addresses is None or pieces.widest > WIDEST or (codes and dtype == torch.float64):
        return NotImplemented
    out = in_huge_pages(stored.new_empty((inputs.size, pieces.num_columns), dtype=dtype))
    kept = in_huge_pages(out.new_empty(inputs.size, pieces.narrow.num_composed)) if keep else None
    fixed = (0, 0) if kept is None else (kept.data_ptr(), kept.stride(0))
    if _run(look_up_and_project, (inputs.kind, inputs.width, inputs.source, *fixed), pieces, addresses, out):
        raise_out_of_range(batch, layout, names)
    return kept, out


def _run(kernel: Any, fixed: tuple[Any, ...], pieces: Pieces, addresses: "array[int]", out: Tensor) -> bool:
    """What a kernel that writes into ``out`` returns."""
    unit, threads = pieces.units[1], threads_for(out.numel())
    streamed = out.nbytes >= STREAMED and math.gcd(out.data_ptr(), unit * out.itemsize) % 64 == 0
    target = (columns(unit), KINDS[out.dtype], out.data_ptr(), out.stride(0), *_in_memory(pieces, addresses), streamed)
    if threads == 1:
        return bool(kernel(*fixed, *target, 0, len(out)))
    return bool(run_tasks(partial(kernel, *fixed, *target), ranges(len(out), threads), threads))


def _addresses(matrices: Sequence[Tensor], dtype: torch.dtype) -> "array[int] | None":
    """Where the matrices are in memory; None if kernels for vectors of a dtype cannot take them."""
    if dtype not in KINDS:
        return None
    fitting = [m.data_ptr() for m in matrices if m.dtype is dtype and m.is_cpu and m.is_contiguous()]
    return array("q", fitting) if len(fitting) == len(matrices) else None


def _in_memory(pieces: Pieces, addresses: "array[int]") -> tuple[tuple[int, int], int]:
    """``pieces`` and ``num_pieces``, as kernels take them."""
    return (pieces.integers.buffer_info()[0], addresses.buffer_info()[0]), len(pieces)

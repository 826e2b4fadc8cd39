"""Composed rows times the matrices of their tables: a block of the batch at a time, written where it belongs."""

import math
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ..layout import Layout
from ..lookup import CodeOptions
from ..memory import in_huge_pages, scratch
from ..pieces import COLUMN, DIM, KEPT, MATRIX, PIECE_COLUMNS, START, SUMS, WIDTH, Pieces
from ..rows import IdBatch, accumulator, raise_out_of_range
from .compiled import helper, inner, kernel
from .launch import KINDS, STEP_COST, STREAMED, kernel_input, ranges, run_tasks, threads_for
from .lookup import compose_run, write_columns
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


@inner
def _multiply(zero, j, kind, dim, one, x, x_step, width, matrix, out, out_step, n, streamed):
    """Four batch entries at a time, which share each row of the matrix, then the last few."""
    whole = n & -4
    for i in range(0, whole, 4):
        first, second, third, fourth = zero, zero, zero, zero
        for k in range(width):
            row, place = load(kind, zero, matrix, k * dim + j), i * x_step + k
            first = multiply_add(row, total(load(kind, one, x, place)), first)
            second = multiply_add(row, total(load(kind, one, x, place + x_step)), second)
            third = multiply_add(row, total(load(kind, one, x, place + 2 * x_step)), third)
            fourth = multiply_add(row, total(load(kind, one, x, place + 3 * x_step)), fourth)
        place = i * out_step + j
        write_columns(kind, out, place, first, streamed)
        write_columns(kind, out, place + out_step, second, streamed)
        write_columns(kind, out, place + 2 * out_step, third, streamed)
        write_columns(kind, out, place + 3 * out_step, fourth, streamed)
    for i in range(whole, n):
        vector = zero
        for k in range(width):
            row = load(kind, zero, matrix, k * dim + j)
            vector = multiply_add(row, total(load(kind, one, x, i * x_step + k)), vector)
        write_columns(kind, out, i * out_step + j, vector, streamed)


@over_columns
def _columns(zero, j, kind, dim, one, x, x_step, width, matrix, out, out_step, n, streamed):
    """As many columns as ``zero`` has lanes, from ``j`` on, of a piece of ``n`` batch entries; ``one`` has one lane."""
    if matrix == 0:
        for i in range(n):
            write_columns(kind, out, i * out_step + j, load(kind, zero, x, i * x_step + j), streamed)
    else:
        _multiply(zero, j, kind, dim, one, x, x_step, width, matrix, out, out_step, n, streamed)


@over_columns
def _add_products(zero, j, kind, dim, one, x, x_step, width, grad, grad_step, sums, n):
    """Add the gradient of the matrix of a piece, from ``n`` batch entries, to ``sums``; four of its rows at a time."""
    whole = width & -4
    for k in range(0, whole, 4):
        place = k * dim + j
        first, second = load(wide(kind), zero, sums, place), load(wide(kind), zero, sums, place + dim)
        third, fourth = load(wide(kind), zero, sums, place + 2 * dim), load(wide(kind), zero, sums, place + 3 * dim)
        for i in range(n):
            g, number = load(kind, zero, grad, i * grad_step + j), i * x_step + k
            first = multiply_add(g, total(load(kind, one, x, number)), first)
            second = multiply_add(g, total(load(kind, one, x, number + 1)), second)
            third = multiply_add(g, total(load(kind, one, x, number + 2)), third)
            fourth = multiply_add(g, total(load(kind, one, x, number + 3)), fourth)
        store(wide(kind), sums, place, first)
        store(wide(kind), sums, place + dim, second)
        store(wide(kind), sums, place + 2 * dim, third)
        store(wide(kind), sums, place + 3 * dim, fourth)
    for k in range(whole, width):
        row = load(wide(kind), zero, sums, k * dim + j)
        for i in range(n):
            g = load(kind, zero, grad, i * grad_step + j)
            row = multiply_add(g, total(load(kind, one, x, i * x_step + k)), row)
        store(wide(kind), sums, k * dim + j, row)


@helper
def _matrix(pieces, p, matrices):
    """The address of a piece's matrix, 0 for a copy."""
    matrix = item(INT64, pieces, p + MATRIX)
    return item(INT64, matrices, matrix) if matrix >= 0 else 0


@kernel
def project_entries(x, x_step, D, kind, out, out_step, pieces, num_pieces, matrices, streamed, first, last):
    """Write the vectors of batch entries ``first`` to ``last``."""
    one = zeros(kind, 1)
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for p in range(0, num_pieces * PIECE_COLUMNS, PIECE_COLUMNS):
            width, dim = item(INT64, pieces, p + WIDTH), item(INT64, pieces, p + DIM)
            source = x + (b * x_step + item(INT64, pieces, p + START)) * size_of(kind)
            target = out + (b * out_step + item(INT64, pieces, p + COLUMN)) * size_of(kind)
            matrix = _matrix(pieces, p, matrices)
            _columns(kind, times(D, dim // D), one, source, x_step, width, matrix, target, out_step, n, streamed)
    if streamed:
        fence()
    return False


@kernel
def project_backward_entries(
    x,
    x_step,
    grad,
    grad_step,
    transposed,
    sums,
    sums_step,
    W,
    D,
    kind,
    out,
    out_step,
    pieces,
    num_pieces,
    matrices,
    first,
    last,
):
    """Write the gradients of composed rows ``first`` to ``last``, and add those of the matrices to ``sums``.

    ``sums`` are zeros, ``sums_step`` of them for each CHUNK of batch entries; ``transposed`` has room for the matrices.
    """
    one, size, sum_size = zeros(kind, 1), size_of(kind), size_of(wide(kind))
    sums += first // CHUNK * sums_step * sum_size
    for p in range(0, num_pieces * PIECE_COLUMNS, PIECE_COLUMNS):
        width, dim = item(INT64, pieces, p + WIDTH), item(INT64, pieces, p + DIM)
        matrix, weights = _matrix(pieces, p, matrices), transposed + item(INT64, pieces, p + SUMS) * size
        for k in range(width if matrix else 0):
            for j in range(dim):
                put(kind, weights, j * width + k, item(kind, matrix, k * dim + j))
    for b in range(first, last, FEW):
        n = min(FEW, last - b)
        for p in range(0, num_pieces * PIECE_COLUMNS, PIECE_COLUMNS):
            width, dim = item(INT64, pieces, p + WIDTH), item(INT64, pieces, p + DIM)
            place, g = item(INT64, pieces, p + START), grad + (b * grad_step + item(INT64, pieces, p + COLUMN)) * size
            matrix, of_matrix = item(INT64, pieces, p + MATRIX), item(INT64, pieces, p + SUMS)
            target, weights = out + (b * out_step + place) * size, transposed + of_matrix * size if matrix >= 0 else 0
            of_grad = (one, g, grad_step, dim, weights)
            _columns(kind, times(W, width // W), *of_grad, target, out_step, n, False)
            if matrix >= 0:
                of_x = (one, x + (b * x_step + place) * size, x_step, width)
                _add_products(kind, times(D, dim // D), *of_x, g, grad_step, sums + of_matrix * sum_size, n)
    return False


@kernel
def look_up_and_project(
    kind, W, source, kept, kept_step, D, out_kind, out, out_step, pieces, num_pieces, matrices, streamed, first, last
):
    """The same of ids, whose composed rows go no further than the nearest cache, or into ``kept`` if it is not 0.

    Returns whether an id was out of range.
    """
    source, one, size = Source(*source), zeros(out_kind, 1), size_of(out_kind)
    rows, composed, any_invalid = reserve(rows_bytes(source)), reserve(BLOCK * WIDEST * size), False
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for p in range(0, num_pieces * PIECE_COLUMNS, PIECE_COLUMNS):
            start, width, dim = (item(INT64, pieces, p), item(INT64, pieces, p + WIDTH), item(INT64, pieces, p + DIM))
            matrix = _matrix(pieces, p, matrices)
            target = out + (b * out_step + item(INT64, pieces, p + COLUMN)) * size
            x, x_step = (composed, width) if matrix else (target, out_step)
            if matrix and kept:
                x, x_step = kept + (b * kept_step + item(INT64, pieces, p + KEPT)) * size, kept_step
            s = start
            while s < start + width:
                place = x + (s - start) * size
                block = (s // W, b, n, rows, out_kind, place, x_step, streamed and matrix == 0)
                run, invalid = compose_run(kind, W, source, *block)
                any_invalid |= invalid
                s += run * W
            if matrix:
                _columns(out_kind, times(D, dim // D), one, x, x_step, width, matrix, target, out_step, n, streamed)
    if streamed:
        fence()
    return any_invalid


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """``ops.projection.projected``."""
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
    units, kind, num_sums = [columns(unit) for unit in pieces.units], KINDS[grad.dtype], sums.shape[1]
    fixed = (composed.data_ptr(), composed.stride(0), grad.data_ptr(), grad.stride(0))
    target = (*units, kind, of_composed.data_ptr(), of_composed.stride(0), *_in_memory(pieces, addresses))

    def run(first: int, last: int) -> None:
        transposed = scratch(num_sums * grad.itemsize)
        project_backward_entries(*fixed, transposed.data_ptr(), sums.data_ptr(), num_sums, *target, first, last)

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
    """``ops.projection.lookup_split``, or IndexError for an id out of range."""
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


def _in_memory(pieces: Pieces, addresses: "array[int]") -> tuple[int, int, int]:
    """``pieces``, ``num_pieces`` and ``matrices``, as kernels take them."""
    return pieces.integers.buffer_info()[0], len(pieces), addresses.buffer_info()[0]

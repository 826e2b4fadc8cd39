"""Composed rows times the matrices of their tables: a block of the batch at a time, written where it belongs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .compiled import kernel
from .launch import KINDS, ranges
from .memory import INT64, item, size_of
from .pages import in_huge_pages
from .source import BLOCK
from .threads import run_tasks, threads_for
from .vector import load, over_columns, splat, store, total, zeros

PIECE_COLUMNS = 5
START, WIDTH, COLUMN, DIM, MATRIX = range(PIECE_COLUMNS)  # of ``pieces``; MATRIX is an address, 0 for a copy


@over_columns
def _columns(zero, j, kind, dim, one, x, x_step, width, matrix, out, out_step, n):
    """As many columns as ``zero`` has lanes, from ``j`` on, of a piece of ``n`` batch entries; ``one`` has one lane."""
    for i in range(n):
        if matrix:
            vector = splat(zero, total(load(kind, one, x, i * x_step))) * load(kind, zero, matrix, j)
            for k in range(1, width):
                number = splat(zero, total(load(kind, one, x, i * x_step + k)))
                vector = vector + number * load(kind, zero, matrix, k * dim + j)
        else:
            vector = load(kind, zero, x, i * x_step + j)
        store(kind, out, i * out_step + j, vector)


@kernel
def project_entries(kind, x, x_step, out, out_step, pieces, num_pieces, first, last):
    """Write the vectors of batch entries ``first`` to ``last``."""
    one = zeros(kind, 1)
    for b in range(first, last, BLOCK):
        n = min(BLOCK, last - b)
        for p in range(0, num_pieces * PIECE_COLUMNS, PIECE_COLUMNS):
            width, dim, matrix = (
                item(INT64, pieces, p + WIDTH),
                item(INT64, pieces, p + DIM),
                item(INT64, pieces, p + MATRIX),
            )
            source = x + (b * x_step + item(INT64, pieces, p + START)) * size_of(kind)
            target = out + (b * out_step + item(INT64, pieces, p + COLUMN)) * size_of(kind)
            _columns(kind, dim, one, source, x_step, width, matrix, target, out_step, n)


def project(composed: Tensor, pieces: Sequence[Any], matrices: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """``ops.projection.projected``, into ``out`` where that is given."""
    kind = KINDS.get(composed.dtype)
    if kind is None or any(matrix.dtype != composed.dtype or not matrix.is_cpu for matrix in matrices):
        return NotImplemented
    if composed.stride(1) != 1:
        composed = composed.contiguous()
    matrices = [matrix.contiguous() for matrix in matrices]
    if out is None:
        out = in_huge_pages(composed.new_empty(len(composed), sum(piece.dim for piece in pieces)))
    addresses = [*(matrix.data_ptr() for matrix in matrices), 0]
    table = np.array([(*piece[:MATRIX], addresses[piece.matrix]) for piece in pieces], np.int64)
    fixed = (kind, composed.data_ptr(), composed.stride(0), out.data_ptr(), out.stride(0), table.ctypes.data)
    threads = threads_for(out.numel())

    def run(first: int, last: int) -> None:
        project_entries(*fixed, len(pieces), first, last)

    run_tasks(run, ranges(len(out), threads), threads)
    return out

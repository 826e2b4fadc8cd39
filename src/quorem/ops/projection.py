"""Vectors of narrow rows: composed rows of d numbers times the matrix ``[d, D]`` of their table.

A row of the input holds the composed rows of all features one after another, a row of the output their vectors. A
*piece* is one feature's part of both; without a matrix it is copied.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu
from .declare import is_eager


class Piece(NamedTuple):
    """The columns of one feature."""

    start: int  # in the input
    width: int
    column: int  # in the output
    dim: int
    matrix: int  # which of the matrices; -1 for a copy


def pieces_of(widths: Sequence[int], dims: Sequence[int], matrices: Sequence[int]) -> list[Piece]:
    """The pieces of features whose columns follow one another.

    >>> pieces_of([2, 4], [4, 4], [0, -1])[1]
    Piece(start=2, width=4, column=4, dim=4, matrix=-1)
    """
    starts, columns = (list(accumulate(sizes, initial=0)) for sizes in (widths, dims))
    return [Piece(*each) for each in zip(starts, widths, columns, dims, matrices, strict=False)]


def project(composed: Tensor, pieces: Sequence[Piece], matrices: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The vectors ``[B, sum of D]`` of composed rows ``[B, sum of d]``.

    Without gradients they are written to ``out``, where that is given.
    """
    if is_eager() and composed.is_cpu and "project" in cpu.kernels():
        if torch.is_grad_enabled() and (composed.requires_grad or any(m.requires_grad for m in matrices)):
            result: Tensor = _Project.apply(composed, pieces, *matrices)
            return result
        vectors = _fused(composed, pieces, matrices, out)
    else:
        vectors = projected(composed, pieces, matrices)
    if out is not None and vectors is not out:
        out.copy_(vectors)
    return vectors


def projected(composed: Tensor, pieces: Sequence[Piece], matrices: Sequence[Tensor]) -> Tensor:
    """``project`` in plain PyTorch: one batched product for all pieces of one shape."""
    parts = [composed.narrow(1, piece.start, piece.width) for piece in pieces]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.matrix >= 0:
            groups.setdefault((piece.width, piece.dim), []).append(i)
    for members in groups.values():
        stacked = torch.stack([matrices[pieces[i].matrix] for i in members])
        products = torch.bmm(torch.stack([parts[i] for i in members]), stacked)
        for i, product in zip(members, products.unbind(), strict=True):
            parts[i] = product
    return torch.cat(parts, 1)


def _fused(composed: Tensor, pieces: Sequence[Piece], matrices: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    vectors = cpu.kernels()["project"](composed, pieces, matrices, out)
    return projected(composed, pieces, matrices) if vectors is NotImplemented else vectors


def _reversed(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of the gradient, whose matrices are transposed."""
    return [Piece(p.column, p.dim, p.start, p.width, p.matrix) for p in pieces]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, composed: Tensor, pieces: Sequence[Piece], *matrices: Tensor) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(composed, *matrices)
        return _fused(composed, pieces, matrices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        composed, *matrices = ctx.saved_tensors
        of_composed, of_matrices = None, [None] * len(matrices)
        if ctx.needs_input_grad[0]:
            transposed = [matrix.T for matrix in matrices]
            again = torch.is_grad_enabled()  # create_graph
            of_composed = (projected if again else _fused)(grad, _reversed(ctx.pieces), transposed)
        for start, width, column, dim, matrix in ctx.pieces:
            if matrix >= 0 and ctx.needs_input_grad[2 + matrix]:
                product = composed.narrow(1, start, width).T @ grad.narrow(1, column, dim)
                before: Any = of_matrices[matrix]
                of_matrices[matrix] = product if before is None else before + product
        return of_composed, None, *of_matrices

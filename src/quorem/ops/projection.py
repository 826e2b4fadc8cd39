"""Vectors of narrow rows, composed rows of d numbers times the matrix ``[d, D]`` of their table: the truth.

``pieces`` says where the columns of features are.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .pieces import Piece, Pieces
from .rows import accumulator


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """The vectors ``[B, sum of D]`` of composed rows ``[B, sum of d]``: one batched product for all of one shape.

    Half precision is multiplied as float32, which every ONNX runtime can do.
    """
    if not composed.is_meta and torch.is_autocast_enabled(composed.device.type):
        with torch.autocast(composed.device.type, enabled=False):
            return project(composed, pieces, matrices)
    wide = accumulator(composed)
    parts = [composed.narrow(1, piece.start, piece.width) for piece in pieces]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.matrix >= 0:
            groups.setdefault((piece.width, piece.dim), []).append(i)
    for members in groups.values():
        stacked = torch.stack([matrices[pieces[i].matrix] for i in members]).to(wide)
        products = torch.bmm(torch.stack([parts[i] for i in members]).to(wide), stacked)
        for i, product in zip(members, products.to(composed.dtype).unbind(), strict=True):
            parts[i] = product
    return torch.cat(parts, 1)


def project_backward(
    grad: Tensor, composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of ``composed`` and of each matrix."""
    of_pieces = torch.cat([grad.narrow(1, piece.column, piece.dim) for piece in pieces], 1)
    columns = accumulate((piece.dim for piece in pieces), initial=0)
    back = Pieces(Piece(c, p.dim, p.start, p.width, p.matrix) for c, p in zip(columns, pieces, strict=False))
    of_composed = project(of_pieces, back, [matrix.T for matrix in matrices])
    of_matrices: list[Tensor | None] = [None] * len(matrices)
    for start, width, column, dim, matrix in pieces:
        if matrix >= 0:
            product = composed.narrow(1, start, width).T @ grad.narrow(1, column, dim)
            before = of_matrices[matrix]
            of_matrices[matrix] = product if before is None else before + product
    return of_composed, of_matrices

"""Where the columns of features are before and after narrow rows are multiplied by the matrices of their tables.

A row of the composed rows holds those of all features one after another, a row of the vectors their vectors. A *piece*
is one feature's part of both; without a matrix it is copied.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """The columns of one feature."""

    start: int  # of the composed rows
    width: int
    column: int  # of the vectors
    dim: int
    matrix: int  # which of the matrices; -1 for a copy


def pieces_of(widths: Sequence[int], dims: Sequence[int], matrices: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces of features whose columns follow one another.

    >>> pieces_of([2, 4], [4, 4], [0, -1])[1]
    Piece(start=2, width=4, column=4, dim=4, matrix=-1)
    """
    starts, columns = (list(accumulate(sizes, initial=0)) for sizes in (widths, dims))
    return tuple(Piece(*each) for each in zip(starts, widths, columns, dims, matrices, strict=False))


@lru_cache(maxsize=64)
def narrow_pieces(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces with a matrix, where the composed rows hold no others."""
    narrow = [piece for piece in pieces if piece.matrix >= 0]
    starts = accumulate((piece.width for piece in narrow), initial=0)
    return tuple(piece._replace(start=start) for piece, start in zip(narrow, starts, strict=False))


class SplitGradient(NamedTuple):
    """The gradient of composed rows, where that of pieces with a matrix is apart from that of the others."""

    narrow: Tensor  # as ``narrow_pieces``
    vectors: Tensor  # of all features; only columns of pieces without a matrix count
    pieces: tuple[Piece, ...]

    def parts(self) -> list[Tensor]:
        """The gradient of each piece."""
        narrow = iter(self.narrow.split([piece.width for piece in self.pieces if piece.matrix >= 0], 1))
        vectors = self.vectors.split([piece.dim for piece in self.pieces], 1)
        return [part if piece.matrix < 0 else next(narrow) for piece, part in zip(self.pieces, vectors, strict=True)]


Gradient = Tensor | SplitGradient


def whole(grad: Gradient, width: int) -> Tensor:
    """The gradient of composed rows as one tensor ``[B, S, W]``."""
    return torch.cat(grad.parts(), 1).unflatten(1, (-1, width)) if isinstance(grad, SplitGradient) else grad

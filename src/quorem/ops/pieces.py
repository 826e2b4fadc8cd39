"""Where the columns of features are before and after narrow rows are multiplied by the matrices of their tables.

Composed rows ``[B, sum of d]`` have the rows of all features side by side, vectors ``[B, sum of D]`` their vectors. A
*piece* is the columns of one feature in both; a piece without a matrix is copied.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd
from operator import itemgetter
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


PIECE_COLUMNS = 7  # of ``Pieces.integers``


class Pieces(tuple[Piece, ...]):
    """The columns of all features."""

    @cached_property
    def num_columns(self) -> int:
        """Of the vectors."""
        return sum(piece.dim for piece in self)

    @cached_property
    def num_composed(self) -> int:
        """Columns of the composed rows."""
        return sum(piece.width for piece in self)

    @cached_property
    def widest(self) -> int:
        """Numbers of the widest row with a matrix."""
        return max((piece.width for piece in self.narrow), default=0)

    @cached_property
    def units(self) -> tuple[int, int]:
        """Divisors of all columns of composed rows, and of all columns of vectors."""
        return gcd(*(piece.width for piece in self)), gcd(*(piece.dim for piece in self))

    @cached_property
    def narrow(self) -> "Pieces":
        """The pieces with a matrix, where the composed rows hold no others."""
        found = [piece for piece in self if piece.matrix >= 0]
        starts = accumulate((piece.width for piece in found), initial=0)
        return Pieces(piece._replace(start=start) for piece, start in zip(found, starts, strict=False))

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the matrices."""
        return [(width, dim) for _, (width, dim) in sorted({(p.matrix, (p.width, p.dim)) for p in self.narrow})]

    @cached_property
    def widths_by_dim(self) -> list[tuple[int, list[int]]]:
        """The widths of matrices that follow one another and have the same ``dim``."""
        return [(dim, [width for width, _ in group]) for dim, group in groupby(self.shapes, itemgetter(1))]

    @cached_property
    def integers(self) -> "array[int]":
        """The pieces as CPU kernels read them, PIECE_COLUMNS numbers each.

        They are the fields of ``Piece``; its ``start`` in ``narrow``; and where the gradient of its matrix begins in a
        buffer for those of all matrices.
        """
        kept = {piece.column: piece.start for piece in self.narrow}
        sums = [*accumulate((width * dim for width, dim in self.shapes), initial=0)]
        return array("q", [n for p in self for n in (*p, kept.get(p.column, 0), sums[max(p.matrix, 0)])])

    @cached_property
    def gradient_columns(self) -> "array[int]":
        """Where each composed column is in a ``SplitGradient``: 0 (``narrow``) or 1 (``vectors``), and the column."""
        places, kept = list[int](), iter(self.narrow)
        for piece in self:
            part, first = (1, piece.column) if piece.matrix < 0 else (0, next(kept).start)
            for column in range(first, first + piece.width):
                places += (part, column)
        return array("q", places)


NO_PIECES = Pieces()


def pieces_of(widths: Sequence[int], dims: Sequence[int], matrices: Sequence[int]) -> Pieces:
    """The pieces of features whose columns follow one another.

    >>> pieces_of([2, 4], [4, 4], [0, -1])[1]
    Piece(start=2, width=4, column=4, dim=4, matrix=-1)
    """
    starts, columns = (list(accumulate(sizes, initial=0)) for sizes in (widths, dims))
    return Pieces(Piece(*each) for each in zip(starts, widths, columns, dims, matrices, strict=False))


class SplitGradient(NamedTuple):
    """The gradient of composed rows in two tensors: pieces with a matrix are in ``narrow``, others in ``vectors``."""

    narrow: Tensor  # as ``pieces.narrow``
    vectors: Tensor  # of all features; only columns of pieces without a matrix count
    pieces: Pieces

    def parts(self) -> list[Tensor]:
        """The gradient of each piece."""
        narrow = iter(self.narrow.split([piece.width for piece in self.pieces.narrow], 1))
        vectors = self.vectors.split([piece.dim for piece in self.pieces], 1)
        return [part if piece.matrix < 0 else next(narrow) for piece, part in zip(self.pieces, vectors, strict=True)]


Gradient = Tensor | SplitGradient


def whole(grad: Gradient, width: int) -> Tensor:
    """The gradient of composed rows as one tensor ``[B, S, W]``."""
    return torch.cat(grad.parts(), 1).unflatten(1, (-1, width)) if isinstance(grad, SplitGradient) else grad

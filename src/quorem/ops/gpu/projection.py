"""Composed rows times the matrices of their tables: one launch for the vectors, one for all gradients.

A program handles T batch entries of one piece at a time. ``ops.projection`` is the plain reference. All columns are
multiples of U, the largest power of two that allows it, and matrices are aligned: so the compiler reads and writes
several numbers at once. ``lookup_split`` also composes the rows, of single ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import Layout
from ..pieces import Pieces
from ..rows import IdBatch
from ..state import present
from .host import fused_layout
from .launch import cdiv, launch, planned, power_of_2
from .lookup import MANY_VECTORS, combined
from .rows import LIMIT, PADDING, DeviceBatch, place_at

START, WIDTH, COLUMN, DIM, MATRIX, PLACE = map(tl.constexpr, range(6))  # columns of a table of pieces
PIECE_COLUMNS = tl.constexpr(6)
ALIGNMENT = tl.constexpr(16)  # bytes, of matrices
LARGEST = tl.constexpr((2 - 2.0**-10) * 2.0**127)  # number of 11 bits
NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WIDEST = 128  # the most numbers of a vector
SECTOR = 32  # bytes that a GPU writes at a time: pieces of fewer take longer than another launch
PROGRAMS = 2048  # about so many share the sums of the gradients of the matrices
MOST_TABLES = 256

_tables: dict[Any, Tensor] = {}


@dataclass(frozen=True)
class Tiles:
    """Constants of the kernels."""

    unit: int  # U
    width: int  # R: of composed rows; fewer than 16 are not multiplied on the tensor cores
    dim: int  # C: of vectors
    kind: Any  # of the matrices

    @property
    def block(self) -> dict[str, int]:
        """T and the warps of a program of ``project``: what was fastest on an H200."""
        return {"T": 64, "num_warps": 1 if self.dim <= 32 else 4}

    def lookup_block(self, size: int) -> dict[str, int]:
        """T, N and the warps of a program of ``lookup_split`` for so many vectors: what was fastest on an H200."""
        if self.width < 16:
            return {"T": 64 if self.width <= 4 and self.dim <= 32 else 32, "N": 1, "num_warps": 1}
        times = 4 if self.width > 16 and size >= MANY_VECTORS else 1
        return {"T": 64, "N": times, "num_warps": 2 if self.dim <= 64 else 4}


@triton.jit
def piece_at(pieces, p, U: tl.constexpr, KIND: tl.constexpr):
    """First column and width of a piece of composed rows and of its vectors; and its matrix, or whether it has none."""
    piece = pieces + p * PIECE_COLUMNS
    start, column, address = tl.load(piece + START) * U, tl.load(piece + COLUMN) * U, tl.load(piece + MATRIX)
    width, dim = tl.load(piece + WIDTH).to(tl.int32) * U, tl.load(piece + DIM).to(tl.int32) * U
    matrix = tl.multiple_of(tl.multiple_of(address, ALIGNMENT).to(tl.pointer_type(KIND)), ALIGNMENT)
    return start, width, column, dim, matrix, address == 0


@triton.jit
def tile_at(x, block, first, step, width, B, T: tl.constexpr, C: tl.constexpr):
    """Addresses ``[T, C]`` of a block of batch entries, from column ``first`` on, and which of them exist."""
    n, columns = tl.arange(0, T), tl.arange(0, C)
    begin = tl.full((), T, tl.int64) * block
    address = x + begin * step + first + (n * step)[:, None] + columns[None, :]
    return address, (n < B - begin)[:, None] & (columns < width)[None, :]


@triton.jit
def matrix_at(matrix, width, dim, R: tl.constexpr, C: tl.constexpr):
    """Addresses of a matrix ``[R, C]``, and which of them exist."""
    rows, columns = tl.arange(0, R), tl.arange(0, C)
    return matrix + (rows * dim)[:, None] + columns[None, :], (rows < width)[:, None] & (columns < dim)[None, :]


@triton.jit
def halves(x):
    """``x`` rounded to the 11 bits that tensor cores multiply, at most LARGEST, and what is left."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    high = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
    return high, x - high


@triton.jit
def product(a, b):
    """Matrix product on the tensor cores, nearly in float32's precision."""
    a_high, a_low = halves(a)
    b_high, b_low = halves(b)
    x = tl.dot(a_low, b_high, input_precision="tf32")
    x = tl.dot(a_high, b_low, x, input_precision="tf32")
    return tl.dot(a_high, b_high, x, input_precision="tf32")


@triton.jit
def numbers_in(tile, mask):
    """The numbers of a tile in float32, zeros where there are none."""
    return tl.load(tile, mask=mask, other=0).to(tl.float32)


@triton.jit
def project_kernel(
    x, out, pieces, B, x_step, out_step, F,
    TILES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The vectors of T batch entries of one piece."""
    U: tl.constexpr = TILES.unit
    R: tl.constexpr = TILES.width
    C: tl.constexpr = TILES.dim
    start, width, column, dim, matrix, copied = piece_at(pieces, tl.program_id(0) % F, U, TILES.kind)
    block = tl.program_id(0) // F
    target, inside = tile_at(out, block, column, out_step * U, dim, B, T, C)
    if copied:
        same, _ = tile_at(x, block, start, x_step * U, dim, B, T, C)
        tl.store(target, tl.load(same, mask=inside), mask=inside)
    else:
        source, mask = tile_at(x, block, start, x_step * U, width, B, T, R)
        weights, weighted = matrix_at(matrix, width, dim, R, C)
        vectors = product(numbers_in(source, mask), numbers_in(weights, weighted))
        tl.store(target, vectors.to(out.dtype.element_ty), mask=inside)


@triton.jit
def lookup_split_kernel(
    ids, stored, kept, out, invalid, pieces, table, maps, B, id_stride, kept_step, out_step, F, TILES: tl.constexpr,
    S: tl.constexpr, W: tl.constexpr, K: tl.constexpr, FLAGS: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The vectors of N times T ids of one feature, and the composed rows if they are ``kept``."""
    U: tl.constexpr = TILES.unit
    R: tl.constexpr = TILES.width
    C: tl.constexpr = TILES.dim
    p, first = tl.program_id(0) % F, tl.program_id(0) // F * N
    start, width, column, dim, matrix, copied = piece_at(pieces, p, U, TILES.kind)
    slot = table + start // W
    limit = tl.load(slot + S * LIMIT)
    every, some = tl.arange(0, C), tl.arange(0, R)
    if R >= 16:
        weights, weighted = matrix_at(matrix, tl.where(copied, 0, width), dim, R, C)
        of_matrix = numbers_in(weights, weighted)
    for block in range(first, first + N):
        n = tl.full((), T, tl.int64) * block + tl.arange(0, T)
        i = tl.load(ids + n * id_stride + p, mask=n < B, other=-1)
        valid = (i >= 0) & (i < limit)
        if invalid is not None:
            wrong = tl.sum(((n < B) & (valid == 0)).to(tl.int32))
            if wrong > 0:
                tl.atomic_add(invalid, wrong.to(tl.int64), sem="relaxed")
        if FLAGS.padded:
            valid = valid & (i != tl.load(slot + S * PADDING))
        i, own_row = place_at(i, valid, slot, maps, S, FLAGS)
        target, mask = tile_at(out, block, column, out_step * U, dim, B, T, C)
        if copied:  # each branch stores, since products have another layout in registers
            x = combined(i, own_row, valid, stored, None, slot, maps, every, 0, S, W, K, C, tl.float32, 0, FLAGS, dim)
            tl.store(target, x.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")
        else:
            y = combined(i, own_row, valid, stored, None, slot, maps, some, 0, S, W, K, R, tl.float32, 0, FLAGS, width)
            if kept is not None:
                place, inside = tile_at(kept, block, start, kept_step * U, width, B, T, R)
                tl.store(place, y.to(kept.dtype.element_ty), mask=inside)
            x = product(y, of_matrix) if R >= 16 else product_of_few(y, matrix, width, dim, T, R, C)
            tl.store(target, x.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def product_of_few(y, matrix, width, dim, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The product with a matrix ``[R, C]`` in memory of fewer rows than tensor cores multiply."""
    columns = tl.arange(0, C)
    total = tl.zeros((T, C), tl.float32)
    for r in tl.static_range(R):
        row = numbers_in(matrix + r * dim + columns, columns < tl.where(r < width, dim, 0))
        total += tl.sum(tl.where(tl.arange(0, R)[None, :] == r, y, 0), 1)[:, None] * row[None, :]
    return total


@triton.jit
def project_backward_kernel(
    grad, x, dx, sums, pieces, B, grad_step, x_step, F, length, shares,
    TILES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of the composed rows of one piece, and a share of that of its matrix: every ``shares``-th block."""
    U: tl.constexpr = TILES.unit
    R: tl.constexpr = TILES.width
    C: tl.constexpr = TILES.dim
    p, share = tl.program_id(0) % F, tl.program_id(0) // F
    start, width, column, dim, matrix, copied = piece_at(pieces, p, U, TILES.kind)
    if copied:
        for block in range(share, tl.cdiv(B, T), shares):
            source, inside = tile_at(grad, block, column, grad_step * U, dim, B, T, C)
            same, _ = tile_at(dx, block, start, x_step * U, dim, B, T, C)
            tl.store(same, tl.load(source, mask=inside), mask=inside)
    else:
        weights, weighted = matrix_at(matrix, width, dim, R, C)
        transposed = tl.trans(numbers_in(weights, weighted))
        total = tl.zeros((R, C), tl.float32)
        for block in tl.range(share, tl.cdiv(B, T), shares, num_stages=1):
            source, inside = tile_at(grad, block, column, grad_step * U, dim, B, T, C)
            g = numbers_in(source, inside)
            read, mask = tile_at(x, block, start, x_step * U, width, B, T, R)
            total += product(tl.trans(numbers_in(read, mask)), g)
            target, _ = tile_at(dx, block, start, x_step * U, width, B, T, R)
            tl.store(target, product(g, transposed).to(dx.dtype.element_ty), mask=mask)
        place = sums + share.to(tl.int64) * length + tl.load(pieces + p * PIECE_COLUMNS + PLACE)
        share_of, _ = matrix_at(place, width, dim, R, C)
        tl.store(share_of, total, mask=weighted)


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Any:
    """``ops.projection.project`` in one launch."""
    composed = composed.contiguous()
    out = composed.new_empty(len(composed), pieces.num_columns)
    tiles = _tiles(pieces, matrices, composed, out)
    if tiles is None:
        return NotImplemented
    matrices, table = _table(composed, pieces, matrices, tiles.unit)
    if len(composed):
        launch(
            project_kernel, (cdiv(len(composed), tiles.block["T"]) * len(pieces),),
            composed, out, table, len(composed), composed.stride(0) // tiles.unit, out.stride(0) // tiles.unit,
            len(pieces), TILES=tiles, **tiles.block,
        )  # fmt: skip
    return out


def lookup_split(
    batch: IdBatch,
    stored: Tensor,
    layout: Layout,
    pieces: Pieces,
    matrices: Sequence[Tensor],
    *,
    names: str,
    keep: bool = False,
    invalid: Tensor | None = None,
    **codes: Any,
) -> Any:
    """The composed rows (None without ``keep``) and the vectors of single ids, in one launch.

    The columns of composed rows without a matrix are not written: their gradients do not need them.
    """
    host = None if codes else fused_layout(stored, layout)
    partial_sectors = keep and pieces.widest * stored.itemsize < SECTOR
    in_place = all(_is_aligned(matrix) for matrix in matrices)
    if host is None or partial_sectors or not (in_place and host.flags.joined and len(pieces) == len(host.spans)):
        return NotImplemented
    ids = DeviceBatch.of(batch, len(host.spans))
    out = stored.new_empty(ids.size, pieces.num_columns)
    tiles = _tiles(pieces, matrices, out)
    if tiles is None:
        return NotImplemented
    tiles = replace(tiles, width=power_of_2(pieces.widest))
    kept = stored.new_empty(ids.size, pieces.num_composed) if keep else None
    block = tiles.lookup_block(out.numel() // tiles.dim)

    def launches() -> None:
        _, table = _table(stored, pieces, matrices, tiles.unit)
        launch(
            lookup_split_kernel, (cdiv(ids.size, block["T"] * block["N"]) * len(pieces),),
            ids.ids, stored, kept, out, invalid, table, *host.on_device[:2], ids.size, ids.stride,
            pieces.num_composed // tiles.unit, pieces.num_columns // tiles.unit, len(pieces),
            TILES=tiles, S=host.num_slots, W=stored.shape[1], K=host.num_parts, FLAGS=host.flags, **block,
        )  # fmt: skip

    if ids.size:
        key = ("lookup_split", ids.size, ids.stride, keep, invalid is None, stored.dtype, tiles)
        planned(host.plans, key, present((stored, invalid, *matrices)), present((ids.ids, out, kept)), launches)
    return kept, out


def project_backward(grad: Tensor, composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Any:
    """The gradients of ``composed`` and of each matrix, in one launch and a sum."""
    grad, composed, of_composed = grad.contiguous(), composed.contiguous(), torch.empty_like(composed)
    tiles = _tiles(pieces, matrices, composed, grad)
    if tiles is None:
        return NotImplemented
    matrices, table = _table(composed, pieces, matrices, tiles.unit)
    lengths = _lengths(pieces)
    shares = max(1, min(cdiv(len(composed), tiles.block["T"]), PROGRAMS // len(pieces)))
    sums = torch.zeros(shares, sum(lengths), dtype=torch.float32, device=grad.device)
    if len(composed):
        launch(
            project_backward_kernel, (shares * len(pieces),),
            grad, composed, of_composed, sums, table, len(composed), grad.stride(0) // tiles.unit,
            composed.stride(0) // tiles.unit, len(pieces), sum(lengths), shares,
            TILES=tiles, **tiles.block,
        )  # fmt: skip
    of_matrices: list[Tensor | None] = [None] * len(matrices)
    for piece, part in zip(pieces, sums.sum(0).split(lengths), strict=True):
        if piece.matrix >= 0:
            part, before = part.view(piece.width, piece.dim), of_matrices[piece.matrix]
            of_matrices[piece.matrix] = part if before is None else before + part
    return of_composed, of_matrices


def _tiles(pieces: Pieces, matrices: Sequence[Tensor], *rows: Tensor) -> Tiles | None:
    """The constants of the kernels; None if these do not support the numbers."""
    kinds, widest = {matrix.dtype for matrix in matrices}, max((piece.dim for piece in pieces), default=0)
    if len(kinds) != 1 or not {*kinds, *(tensor.dtype for tensor in rows)} <= NUMBERS.keys() or widest > WIDEST:
        return None
    unit = gcd(4, *(number for piece in pieces for number in piece[:4]), *(tensor.stride(0) for tensor in rows))
    return Tiles(unit, max(16, power_of_2(pieces.widest)), max(16, power_of_2(widest)), NUMBERS[kinds.pop()])


def _table(like: Tensor, pieces: Pieces, matrices: Sequence[Tensor], unit: int) -> tuple[list[Tensor], Tensor]:
    """Aligned matrices, and the pieces as kernels read them, cached, since the addresses have to reach the GPU."""
    aligned = [m if _is_aligned(m) else m.clone(memory_format=torch.contiguous_format) for m in matrices]
    addresses = [*(matrix.data_ptr() for matrix in aligned), 0]
    key = (like.device, unit, tuple(pieces), *addresses)
    if key not in _tables:
        if len(_tables) >= MOST_TABLES:
            _tables.clear()
        places = accumulate(_lengths(pieces), initial=0)
        rows = [
            [*(number // unit for number in columns), addresses[matrix], place]
            for (*columns, matrix), place in zip(pieces, places, strict=False)
        ]
        _tables[key] = torch.tensor(rows, dtype=torch.int64, device=like.device)
    return aligned, _tables[key]


def _is_aligned(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.data_ptr() % ALIGNMENT.value == 0


def _lengths(pieces: Pieces) -> list[int]:
    """The numbers of the matrix of each piece."""
    return [piece.width * piece.dim * (piece.matrix >= 0) for piece in pieces]

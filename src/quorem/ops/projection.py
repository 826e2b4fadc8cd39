"""Vectors of narrow rows: composed rows of d numbers times the matrix ``[d, D]`` of their table (see ``pieces``)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import cpu, gpu
from .declare import device_of, is_eager, is_traced
from .layout import Layout
from .pieces import Piece, Pieces, SplitGradient
from .rows import IdBatch, accumulator


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """The vectors ``[B, sum of D]`` of composed rows ``[B, sum of d]``."""
    if not is_eager() or is_traced():
        return projected(composed, pieces, matrices)
    if torch.is_grad_enabled() and (composed.requires_grad or any(m.requires_grad for m in matrices)):
        differentiable: Tensor = _Project.apply(composed, pieces, *matrices)
        return differentiable
    vectors: Tensor = _fused("project", composed, composed, pieces, matrices)
    return projected(composed, pieces, matrices) if vectors is NotImplemented else vectors


def lookup_split(batch: IdBatch, stored: Tensor, layout: Layout, *args: Any, **options: Any) -> Any:
    """The composed rows of ``Pieces.narrow`` and the vectors ``[B, sum of D]`` of single ids, without gradients.

    NotImplemented where no kernel does it in one.
    """
    is_plain = device_of((batch, stored, layout)) is cpu
    return _fused("lookup_split", stored, batch, stored, layout, *args, **options) if is_plain else NotImplemented


def split_gradient(
    grad: Tensor, narrow: Tensor, pieces: Pieces, matrices: Sequence[Tensor]
) -> tuple[SplitGradient, list[Tensor | None]]:
    """The gradients of the composed rows and of each matrix, without autograd, after ``lookup_split``."""
    grad = grad.contiguous()
    of_narrow, of_matrices = _gradients(grad, narrow, pieces.narrow, matrices)
    return SplitGradient(of_narrow, grad, pieces), of_matrices


def projected(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """``project`` in plain PyTorch: one batched product for all pieces of one shape.

    Half precision is multiplied as float32, which every ONNX runtime can do.
    """
    if not composed.is_meta and torch.is_autocast_enabled(composed.device.type):
        with torch.autocast(composed.device.type, enabled=False):
            return projected(composed, pieces, matrices)
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
    """The gradients of ``composed`` and of each matrix, in plain PyTorch."""
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


def _fused(name: str, rows: Tensor, *args: Any, **options: Any) -> Any:
    """What the kernel of the rows' device computes; NotImplemented where there is none."""
    kernels = cpu.kernels() if rows.is_cpu else gpu.kernels() if rows.is_cuda else {}
    return kernels[name](*args, **options) if name in kernels else NotImplemented


def _gradients(
    grad: Tensor, composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """``project_backward`` by the kernel of the device, if there is one."""
    args = (grad, composed, pieces, matrices)
    gradients = NotImplemented if torch.is_grad_enabled() else _fused("project_backward", grad, *args)
    of_composed, sums = project_backward(*args) if gradients is NotImplemented else gradients
    both = zip(sums, matrices, strict=True)
    return of_composed, [g if g is None or g.dtype == m.dtype else g.to(m.dtype) for g, m in both]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, composed: Tensor, pieces: Pieces, *matrices: Tensor) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(composed, *matrices)
        return project(composed, pieces, matrices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        composed, *matrices = ctx.saved_tensors
        of_composed, of_matrices = _gradients(grad.contiguous(), composed, ctx.pieces, matrices)
        return of_composed, None, *of_matrices

"""Products of narrow rows and matrices, with gradients. The device's kernels compute them, unless torch traces."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import projection
from .declare import call, is_eager
from .pieces import Gradient, Pieces, SplitGradient


def project(composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]) -> Tensor:
    """``projection.project``, with gradients."""
    if not is_eager():
        return projection.project(composed, pieces, matrices)
    vectors: Tensor
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (composed, *matrices)):
        vectors = _Project.apply(composed, pieces, *matrices)
    else:
        vectors = call("project", composed, pieces, matrices)
    return vectors


def split_gradient(
    grad: Tensor, narrow: Tensor, pieces: Pieces, matrices: Sequence[Tensor], width: int
) -> tuple[Gradient, list[Tensor | None]]:
    """The gradients of the composed rows and of each matrix, without autograd, after ``lookup_split``.

    That of a GPU keeps all columns of the composed rows, and ``width`` of them are a row of ``stored``.
    """
    grad = grad.contiguous()
    if grad.is_cuda:
        of_composed, of_matrices = _gradients(grad, narrow, pieces, matrices)
        return of_composed.unflatten(1, (-1, width)), of_matrices
    of_narrow, of_matrices = _gradients(grad, narrow, pieces.narrow, matrices)
    return SplitGradient(of_narrow, grad, pieces), of_matrices


def _gradients(
    grad: Tensor, composed: Tensor, pieces: Pieces, matrices: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """``project_backward`` by the kernel of the device, if there is one."""
    args = (grad, composed, pieces, matrices)
    create_graph = torch.is_grad_enabled()
    of_composed, sums = projection.project_backward(*args) if create_graph else call("project_backward", *args)
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

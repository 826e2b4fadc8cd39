"""Gradients of the rows that a lookup read: the truth, in plain PyTorch."""

import torch
from torch import Tensor

from .layout import UNUSED, Layout
from .lookup import compose, pooling_factor, read_rows
from .pieces import Gradient, whole
from .rows import IdBags, IdBatch, accumulator, batch_reads, rows_read


def backward(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[R, W]`` of ``lookup``."""
    return dense_gradient(*_row_grads(grad, batch, stored, layout), stored)


def row_grads(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The rows ``[U]`` that ``lookup`` read, each once, and their gradients ``[U, W]`` in the accumulator's dtype."""
    rows, values = _row_grads(grad, batch, stored, layout)
    return sum_by_row(rows.flatten(), values.flatten(0, -2))


def sample_weights_backward(grad: Tensor, batch: IdBatch, stored: Tensor, layout: Layout) -> Tensor:
    """The gradient ``[V]`` of the sample weights of a batch of bags."""
    reads, bags = batch_reads(batch, layout)
    assert bags is not None
    vectors = compose(reads, stored)
    vectors = vectors * pooling_factor(reads.valid, bags.bag, batch._replace(sample_weights=None), vectors.dtype)
    return (vectors * _at_ids(grad, bags)).sum((1, 2))


def sum_by_row(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each of ``rows`` ``[N]`` once, with the sum of its gradients ``[N, W]``; rows below 0 are left out."""
    used = rows >= 0
    rows, inverse = rows[used].unique(return_inverse=True)
    return rows, values.new_zeros(len(rows), values.shape[1]).index_add(0, inverse, values[used])


def dense_gradient(rows: Tensor, values: Tensor, stored: Tensor) -> Tensor:
    """Add row gradients into a dense gradient ``[R, W]``."""
    total = values.new_zeros(stored.shape)
    return total.index_add(0, rows.clamp(min=0).flatten(), values.flatten(0, -2)).to(stored.dtype)


def _row_grads(grad: Gradient, batch: IdBatch, stored: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Row numbers ``[N, S, K]`` and gradients ``[N, S, K, W]``; UNUSED and zeros where nothing was read."""
    reads, bags = batch_reads(batch, layout)
    grad = whole(grad, stored.shape[1]).to(accumulator(stored))
    if bags is not None:
        grad = _at_ids(grad, bags) * pooling_factor(reads.valid, bags.bag, batch, grad.dtype)
    rows, values = rows_read(reads), grad[..., None, :]
    vectors = read_rows(reads, stored, grad.shape[-1])
    values = values * torch.where(reads.product[..., None, None], _product_of_others(vectors), 1)
    return rows, torch.where((rows != UNUSED)[..., None], values, 0)


def _at_ids(grad: Tensor, bags: IdBags) -> Tensor:
    """The gradient ``[B, S, W]`` of bags at each id's slots, ``[V, P, W]``."""
    grad = grad if len(grad) else grad.new_zeros(1, *grad.shape[1:])  # ids without any bag
    return grad[(bags.bag % len(grad))[:, None], bags.slot]


def _product_of_others(vectors: Tensor) -> Tensor:
    """For each of K vectors, the product of the K - 1 others; no division, so zeros are no special case."""
    ones = torch.ones_like(vectors[..., :1, :])
    before = torch.cat([ones, vectors[..., :-1, :]], -2).cumprod(-2)
    after = torch.cat([ones, vectors.flip(-2)[..., :-1, :]], -2).cumprod(-2).flip(-2)
    return before * after

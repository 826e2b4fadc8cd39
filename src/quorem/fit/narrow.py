"""The matrix of narrow rows: least squares of a trained table by rows of width d times one matrix ``[d, D]``."""

from math import sqrt

import torch
from torch import Tensor

BLOCK_ROWS = 2**16  # rows of the trained table that are processed at a time


def fit_matrix_(matrix: Tensor, dense: Tensor, weights: Tensor | None, padding: int | None) -> Tensor:
    """Fill ``matrix`` ``[d, D]`` with the first right singular vectors of the weighted table, scaled as at the start.

    Args:
        matrix: filled in place.
        dense: the trained table ``[n, D]``.
        weights: the weight of each row's error, float64 ``[n]``; None weighs all equally.
        padding: a row of ``dense`` that is ignored.

    Returns:
        The rows ``[n, d]`` whose products with the matrix are nearest to ``dense``.

    Raises:
        ValueError: if an entry of ``dense`` is not finite.

    >>> matrix = torch.empty(1, 2, dtype=torch.float64)
    >>> dense = torch.tensor([[1.0, 2.0], [2.0, 4.0], [-3.0, -6.0]])
    >>> torch.allclose(fit_matrix_(matrix, dense, None, None) @ matrix.float(), dense)
    True
    """
    d, width = matrix.shape
    products = torch.zeros(width, width, dtype=torch.float64, device=dense.device)
    for ids in torch.arange(len(dense), device=dense.device).split(BLOCK_ROWS):
        ids = ids if padding is None else ids[ids != padding]
        rows = dense[ids].double()
        products += rows.T @ (rows if weights is None else rows * weights[ids, None])
    if not products.isfinite().all():
        raise ValueError("dense, the table to fit, must be finite")
    vectors = torch.linalg.eigh(products).eigenvectors.flip(1)[:, :d]  # eigenvalues rise
    matrix.copy_(vectors.T * sqrt(width / d))
    inverse = torch.linalg.pinv(matrix.double())  # of the matrix as it was rounded
    return torch.cat([(block.double() @ inverse).to(dense.dtype) for block in dense.split(BLOCK_ROWS)])

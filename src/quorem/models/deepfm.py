"""DeepFM (Guo et al. 2017): a factorization machine beside an MLP, over the same vectors."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from .network import Network, mlp, start_


class DeepFM(Network):
    """A factorization machine and an MLP over the same vectors; their sum is the logit.

    The machine sums the dot products of all pairs of vectors, those of the dense features among them: dense feature j
    has a vector of its own, times its value. With V vectors v, ``sum of pairs = (|sum of v|^2 - sum of |v|^2) / 2``.

    The linear part, which the original gives one more weight for each category, is a linear map of the vectors here,
    so that the tables stay the only thing that grows with the categories.

    Args:
        embeddings: any module that turns ids into vectors ``[B, F', D]``.
        num_dense: number of dense features.
        deep: widths of the MLP's layers.
        embedding_dims: widths of the vectors, all equal; None takes ``embeddings.embedding_dims``.
        device: device of the layers; the embeddings stay where they are.
        dtype: dtype of the layers.

    Raises:
        ValueError: if a size is too small, or the widths are not known or not equal.

    >>> from quorem import QR, EmbeddingCollection, Table
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 16)]
    >>> DeepFM(EmbeddingCollection(tables))(torch.zeros(2, 13), torch.tensor([[999, 0], [5, 6]])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int = 13,
        deep: Sequence[int] = (512, 256, 64),
        embedding_dims: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embeddings, num_dense, embedding_dims)
        if not deep:
            raise ValueError(f"deep ({deep}) must have at least one layer")
        self.embedding_dim = self._equal_width()
        width = num_dense + sum(self.embedding_dims)
        self.dense_vectors = nn.Parameter(torch.empty(num_dense, self.embedding_dim, device=device, dtype=dtype))
        self.deep = mlp((width, *deep), device=device, dtype=dtype)
        self.output = nn.Linear(width + deep[-1], 1, device=device, dtype=dtype)  # of the linear part, then the deep
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all layers (see ``start_``; the dense features' vectors likewise), but not the embeddings."""
        if not self.dense_vectors.is_meta:
            nn.init.normal_(self.dense_vectors, std=sqrt(1 / self.embedding_dim))
        start_(self.deep)
        start_(self.output)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features and vectors that were looked up before."""
        vectors = self._checked(dense, vectors)
        vectors = vectors.reshape(vectors.shape[0], len(self.embedding_dims), self.embedding_dim)
        features = torch.cat([dense, vectors.flatten(1)], 1)
        total = vectors.sum(1) + dense @ self.dense_vectors
        dense_squares = dense.square() @ self.dense_vectors.square().sum(1, keepdim=True)
        squares = vectors.square().sum((1, 2)) + dense_squares[:, 0]
        pairs = (total.square().sum(1) - squares) / 2
        return self.output(torch.cat([features, self.deep(features)], 1)).squeeze(1) + pairs

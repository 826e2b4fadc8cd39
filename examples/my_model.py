"""A network of your own: quorem train --data DATA --out runs/deepfm --network examples/my_model.py:build

``build`` is handed the embeddings, compressed or not, and returns a module that maps dense features ``[B, num_dense]``
and ids to logits ``[B]``.
"""

import torch
from torch import Tensor, nn


class DeepFM(nn.Module):
    """A linear layer, a factorization machine and an MLP over the same vectors, which have one width."""

    def __init__(self, embeddings: nn.Module, num_dense: int, device: torch.device | str | None) -> None:
        super().__init__()
        width = num_dense + sum(embeddings.embedding_dims)
        self.embeddings, self.shape = embeddings, (len(embeddings.embedding_dims), embeddings.embedding_dims[0])
        self.linear = nn.Linear(width, 1, device=device)
        self.deep = nn.Sequential(nn.Linear(width, 64, device=device), nn.ReLU(), nn.Linear(64, 1, device=device))

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        vectors = self.embeddings(*ids).flatten(1)
        features, by_table = torch.cat([dense, vectors], 1), vectors.unflatten(1, self.shape)
        pairs = by_table.sum(1).square() - by_table.square().sum(1)  # twice the products of all pairs of vectors
        return (self.linear(features) + self.deep(features)).squeeze(1) + pairs.sum(1) / 2


def build(embeddings: nn.Module, *, num_dense: int, device: torch.device | str | None = None) -> nn.Module:
    return DeepFM(embeddings, num_dense, device)

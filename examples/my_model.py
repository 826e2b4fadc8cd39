"""A network of your own: quorem train --data DATA --out runs/wide --network examples/my_model.py:build

``build`` is handed the embeddings, compressed or not, and returns a module that maps dense features ``[B, num_dense]``
and ids to logits ``[B]``.
"""

import torch
from torch import Tensor, nn


class WideAndDeep(nn.Module):
    """A linear layer beside an MLP, over the dense features and all vectors end to end."""

    def __init__(self, embeddings: nn.Module, num_dense: int, device: torch.device | str | None) -> None:
        super().__init__()
        width = num_dense + sum(embeddings.embedding_dims)
        self.embeddings = embeddings
        self.wide = nn.Linear(width, 1, device=device)
        self.deep = nn.Sequential(nn.Linear(width, 64, device=device), nn.ReLU(), nn.Linear(64, 1, device=device))

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        features = torch.cat([dense, self.embeddings(*ids).flatten(1)], 1)
        return (self.wide(features) + self.deep(features)).squeeze(1)


def build(embeddings: nn.Module, *, num_dense: int, device: torch.device | str | None = None) -> nn.Module:
    return WideAndDeep(embeddings, num_dense, device)

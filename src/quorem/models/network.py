"""What the networks share: embeddings, the way from dense features and ids to logits, linear layers with ReLUs."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Embeddings, and layers that turn their vectors and dense features into logits.

    ``embeddings`` is any module that turns ids into vectors ``[B, F', D]`` or ``[B, sum D]``. Their widths are
    ``embedding_dims``; None takes ``embeddings.embedding_dims``.
    """

    output: nn.Linear

    def __init__(self, embeddings: nn.Module, num_dense: int, embedding_dims: Sequence[int] | None) -> None:
        super().__init__()
        if num_dense < 0:
            raise ValueError(f"num_dense ({num_dense}) must be at least 0")
        dims = getattr(embeddings, "embedding_dims", None) if embedding_dims is None else embedding_dims
        if dims is None:
            kind = type(embeddings).__name__
            raise ValueError(f"embedding_dims must be given: embeddings ({kind}) does not say its own")
        if not dims or min(dims) < 1:
            raise ValueError(f"embedding_dims ({tuple(dims)}) must be one or more widths of at least 1")
        self.num_dense, self.embedding_dims, self.embeddings = num_dense, tuple(dims), embeddings

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features ``[B, num_dense]`` and ``ids``, the inputs of the embeddings."""
        return self.logits(dense, self.embeddings(*ids))

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features and vectors that were looked up before."""
        raise NotImplementedError

    def _checked(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """``vectors`` in the dtype of the layers, since tables may have a narrower one; their shapes are checked."""
        if dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(f"dense has shape {tuple(dense.shape)} but must be [B, {self.num_dense}]")
        total = sum(self.embedding_dims)
        if vectors.dim() < 2 or vectors.shape[0] != dense.shape[0] or vectors.shape[1:].numel() != total:
            raise ValueError(
                f"embeddings gave shape {tuple(vectors.shape)} but must give {total} columns"
                f" ({len(self.embedding_dims)} vectors) for each of the {dense.shape[0]} rows of dense"
            )
        return vectors.to(self.output.weight.dtype)


def mlp(
    sizes: Sequence[int], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Linear layers ``sizes[0] -> sizes[1] -> ...``, each followed by a ReLU.

    >>> mlp((13, 512, 16))(torch.zeros(2, 13)).shape
    torch.Size([2, 16])
    """
    for size in sizes:
        if size < 1:
            raise ValueError(f"sizes ({tuple(sizes)}) must all be at least 1")
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(sizes):
        layers += [nn.Linear(d_in, d_out, device=device, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers)


def start_(layers: nn.Module) -> None:
    """Initialize every linear layer as the public DLRM code does: weight N(0, 2 / (in + out)), bias N(0, 1 / out).

    With Glorot's variance, activations and gradients have about the same size in all layers. The random bias is kept
    because the losses published for these networks were reached with it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:  # on meta, normal_ would import the compiler
            nn.init.normal_(layer.weight, std=sqrt(2 / (layer.in_features + layer.out_features)))
            nn.init.normal_(layer.bias, std=sqrt(1 / layer.out_features))

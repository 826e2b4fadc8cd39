"""Layers and inputs that the networks share."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn


def mlp(
    sizes: Sequence[int], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Linear layers ``sizes[0] -> sizes[1] -> ...``, each followed by a ReLU.

    Raises:
        ValueError: if a size is below 1.

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
    """Start every linear layer as the public DLRM code does: weight N(0, 2 / (in + out)), bias N(0, 1 / out).

    Glorot's variance keeps activations and gradients of one size through the layers; the bias, small and random,
    is kept because the losses published for these networks were reached from it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:  # where torch would load its compiler for it
            nn.init.normal_(layer.weight, std=sqrt(2 / (layer.in_features + layer.out_features)))
            nn.init.normal_(layer.bias, std=sqrt(1 / layer.out_features))


def widths_of(embeddings: nn.Module, embedding_dims: Sequence[int] | None) -> tuple[int, ...]:
    """The width of each vector that ``embeddings`` gives: as told, or else as its ``embedding_dims`` says.

    Raises:
        ValueError: if neither says, or a width is below 1.
    """
    dims = getattr(embeddings, "embedding_dims", None) if embedding_dims is None else embedding_dims
    if dims is None:
        raise ValueError(f"embedding_dims must be given: embeddings ({type(embeddings).__name__}) does not say its own")
    if not dims or min(dims) < 1:
        raise ValueError(f"embedding_dims ({tuple(dims)}) must be one or more widths of at least 1")
    return tuple(dims)


def check_inputs(dense: Tensor, vectors: Tensor, num_dense: int, embedding_dims: Sequence[int]) -> None:
    """Raise ValueError unless ``dense`` is ``[B, num_dense]`` and ``vectors`` ``[B, ...]`` of the widths' sum."""
    if dense.dim() != 2 or dense.shape[1] != num_dense:
        raise ValueError(f"dense has shape {tuple(dense.shape)} but must be [B, {num_dense}]")
    total = sum(embedding_dims)
    if vectors.dim() < 2 or vectors.shape[0] != dense.shape[0] or vectors.shape[1:].numel() != total:
        raise ValueError(
            f"embeddings gave shape {tuple(vectors.shape)} but must give {total} columns"
            f" ({len(embedding_dims)} vectors) for each of the {dense.shape[0]} rows of dense"
        )

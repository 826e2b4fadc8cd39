"""Linear layers with ReLUs, and their initial values."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import nn


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
    """Initialize every linear layer as the public DLRM code does: weight N(0, 2 / (in + out)), bias N(0, 1 / out).

    With Glorot's variance, activations and gradients have about the same size in all layers. The random bias is kept
    because the losses published for these networks were reached with it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:  # on meta, normal_ would import the compiler
            nn.init.normal_(layer.weight, std=sqrt(2 / (layer.in_features + layer.out_features)))
            nn.init.normal_(layer.bias, std=sqrt(1 / layer.out_features))

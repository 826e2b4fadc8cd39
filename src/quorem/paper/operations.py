"""The operations that combine one vector per partition into an embedding (section 4).

Shapes: K partitions, D embedding dim. Each function takes K vectors ``[..., D_j]``.
"""

from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice


def concat(*vectors: Tensor) -> Tensor:
    """Concatenate the vectors: ``D = D_1 + ... + D_k``."""
    return torch.cat(vectors, dim=-1)


def add(*vectors: Tensor) -> Tensor:
    """Sum the vectors element by element."""
    return reduce(torch.add, vectors)


def mult(*vectors: Tensor) -> Tensor:
    """Multiply the vectors element by element (algorithm 2)."""
    return reduce(torch.mul, vectors)


def feature(*vectors: Tensor) -> Tensor:
    """Keep the vectors apart, as K features ``[..., K, D]`` (feature generation)."""
    return torch.stack(vectors, dim=-2)


Operation = Literal["concat", "add", "mult", "feature"]
OPERATIONS = {"concat": concat, "add": add, "mult": mult, "feature": feature}


def widths(
    operation: Operation, embedding_dim: int, k: int, dims: tuple[int, ...] | None = None, name: str = "embedding_dim"
) -> tuple[int, ...]:
    """Width ``D_j`` of the table of each of ``k`` partitions, so that the composed vector has ``embedding_dim``.

    ``dims`` are the widths themselves, for ``"concat"`` only; None splits ``embedding_dim``. Errors call it
    ``name``.

    >>> widths("concat", 16, 2), widths("mult", 16, 2)
    ((8, 8), (16, 16))
    """
    check_choice("operation", operation, Operation)
    if operation != "concat":
        if dims is not None:
            raise ValueError(f"dims ({dims}) must be None unless operation ({operation!r}) is 'concat'")
        return (embedding_dim,) * k
    if dims is not None:
        if len(dims) != k or sum(dims) != embedding_dim:
            raise ValueError(f"dims ({dims}) must be {k} widths that sum to {name} ({embedding_dim})")
        return dims
    if embedding_dim % k:
        raise ValueError(
            f"{name} ({embedding_dim}) must be divisible by the number of partitions ({k})"
            " for operation='concat' (or choose the widths with dims=)"
        )
    return (embedding_dim // k,) * k

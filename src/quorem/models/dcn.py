"""DCN, the deep and cross network (Wang et al. 2017), as in section 5.1."""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn

from .network import Network, mlp, start_


class DCN(Network):
    """Deep and cross network: six vector cross layers beside an MLP, then one linear unit (section 5.1).

    With x0 the dense features and all vectors end to end, ``x[l + 1] = x0 (x[l] . w[l]) + b[l] + x[l]``.

    By induction ``x[l] = a[l] x0 + c[l]``, where c[l] is the sum of the biases below l and a[l] one number per
    sample: ``a[l + 1] = a[l] (1 + x0 . w[l]) + c[l] . w[l]``. So all cross layers and their share of the output
    unit are one product of x0 with L + 1 columns, and x0 is read once instead of L times.

    Args:
        embeddings: any module that turns ids into vectors ``[B, F', D]`` or ``[B, sum D]``.
        num_dense: number of dense features.
        deep: widths of the MLP's layers.
        num_cross: number of cross layers, L.
        embedding_dims: widths of the vectors; None takes ``embeddings.embedding_dims``.
        device: device of the layers; the embeddings stay where they are.
        dtype: dtype of the layers.

    Raises:
        ValueError: if a size is too small, or the widths are not known.

    >>> from quorem import QR, EmbeddingCollection, Table
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 4)]
    >>> DCN(EmbeddingCollection(tables))(torch.zeros(2, 13), torch.tensor([[999, 0], [5, 6]])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int = 13,
        deep: Sequence[int] = (512, 256, 64),
        num_cross: int = 6,
        embedding_dims: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embeddings, num_dense, embedding_dims)
        if num_cross < 1:
            raise ValueError(f"num_cross ({num_cross}) must be at least 1")
        if not deep:
            raise ValueError(f"deep ({deep}) must have at least one layer")
        width = num_dense + sum(self.embedding_dims)
        self.cross_weight = nn.Parameter(torch.empty(num_cross, width, device=device, dtype=dtype))
        self.cross_bias = nn.Parameter(torch.empty(num_cross, width, device=device, dtype=dtype))
        self.deep = mlp((width, *deep), device=device, dtype=dtype)
        self.output = nn.Linear(width + deep[-1], 1, device=device, dtype=dtype)  # of the cross layers, then the deep
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all layers (see ``start_``; cross layers likewise, without bias), but not the embeddings."""
        if not self.cross_weight.is_meta:
            nn.init.normal_(self.cross_weight, std=sqrt(2 / (self.cross_weight.shape[1] + 1)))
        nn.init.zeros_(self.cross_bias)
        start_(self.deep)
        start_(self.output)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features and vectors that were looked up before."""
        vectors = self._checked(dense, vectors)
        x0 = torch.cat([dense, vectors.flatten(1)], 1)
        to_cross, to_deep = self.output.weight[0].split([x0.shape[1], self.output.in_features - x0.shape[1]])
        weights = torch.cat([self.cross_weight, to_cross[None]])  # [L + 1, width]
        dots = (x0 @ weights.mT).unbind(1)  # x0 . w[l], the output unit last
        shifts = (weights @ self.cross_bias.mT).tril(-1).sum(1)  # c[l] . w[l]
        a = torch.ones_like(dots[0])
        for dot, shift in zip(dots[:-1], shifts[:-1], strict=True):
            a = a * (1 + dot) + shift
        return a * dots[-1] + shifts[-1] + (self.deep(x0) @ to_deep[:, None])[:, 0] + self.output.bias

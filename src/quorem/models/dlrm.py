"""DLRM (Naumov et al. 2019), as in section 5.1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .network import Network, mlp, start_


class DLRM(Network):
    """A bottom MLP for the dense features, dot products between all pairs of vectors, and a top MLP (section 5.1).

    The bottom's output, D wide, is one more vector; it also goes to the top beside the dot products.

    Args:
        embeddings: any module that turns ids into vectors ``[B, F', D]``.
        num_dense: number of dense features; with none there is no bottom.
        bottom: widths of the bottom's hidden layers; a last one of width D follows.
        top: widths of the top's hidden layers; the output unit follows.
        raw_dense: give the top the dense features as they are instead of the bottom's output (table 1).
        embedding_dims: widths of the vectors, all equal; None takes ``embeddings.embedding_dims``.
        device: device of the layers; the embeddings stay where they are.
        dtype: dtype of the layers.

    Raises:
        ValueError: if a size is too small, or the widths are not known or not equal.

    >>> from quorem import QR, EmbeddingCollection, Table
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 16)]
    >>> DLRM(EmbeddingCollection(tables))(torch.zeros(2, 13), torch.tensor([[999, 0], [5, 6]])).shape
    torch.Size([2])
    """

    pairs: Tensor
    pair_of: Tensor

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int = 13,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        raw_dense: bool = False,
        embedding_dims: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embeddings, num_dense, embedding_dims)
        if not top:
            raise ValueError(f"top ({top}) must have at least one layer")
        if len(set(self.embedding_dims)) > 1:
            raise ValueError(f"embedding_dims ({self.embedding_dims}) must all be equal: DLRM takes their dot products")
        self.raw_dense, self.embedding_dim = raw_dense, self.embedding_dims[0]
        self.num_vectors = len(self.embedding_dims) + (num_dense > 0)
        if self.num_vectors < 2:
            raise ValueError(
                f"num_dense ({num_dense}) must be at least 1 for a single vector: DLRM multiplies it with others,"
                " DCN takes it alone"
            )
        beside = (num_dense if raw_dense else self.embedding_dim) if num_dense else 0
        dots = self.num_vectors * (self.num_vectors - 1) // 2
        layers = (num_dense, *bottom, self.embedding_dim) if num_dense else ()
        self.bottom = mlp(layers, device=device, dtype=dtype)
        self.top = mlp((beside + dots, *top), device=device, dtype=dtype)
        self.output = nn.Linear(top[-1], 1, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all layers (see ``start_``), but not the embeddings."""
        for part in (self.bottom, self.top, self.output):
            start_(part)
        device = self.output.weight.device
        pairs, pair_of = pair_indices(self.num_vectors)  # here because after to_empty() the buffers hold nothing
        for name, indices in (("pairs", pairs), ("pair_of", pair_of)):  # not on meta, for load_state_dict(assign=True)
            self.register_buffer(name, indices if device.type == "meta" else indices.to(device), persistent=False)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features and vectors that were looked up before."""
        vectors = self._checked(dense, vectors)
        batch = vectors.shape[0]  # len would fix the size in torch.export
        vectors = vectors.reshape(batch, len(self.embedding_dims), self.embedding_dim)
        if not self.num_dense:
            features = PairwiseDots.apply(vectors, self.pairs, self.pair_of)
        else:
            low = self.bottom(dense)
            dots = PairwiseDots.apply(torch.cat([low[:, None], vectors], 1), self.pairs, self.pair_of)
            features = torch.cat([dense if self.raw_dense else low, dots], 1)
        return self.output(self.top(features)).squeeze(1)


class PairwiseDots(torch.autograd.Function):
    """Dot products ``[B, V (V - 1) / 2]`` between all pairs of V vectors ``[B, V, D]``.

    The gradient of a dot product goes to both its vectors: as a symmetric matrix it is gathered, not scattered, and
    one matrix product takes the place of the two that autograd would need.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, pair_of: Tensor) -> Tensor:
        """The strict lower triangle of the vectors' Gram matrix."""
        ctx.save_for_backward(vectors, pair_of)
        return torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the vectors."""
        vectors, pair_of = ctx.saved_tensors
        grad = F.pad(grads[0].to(vectors.dtype), (0, 1)).index_select(1, pair_of)
        return torch.bmm(grad.unflatten(1, vectors.shape[1:2] * 2), vectors), None, None


def pair_indices(num_vectors: int) -> tuple[Tensor, Tensor]:
    """Where each pair lies in a flat ``[V, V]`` matrix, and which pair each entry belongs to (the diagonal: one past).

    >>> pair_indices(3)
    (tensor([3, 6, 7]), tensor([3, 0, 1, 0, 3, 2, 1, 2, 3]))
    """
    row, column = torch.tril_indices(num_vectors, num_vectors, -1, device="cpu")
    count = torch.arange(len(row), device="cpu")
    pair_of = torch.full((num_vectors, num_vectors), len(row), device="cpu")
    pair_of[row, column] = count
    pair_of[column, row] = count
    return row * num_vectors + column, pair_of.flatten()

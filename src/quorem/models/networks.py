"""DCN (Wang et al. 2017) and DLRM (Naumov et al. 2019), the networks of section 5.1, and what they share."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Embeddings, and layers that turn their vectors and dense features into logits; ``DCN`` explains the arguments."""

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
    """Linear layers ``sizes[0] -> sizes[1] -> ...``, each followed by a ReLU."""
    if any(size < 1 for size in sizes):
        raise ValueError(f"sizes ({tuple(sizes)}) must all be at least 1")
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(sizes):
        layers += [nn.Linear(d_in, d_out, device=device, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers)


def init_layers_(layers: nn.Module) -> None:
    """Initialize every linear layer as the public DLRM code does: weight N(0, 2 / (in + out)), bias N(0, 1 / out).

    With Glorot's variance, activations and gradients have about the same size in all layers. The random bias is kept
    because the losses published for these networks were reached with it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.is_meta:  # on meta, normal_ would import the compiler
            nn.init.normal_(layer.weight, std=sqrt(2 / (layer.in_features + layer.out_features)))
            nn.init.normal_(layer.bias, std=sqrt(1 / layer.out_features))


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
        """Initialize all layers (see ``init_layers_``; cross layers likewise, without bias), but not the embeddings."""
        if not self.cross_weight.is_meta:
            nn.init.normal_(self.cross_weight, std=sqrt(2 / (self.cross_weight.shape[1] + 1)))
        nn.init.zeros_(self.cross_bias)
        init_layers_(self.deep)
        init_layers_(self.output)

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


class DLRM(Network):
    """A bottom MLP for the dense features, dot products between all pairs of vectors, and a top MLP (section 5.1).

    The bottom's output, D wide, is one more vector; it also goes to the top beside the dot products.

    Args:
        num_dense: number of dense features; with none there is no bottom.
        bottom: widths of the bottom's hidden layers; a last one of width D follows.
        top: widths of the top's hidden layers; the output unit follows.
        raw_dense: give the top the dense features as they are instead of the bottom's output (table 1).
        embedding_dims: widths of the vectors, all equal; None takes ``embeddings.embedding_dims``.

    The other arguments are those of ``DCN``.

    Raises:
        ValueError: if a size is too small, or the widths are not known or not equal.

    >>> from quorem import QR, EmbeddingCollection, Table
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 16)]
    >>> DLRM(EmbeddingCollection(tables))(torch.zeros(2, 13), torch.tensor([[999, 0], [5, 6]])).shape
    torch.Size([2])
    """

    pairs: Tensor  # where each pair of vectors is in the flat matrix [V, V] of all dot products

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
        """Initialize all layers (see ``init_layers_``), but not the embeddings."""
        for part in (self.bottom, self.top, self.output):
            init_layers_(part)
        device = self.output.weight.device
        row, column = torch.tril_indices(self.num_vectors, self.num_vectors, -1, device="cpu")
        pairs = row * self.num_vectors + column  # here because after to_empty() the buffer holds nothing
        # Not on meta, for load_state_dict(assign=True).
        self.register_buffer("pairs", pairs if device.type == "meta" else pairs.to(device), persistent=False)

    def logits(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits ``[B]`` of dense features and vectors that were looked up before."""
        vectors = self._checked(dense, vectors)
        batch = vectors.shape[0]  # len would fix the size in torch.export
        vectors = vectors.reshape(batch, len(self.embedding_dims), self.embedding_dim)
        beside = []
        if self.num_dense:
            low = self.bottom(dense)
            vectors, beside = torch.cat([low[:, None], vectors], 1), [dense if self.raw_dense else low]
        dots = torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, self.pairs)
        return self.output(self.top(torch.cat([*beside, dots], 1))).squeeze(1)

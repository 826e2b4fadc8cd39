"""Compose the vectors of ids from the rows that TorchRec's tables gave."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ...checks import Pooling
from ...modules.collection import EmbeddingCollection
from ...paper import init
from .rows import Ids, RowBatch, RowNumbers


class Compose(nn.Module):
    """Composes the vectors of a batch's distinct ids, and pools them, or repeats them for every id.

    It has the networks of path-based tables and the matrices of narrow rows, which are never on the meta device, where
    ``template``, a single-device collection of the tables, is.
    """

    mode: Pooling | None = None  # how bags are pooled, if they are

    def __init__(self, template: EmbeddingCollection, rows: RowNumbers, device: torch.device) -> None:
        super().__init__()
        self.names = template.features
        self.specs = [template.specs[t] for t in template.table_of]
        self.groups, self.parts_read = rows.groups, rows.parts_read
        self.paths = nn.ModuleList(template.networks())
        self.member = {f: (g, i) for g, group in enumerate(template.networks()) for i, f in enumerate(group.members)}
        home = torch.device("cpu") if device.type == "meta" else device
        for group in template.networks():
            group.to_empty(device=home)
            group.register_integers(home)
            group.reset_parameters()
        self.projections = nn.ParameterList(torch.empty_like(matrix, device=home) for matrix in template.projections)
        for matrix in self.projections:
            init.projection_(matrix)
        narrow = {t: position for position, t in enumerate(template.narrow)}
        self.matrix_of = [narrow.get(t) for t in template.table_of]

    def forward(self, batch: RowBatch, fetched: Sequence[KeyedTensor]) -> Any:
        """A KeyedTensor ``[B, sum D]`` of pooled vectors; without a mode, a JaggedTensor for each feature."""
        matrices = {}
        values = Joined.apply(*(rows.values() for rows in fetched))
        for shards, rows, together in zip(self.groups, fetched, values, strict=True):
            width = shards[0].width
            by_name = dict(zip(rows.keys(), together.float().split(width, 1), strict=True))  # their order is the plan's
            of_shards = [by_name[shard.name] for shard in shards]
            matrices[width] = torch.cat([together.new_zeros(1, width, dtype=torch.float32), *of_shards])
        vectors = [self._composed(f, ids, matrices, batch.ranks) for f, ids in enumerate(batch.features)]
        pairs = zip(vectors, batch.features, strict=True)
        if self.mode is None:
            every = [JaggedTensor(v.index_select(0, ids.inverse), lengths=ids.lengths) for v, ids in pairs]
            return dict(zip(self.names, every, strict=True))
        pooled = [self._pooled(v, ids) for v, ids in pairs]
        return KeyedTensor(list(self.names), [each.shape[1] for each in pooled], torch.cat(pooled, 1))

    def _composed(self, f: int, ids: Ids, matrices: dict[int, Tensor], ranks: Tensor) -> Tensor:
        """The vectors ``[U, width]`` of a feature's distinct ids; zeros for padding and ids out of range."""
        spec = self.specs[f]
        rows = [
            matrices[part.width].index_select(0, index)
            for part, index in zip(self.parts_read[f], ids.positions, strict=True)
        ]
        own, composed = rows[: spec.num_own > 0], rows[spec.num_own > 0 :]
        if spec.operation in ("concat", "feature"):
            composed = [torch.cat(composed, 1)] if composed else []
        elif spec.operation == "mult" and composed:
            composed = [reduce(torch.mul, composed)]  # of an id that reads its own row, a product of zeros
        vectors = reduce(torch.add, own + composed)
        if f in self.member:
            group, member = self.member[f]
            vectors = self.paths[group](vectors, ids.distinct, torch.full_like(ids.distinct, member), ranks)
        if (position := self.matrix_of[f]) is not None:
            projected = vectors.reshape(-1, spec.width) @ self.projections[position].to(vectors.dtype)
            vectors = projected.view(len(vectors), spec.num_vectors * spec.embedding_dim)
        return vectors

    def _pooled(self, vectors: Tensor, ids: Ids) -> Tensor:
        """The sums or means ``[B, width]`` of the vectors of each bag; a mean counts ids that are valid."""
        every = vectors.index_select(0, ids.inverse)
        if every.requires_grad:
            every.register_hook(Tensor.contiguous)  # the gradient of index_select is slow for columns of a matrix
        every = every if ids.weights is None else every * ids.weights.to(every.dtype)[:, None]
        if ids.bag is None:
            return every
        sums = every.new_zeros(len(ids.lengths), every.shape[1]).index_add(0, ids.bag, every)
        if self.mode == "sum":
            return sums
        counts = sums.new_zeros(len(sums)).index_add(0, ids.bag, ids.valid[ids.inverse].to(sums.dtype))
        return sums / counts.clamp(min=1)[:, None]


class Joined(torch.autograd.Function):
    """The identity on several tensors, whose backward runs once for all: even if only some of them have gradients.

    So all ranks exchange the gradients in the same order.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same tensors."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """The gradients; autograd passes zeros for a tensor that has none."""
        return grads

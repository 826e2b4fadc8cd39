"""Compose the vectors of each feature from TorchRec's vectors, pooled or not."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ...modules.path_networks import PathNetworks
from ..features import Feature
from ..shards import Shards
from .rows import Ids, RowBatch, lengths_of

SUM = 0  # FBGEMM's PoolingMode


class Unpooled(nn.Module):
    """Composes the vector of each id from TorchRec's unpooled vectors.

    Args:
        features: the features of the collection, in the order of its output.
        paths: the networks of path-based tables.
        projections: the matrix ``[d, D]`` of each table with narrow rows, in the order of the tables.
    """

    def __init__(self, features: Sequence[Feature], paths: nn.ModuleList, projections: nn.ParameterList) -> None:
        super().__init__()
        self.features = tuple(features)
        self.paths, self.projections = paths, projections
        self.narrow = tuple(dict.fromkeys(f.table for f in features if f.spec.is_narrow))
        self.member = {  # for each path-based feature, its group of networks and its position there
            features[f].name: (group, position)
            for group, networks in enumerate(cast(list[PathNetworks], list(paths)))
            for position, f in enumerate(networks.members)
        }

    def forward(self, rows: RowBatch, vectors: list[Any]) -> dict[str, JaggedTensor]:
        """Compose each feature's vectors."""
        by_key, out = _by_key(vectors), {}
        for f, batch in zip(self.features, rows.features, strict=True):
            composed = self.composed(f, batch, rows.id_lists, _rows_of_parts(f, batch, by_key))
            out[f.name] = JaggedTensor(self.projected(f, composed), lengths=batch.lengths)
        return out

    def composed(self, feature: Feature, batch: Ids, id_lists: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The feature's composed rows ``[N, W]``; ``parts`` has the row of each id, and a neutral one if it has none.

        Ids that read no row get zeros.
        """
        if feature.merged:
            rows = reduce(torch.add, parts)
            if feature.spec.hidden is None:
                return rows
            group, position = self.member[feature.name]
            return self.paths[group](rows, batch.ids, torch.full_like(batch.ids, position), id_lists)
        first = feature.first_partition
        out = _combined(feature, parts[first:])
        if batch.used is not None:
            out = torch.where(batch.used[:, -1:], out, 0)
        return out + parts[0] if first else out

    def projected(self, feature: Feature, composed: Tensor) -> Tensor:
        """The vectors ``[N, width]`` of composed, perhaps pooled, rows: narrow ones times the matrix of their table."""
        if not feature.spec.is_narrow:
            return composed
        matrix = self.projections[self.narrow.index(feature.table)].to(composed.dtype)
        return (composed.reshape(-1, feature.spec.width) @ matrix).view(len(composed), feature.width)

    def pooled(self, parts: list[Tensor], rows: RowBatch, mode: str) -> KeyedTensor:
        """The sums or means ``[B, sum D]`` of bags, of which ``parts`` are the sums for each feature."""
        out = []
        for f, part, batch in zip(self.features, parts, rows.features, strict=True):
            mean = part if mode == "sum" else part / _num_ids(batch).clamp(min=1)[:, None]
            out.append(self.projected(f, mean))
        return KeyedTensor([f.name for f in self.features], [f.width for f in self.features], torch.cat(out, 1))


class Pooled(Unpooled):
    """Composes the pooled vector of each feature from TorchRec's pooled and unpooled vectors."""

    def __init__(
        self, features: Sequence[Feature], paths: nn.ModuleList, projections: nn.ParameterList, mode: str
    ) -> None:
        super().__init__(features, paths, projections)
        self.mode = mode

    def forward(  # type: ignore[override]
        self, rows: RowBatch, pooled: KeyedTensor | None, vectors: list[Any]
    ) -> KeyedTensor:
        """Compose and pool the vectors that TorchRec did not pool, and put the features in order."""
        num_samples = len(rows.features[0].lengths)  # for an empty batch, TorchRec got one sample
        columns = {} if pooled is None else {key: part[:num_samples] for key, part in pooled.to_dict().items()}
        by_key, sums = _by_key(vectors), []
        for f, batch in zip(self.features, rows.features, strict=True):
            if f.summed:
                parts, first = [columns[key] for key in f.keys], 0 if f.merged else f.first_partition
                part = _combined(f, parts[first:])
                sums.append(part + parts[0] if first else part)
            else:
                composed = self.composed(f, batch, rows.id_lists, _rows_of_parts(f, batch, by_key))
                sums.append(bag_sums(composed, torch.arange(len(composed), device=composed.device), batch))
        return self.pooled(sums, rows, self.mode)


class Gathered(Unpooled):
    """Composes the vector of each id from the distinct rows of a batch, on the rank that has the batch."""

    def __init__(
        self, features: Sequence[Feature], paths: nn.ModuleList, projections: nn.ParameterList, shards: Shards
    ) -> None:
        super().__init__(features, paths, projections)
        self.shards = shards

    def forward(self, rows: RowBatch, fetched: list[KeyedTensor]) -> dict[str, JaggedTensor]:
        """Compose the vectors of distinct ids, then expand them to all ids."""
        out = {}
        for f, batch, vectors in zip(self.features, rows.features, self.distinct(rows, fetched), strict=True):
            assert batch.inverse is not None
            values = gather(vectors, batch.inverse)
            out[f.name] = JaggedTensor(self.projected(f, values), lengths=batch.lengths)
        return out

    def distinct(self, rows: RowBatch, fetched: list[KeyedTensor]) -> list[Tensor]:
        """The composed vectors of each feature's distinct ids."""
        parts: dict[tuple[int, int], Tensor] = {}  # by feature and part, the rows of the ids that read some
        values = Joined.apply(*(pooled.values() for pooled in fetched))
        for g, (pooled, of_width, tables) in enumerate(zip(fetched, values, self.shards.groups, strict=True)):
            order = pooled.keys()  # TorchRec's order follows the plan
            indices: dict[tuple[int, int], Tensor] = {}
            for i, (f, batch) in enumerate(zip(self.features, rows.features, strict=True)):
                for j, part in enumerate(f.parts):
                    location = self.shards.locations[part.name]
                    if location.group == g:
                        column = order.index(tables[location.shard].name)
                        indices[i, j] = batch.positions[j] * len(tables) + column
            read = gather(of_width.reshape(-1, tables[0].width), torch.cat(list(indices.values())))
            parts |= zip(indices, read.split([len(index) for index in indices.values()]), strict=True)
        out = []
        for i, (f, batch) in enumerate(zip(self.features, rows.features, strict=True)):
            of_feature = [parts[i, j] for j in range(len(f.parts))]
            out.append(self.composed(f, batch, rows.id_lists, _filled(f, batch, of_feature)))
        return out


class GatheredBags(Gathered):
    """Composes the pooled vector of each feature from distinct rows."""

    def __init__(
        self,
        features: Sequence[Feature],
        paths: nn.ModuleList,
        projections: nn.ParameterList,
        shards: Shards,
        mode: str,
    ) -> None:
        super().__init__(features, paths, projections, shards)
        self.mode = mode

    def forward(  # type: ignore[override]
        self, rows: RowBatch, pooled: None, fetched: list[KeyedTensor]
    ) -> KeyedTensor:
        """Compose the vectors of distinct ids, then pool the vectors of each bag."""
        pairs = zip(self.distinct(rows, fetched), rows.features, strict=True)
        sums = [bag_sums(vectors, cast(Tensor, batch.inverse), batch) for vectors, batch in pairs]
        return self.pooled(sums, rows, self.mode)


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


def _rows_of_parts(feature: Feature, batch: Ids, by_key: dict[str, Tensor]) -> Sequence[Tensor]:
    """The row of each id in each part, from TorchRec's unpooled vectors."""
    if not feature.merged:
        return _filled(feature, batch, [by_key[key] for key in feature.keys])
    rows, num_parts = by_key[feature.name], len(feature.parts)  # id by id, for each the parts that it reads
    if batch.used is not None:
        rows = _scattered(rows, batch.used.flatten(), 0)
    return rows.view(len(batch.ids), num_parts, rows.shape[1]).unbind(1)


def _filled(feature: Feature, batch: Ids, parts: list[Tensor]) -> list[Tensor]:
    """The row of each id in each part, with a neutral one where the id reads none."""
    if batch.used is None:
        return parts
    neutral = 1 if feature.spec.operation == "mult" and not feature.merged else 0
    first = feature.first_partition
    return [_scattered(part, batch.used[:, j], neutral if j >= first else 0) for j, part in enumerate(parts)]


def _scattered(rows: Tensor, mask: Tensor, neutral: float) -> Tensor:
    """``rows`` where ``mask`` is true, and ``neutral`` elsewhere."""
    (positions,) = mask.nonzero(as_tuple=True)
    return rows.new_full((len(mask), rows.shape[1]), neutral).index_copy(0, positions, rows)


def _combined(feature: Feature, parts: Sequence[Tensor]) -> Tensor:
    """The product of the parts, or the parts concatenated."""
    if len(parts) == 1:
        return parts[0]
    return reduce(torch.mul, parts) if feature.spec.operation == "mult" else torch.cat(list(parts), 1)


def _num_ids(batch: Ids) -> Tensor:
    """Number of ids ``[B]`` in each bag that read rows."""
    if batch.used is None:
        return batch.lengths
    read = batch.used.any(1)
    return lengths_of(read if batch.inverse is None else read[batch.inverse], batch.lengths)


def _by_key(vectors: list[Any]) -> dict[str, Tensor]:
    return {key: jagged.values() for group in vectors for key, jagged in group.items()}


def gather(matrix: Tensor, index: Tensor) -> Tensor:
    """``matrix[index]``, but with a gradient that is many times faster on the CPU than that of torch's indexing."""
    return _sums(matrix, index, torch.arange(len(index) + 1, device=index.device), None)


def bag_sums(vectors: Tensor, index: Tensor, batch: Ids) -> Tensor:
    """The weighted sum ``[B, D]`` of the vectors of each bag; ``index`` has the vector of each id."""
    return _sums(vectors, index, F.pad(batch.lengths.cumsum(0), (1, 0)), batch.weights)


def _sums(matrix: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """The sums ``[B, width]`` of bags of rows, by FBGEMM's kernel for replicated tables."""
    width, device = matrix.shape[1], matrix.device
    if len(offsets) <= 1 or not len(matrix):
        return matrix[:0].new_zeros(len(offsets) - 1, width) + matrix.sum() * 0
    out: Tensor = torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
        dev_weights=matrix.reshape(-1),
        weights_offsets=torch.zeros(1, dtype=torch.int64, device=device),
        D_offsets=torch.tensor([0, width], dtype=torch.int32, device=device),
        total_D=width,
        max_D=width,
        hash_size_cumsum=torch.tensor([0, len(matrix)], device=device),
        total_hash_size_bits=len(matrix).bit_length(),
        indices=index,
        offsets=offsets,
        pooling_mode=SUM,
        indice_weights=None if weights is None else weights.float(),
        feature_requires_grad=None,
    )
    return out

"""Compose the vectors of each feature from TorchRec's vectors, pooled or not."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ...modules.path_networks import PathNetworks
from ..features import Feature
from .rows import Ids, RowBatch, lengths_of


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

    def composed(self, feature: Feature, batch: Ids, id_lists: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The feature's vectors ``[N, width]``; zeros for ids that read no row."""
        parts, used = [vectors[key] for key in feature.keys], batch.used
        if feature.merged:
            rows = parts[0] if used is None else _scattered(parts[0], used.flatten(), 0)
            if len(rows) != len(batch.ids):
                rows = rows.view(len(batch.ids), len(feature.bases), rows.shape[1]).sum(1)
            if feature.spec.hidden is None:
                return rows
            group, position = self.member[feature.name]
            return self.paths[group](rows, batch.ids, torch.full_like(batch.ids, position), id_lists)
        if used is None:
            return _combined(feature, parts)
        neutral = 1 if feature.spec.operation == "mult" else 0
        first = feature.first_partition
        parts = [_scattered(part, used[:, j], neutral if j >= first else 0) for j, part in enumerate(parts)]
        out = torch.where(used[:, -1:], _combined(feature, parts[first:]), 0)
        return out + parts[0] if first else out

    def projected(self, feature: Feature, composed: Tensor) -> Tensor:
        """The vectors ``[N, width]`` of composed, perhaps pooled, rows: narrow ones times the matrix of their table."""
        if not feature.spec.is_narrow:
            return composed
        matrix = self.projections[self.narrow.index(feature.table)].to(composed.dtype)
        return (composed.reshape(-1, feature.spec.width) @ matrix).view(len(composed), feature.width)

    def forward(self, rows: RowBatch, vectors: list[Any]) -> dict[str, JaggedTensor]:
        """Compose each feature's vectors."""
        by_key, out = _by_key(vectors), {}
        for f, batch in zip(self.features, rows.features, strict=True):
            composed = self.composed(f, batch, rows.id_lists, by_key)
            out[f.name] = JaggedTensor(self.projected(f, composed), lengths=batch.lengths)
        return out


class Pooled(Unpooled):
    """Composes the pooled vector of each feature from TorchRec's pooled and unpooled vectors."""

    def __init__(
        self, features: Sequence[Feature], paths: nn.ModuleList, projections: nn.ParameterList, mode: str
    ) -> None:
        super().__init__(features, paths, projections)
        self.mode = mode
        in_order = not self.narrow and all(f.summed and (f.merged or not f.spec.num_own) for f in features)
        in_order = in_order and mode == "sum"
        self.order = [key for f in features for key in f.keys] if in_order else []

    def forward(  # type: ignore[override]
        self, rows: RowBatch, pooled: KeyedTensor | None, vectors: list[Any]
    ) -> KeyedTensor:
        """Compose and pool the vectors that TorchRec did not pool, and put the features in order."""
        names, widths = [f.name for f in self.features], [f.width for f in self.features]
        num_samples = len(rows.features[0].lengths)  # for an empty batch, TorchRec got one sample
        if pooled is not None and pooled.keys() == self.order:  # TorchRec's own order follows the plan
            return KeyedTensor(names, widths, _first(pooled.values(), num_samples))
        columns = {} if pooled is None else {key: _first(part, num_samples) for key, part in pooled.to_dict().items()}
        by_key = _by_key(vectors)
        out = []
        for f, batch in zip(self.features, rows.features, strict=True):
            if f.summed:
                parts, first = [columns[key] for key in f.keys], 0 if f.merged else f.first_partition
                part = _combined(f, parts[first:])
                part = part + parts[0] if first else part
            else:
                part = _pool(self.composed(f, batch, rows.id_lists, by_key), batch)
            part = part if self.mode == "sum" else part / _num_ids(batch).clamp(min=1)[:, None]
            out.append(self.projected(f, part))
        return KeyedTensor(names, widths, torch.cat(out, 1))


def _first(vectors: Tensor, count: int) -> Tensor:
    """The first ``count`` vectors; if these are all, without a slice, whose gradient would be a copy."""
    return vectors if len(vectors) == count else vectors[:count]


def _combined(feature: Feature, parts: list[Tensor]) -> Tensor:
    """The product of the parts, or the parts concatenated."""
    if len(parts) == 1:
        return parts[0]
    return reduce(torch.mul, parts) if feature.spec.operation == "mult" else torch.cat(parts, 1)


def _scattered(rows: Tensor, mask: Tensor, neutral: float) -> Tensor:
    """``rows`` where ``mask`` is true, and ``neutral`` elsewhere."""
    (positions,) = mask.nonzero(as_tuple=True)
    return rows.new_full((len(mask), rows.shape[1]), neutral).index_copy(0, positions, rows)


def _pool(vectors: Tensor, batch: Ids) -> Tensor:
    """The weighted sum ``[B, D]`` of the vectors ``[N, D]`` of each bag."""
    if batch.weights is not None:
        vectors = vectors * batch.weights[:, None]
    bags = torch.arange(len(batch.lengths), device=vectors.device)
    bags = bags.repeat_interleave(batch.lengths, output_size=len(vectors))
    return vectors.new_zeros(len(batch.lengths), vectors.shape[1]).index_add(0, bags, vectors)


def _num_ids(batch: Ids) -> Tensor:
    """Number of ids ``[B]`` in each bag that read rows."""
    return batch.lengths if batch.used is None else lengths_of(batch.used.any(1), batch.lengths)


def _by_key(vectors: list[Any]) -> dict[str, Tensor]:
    return {key: jagged.values() for group in vectors for key, jagged in group.items()}

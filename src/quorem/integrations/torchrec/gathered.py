"""Compose the vectors of each feature from the distinct rows of a batch, on the rank that has the batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ..features import Feature
from ..shards import Shards
from .compose import Unpooled
from .rows import Ids, lengths_of
from .unique_rows import Lookup, UniqueBatch

SUM = 0  # FBGEMM's PoolingMode


class Vectors(NamedTuple):
    """The vectors of a feature's distinct ids."""

    matrix: Tensor  # [R, width], which features may share
    rows: Tensor  # [U]: the row of the matrix for each id
    read: Tensor | None  # bool [U]: which ids have a vector; None where all do


class RowBags(NamedTuple):
    """Bags of rows of a matrix, feature by feature."""

    rows: Tensor  # [N]: rows of the matrix
    lengths: Tensor  # [F, B]
    weights: Tensor | None  # [N]
    bounds: list[int]  # [F + 1]: where the rows of each feature start

    def only(self, read: Tensor) -> "RowBags":
        """The bags without the rows for which ``read`` ``[N]`` is false."""
        lengths = lengths_of(read, self.lengths.flatten()).view_as(self.lengths)
        bounds = F.pad(read.cumsum(0), (1, 0))[self.bounds].tolist()
        return RowBags(self.rows[read], lengths, None if self.weights is None else self.weights[read], bounds)


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


class Gathered(Unpooled):
    """Composes the vector of each id from distinct rows."""

    def __init__(
        self, features: Sequence[Feature], paths: nn.ModuleList, projections: nn.ParameterList, shards: Shards
    ) -> None:
        super().__init__(features, paths, projections)
        self.shards = shards

    def forward(  # type: ignore[override]
        self, rows: UniqueBatch, fetched: list[KeyedTensor]
    ) -> dict[str, JaggedTensor]:
        """Compose the vectors of distinct ids, then expand them to all ids."""
        out, first = {}, 0
        for i, (f, vectors) in enumerate(zip(self.features, self.vectors(rows, fetched), strict=True)):
            ids = rows.inverse[rows.bounds[i] : rows.bounds[i + 1]] - first
            first += len(vectors.rows)
            values = gather(vectors.matrix, vectors.rows[ids])
            if vectors.read is not None:
                values = torch.where(vectors.read[ids][:, None], values, 0)
            out[f.name] = JaggedTensor(self.projected(f, values), lengths=rows.lengths[i])
        return out

    def vectors(self, rows: UniqueBatch, fetched: list[KeyedTensor]) -> list[Vectors]:
        """The vectors of each feature's distinct ids; where a vector is just one row, nothing is computed."""
        matrices, columns = [], []
        values = Joined.apply(*(pooled.values() for pooled in fetched))
        for pooled, rows_of_width, group in zip(fetched, values, self.shards.groups, strict=True):
            order = pooled.keys()  # TorchRec's order follows the plan
            columns.append([order.index(table.name) for table in group])
            matrices.append(rows_of_width.reshape(-1, group[0].width))
        by_feature = []
        for f, lookup in zip(self.features, rows.lookups, strict=True):
            locations = [self.shards.locations[part.name] for part in f.parts]
            indices = [
                lookup.positions[j] * len(columns[location.group]) + columns[location.group][location.shard]
                for j, location in enumerate(locations)
            ]
            matrix = matrices[locations[0].group]
            read = None if lookup.used is None else lookup.used.any(1)
            if len(f.parts) == 1 and f.spec.hidden is None:
                index = indices[0] if read is None else torch.zeros_like(lookup.ids).masked_scatter(read, indices[0])
                by_feature.append(Vectors(matrix, index, read))
                continue
            if f.merged:
                by_key = [gather(matrix, _by_id(lookup, indices))]
            else:
                by_key = [gather(matrices[p.group], index) for p, index in zip(locations, indices, strict=True)]
            ids = Ids(lookup.ids, lookup.ids, None, lookup.used)
            composed = self.composed(f, ids, rows.id_lists, dict(zip(f.keys, by_key, strict=True)))
            by_feature.append(Vectors(composed, torch.arange(len(composed), device=composed.device), read))
        return by_feature


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
        self, rows: UniqueBatch, pooled: None, fetched: list[KeyedTensor]
    ) -> KeyedTensor:
        """Compose the vectors of distinct ids, then pool the vectors of each bag."""
        names, widths = [f.name for f in self.features], [f.row_width for f in self.features]
        by_feature = self.vectors(rows, fetched)
        matrices = {id(vectors.matrix): vectors.matrix for vectors in by_feature}
        firsts: dict[int, int] = {}  # first row of each matrix in the concatenation of those of its width
        by_width: dict[int, list[Tensor]] = {}
        for key, matrix in matrices.items():
            of_width = by_width.setdefault(matrix.shape[1], [])
            firsts[key] = sum(map(len, of_width))
            of_width.append(matrix)
        index = torch.cat([v.rows + firsts[id(v.matrix)] if firsts[id(v.matrix)] else v.rows for v in by_feature])
        bags = RowBags(index.index_select(0, rows.inverse), rows.lengths, rows.weights, rows.bounds)
        if any(v.read is not None for v in by_feature):  # ids without a vector are removed from their bags
            masks = [torch.ones_like(v.rows, dtype=torch.bool) if v.read is None else v.read for v in by_feature]
            bags = bags.only(torch.cat(masks)[rows.inverse])
        out = _pooled(widths, {w: torch.cat(m) if len(m) > 1 else m[0] for w, m in by_width.items()}, bags)
        if self.mode == "mean":
            counts = bags.lengths.clamp(min=1).T.repeat_interleave(torch.tensor(widths, device=out.device), 1)
            out = out / counts
        if self.narrow:
            pairs = zip(self.features, out.split(widths, 1), strict=True)
            out = torch.cat([self.projected(f, part) for f, part in pairs], 1)
        return KeyedTensor(names, [f.width for f in self.features], out)


def _by_id(lookup: Lookup, indices: list[Tensor]) -> Tensor:
    """The positions of the rows that are read in all parts, id by id."""
    if lookup.used is None:
        return torch.stack(indices, 1).flatten()
    index = torch.zeros_like(lookup.used, dtype=torch.int64)
    for j, part in enumerate(indices):
        index[:, j].masked_scatter_(lookup.used[:, j], part)
    return index[lookup.used]


def _pooled(widths: list[int], matrices: dict[int, Tensor], bags: RowBags) -> Tensor:
    """The sums ``[B, sum of widths]`` of bags; each feature reads the matrix of its width."""
    index, lengths, weights, bounds = bags
    if not lengths.shape[1]:
        return torch.cat([matrices[width][:0].new_zeros(0, width) + matrices[width].sum() * 0 for width in widths], 1)
    if len(matrices) == 1:
        return sums(matrices[widths[0]], index, F.pad(lengths.flatten().cumsum(0), (1, 0)), len(widths), weights)
    columns: dict[int, Tensor] = {}
    for width, matrix in matrices.items():
        members = [i for i, w in enumerate(widths) if w == width]
        spans = [slice(bounds[i], bounds[i + 1]) for i in members]
        offsets = F.pad(lengths[members].flatten().cumsum(0), (1, 0))
        of_width = None if weights is None else torch.cat([weights[span] for span in spans])
        pooled = sums(matrix, torch.cat([index[span] for span in spans]), offsets, len(members), of_width)
        columns |= dict(zip(members, pooled.split(width, 1), strict=True))
    return torch.cat([columns[i] for i in range(len(widths))], 1)


def gather(matrix: Tensor, index: Tensor) -> Tensor:
    """``matrix[index]``, but with a gradient that is many times faster on the CPU than that of torch's indexing."""
    return sums(matrix, index, torch.arange(len(index) + 1, device=index.device), 1, None)


def sums(matrix: Tensor, index: Tensor, offsets: Tensor, num_features: int, weights: Tensor | None) -> Tensor:
    """The sums ``[B, F * width]`` of bags of rows, feature by feature, by FBGEMM's kernel for replicated tables."""
    width, device = matrix.shape[1], matrix.device
    if len(offsets) <= 1:
        return matrix[:0].new_zeros(0, num_features * width)
    out: Tensor = torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
        dev_weights=matrix.reshape(-1),
        weights_offsets=torch.zeros(num_features, dtype=torch.int64, device=device),
        D_offsets=torch.arange(0, width * num_features + 1, width, dtype=torch.int32, device=device),
        total_D=width * num_features,
        max_D=width,
        hash_size_cumsum=F.pad(torch.tensor([len(matrix)], device=device), (num_features, 0)),  # one table for all
        total_hash_size_bits=len(matrix).bit_length(),
        indices=index,
        offsets=offsets,
        pooling_mode=SUM,
        indice_weights=None if weights is None else weights.float(),
        feature_requires_grad=None,
    )
    return out

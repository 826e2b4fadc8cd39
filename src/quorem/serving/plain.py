"""Models in plain torch operators, without quorem's own ops, for ``torch.export``.

Shapes: N ids, G features of a group, V ids of a jagged batch, B bags, W output columns of a table.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..models.network import Network
from ..store.model_file import tables_in
from ..tables import Tables
from .composition import ComposedVectors, composed, filled
from .groups import FeatureGroup, columns_in_order, groups_of, joined_tables
from .plain_rows import PlainRows, QuantizedRows, TensorOperators
from .signature import UnknownVector, compute_dtype, output_shape


class PlainTables(nn.Module):
    """The tables of a module: ``forward`` looks up ids ``[B, F]``, ``pool`` pools jagged ids."""

    def __init__(self, tables: Tables, unknown_vector: UnknownVector) -> None:
        super().__init__()
        self.num_features, self.unknown_vector = len(tables.features), unknown_vector
        self.mode, self.compute = getattr(tables, "mode", None), compute_dtype(tables)
        self.groups = groups_of(tables)
        joined = {each.name: each for group in self.groups for each in joined_tables(group)}
        self.names = list(joined)
        self.stored = nn.ModuleList(
            QuantizedRows(each, tables.width, tables.bits, self.compute)
            if each.tables[0].dtype == torch.uint8
            else PlainRows(each)
            for each in joined.values()
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors of ``ids`` ``[B, F]``, features in order: ``[B, sum W]``."""
        parts = []
        for group in self.groups:
            operators = self._operators(torch.arange(len(group.features), device=ids.device))
            vectors = filled(operators, composed(operators, ids[:, group.features], group), self.unknown_vector)
            parts.append(vectors.flatten(1))
        return self._ordered(parts)

    def pool(self, ids: Tensor, bag: Tensor, batch: int, weights: Tensor | None) -> Tensor:
        """Pooled vectors ``[B, sum W]`` of ids ``[V]``; ``bag`` is the bag of each id, numbered feature by feature.

        Ids past the last bag are ignored.
        """
        # A tensor, since torch.export takes the number to be over 1.
        size = torch.full((), batch, device=ids.device).clamp(min=1)
        feature = bag // size
        parts = []
        for group in self.groups:
            members = [group.features.index(f) if f in group.features else -1 for f in range(self.num_features)]
            member = torch.tensor(members, device=ids.device)[feature.clamp(max=self.num_features - 1)]
            inside = (feature < self.num_features) & (member >= 0)
            member = member.clamp(min=0)
            vectors = composed(self._operators(member), torch.where(inside, ids, 0), group)
            row = torch.where(inside, bag % size, batch)  # an extra row, for ids that are not of the group
            parts.append(self._pooled(group, vectors, (row, member), batch, weights).flatten(1))
        return self._ordered(parts)

    def _operators(self, member: Tensor) -> TensorOperators:
        return TensorOperators(dict(zip(self.names, self.stored, strict=True)), member, self.compute)

    def _pooled(
        self,
        group: FeatureGroup,
        looked_up: ComposedVectors,
        bag: tuple[Tensor, Tensor],
        batch: int,
        weights: Tensor | None,
    ) -> Tensor:
        """Pooled vectors ``[B, G, W]``; ``bag`` is the row and the feature of each id, and row B is dropped."""
        tables = len(group.features)

        def count(mask: Tensor) -> Tensor:
            zeros = looked_up.vectors.new_zeros(batch + 1, tables, 1)
            return zeros.index_put(bag, mask.to(zeros.dtype)[:, None], accumulate=True)[:-1]

        counted = torch.ones_like(bag[0], dtype=torch.bool) if looked_up.in_range is None else looked_up.in_range
        if looked_up.is_padding is not None:
            counted = counted & ~looked_up.is_padding
        start = -torch.inf if self.mode == "max" else 0.0
        vectors = torch.where(counted[:, None], looked_up.vectors, start)
        vectors = vectors if weights is None else vectors * weights[:, None]
        if self.mode == "max":  # only EmbeddingBag, which has one table
            lowest = vectors.new_full((batch + 1, group.width), start)
            pooled = lowest.scatter_reduce(0, bag[0][:, None].expand(vectors.shape), vectors, "amax")[:-1, None]
            pooled = torch.where(count(counted) > 0, pooled, 0.0)
        else:
            zeros = vectors.new_zeros(batch + 1, tables, group.width)
            pooled = zeros.index_put(bag, vectors, accumulate=True)[:-1]
        if self.mode == "mean":
            pooled = pooled / count(counted).clamp(min=1)
        if self.unknown_vector == "nan" and looked_up.in_range is not None:
            pooled = torch.where(count(~looked_up.in_range) > 0, torch.nan, pooled)
        return pooled

    def _ordered(self, parts: Sequence[Tensor]) -> Tensor:
        together, columns = torch.cat(list(parts), 1), columns_in_order(self.groups)
        return together if columns == sorted(columns) else together[:, columns]


class PlainModel(nn.Module):
    """A module or a network in plain operators; inputs and outputs are those of ``export_onnx``.

    Args:
        model: a module or network that ``save`` accepts.
        unknown: the vector of an id out of range, ``"nan"`` or ``"zeros"``.
        jagged: bags of any length, given by offsets.
    """

    def __init__(self, model: nn.Module, *, unknown: UnknownVector = "nan", jagged: bool = False) -> None:
        super().__init__()
        tables = tables_in(model)
        self.tables, self.jagged = PlainTables(tables, unknown), jagged
        self.is_bag, self.is_collection = isinstance(tables, EmbeddingBag), isinstance(tables, EmbeddingCollection)
        self.last_is_missing = isinstance(tables, EmbeddingBag) and not tables.include_last_offset
        self.shape = output_shape(tables)
        self.network: Network | None = None
        if isinstance(model, Network):  # a copy in one dtype, without its embeddings
            nothing: dict[int, object] = {id(model.embeddings): nn.Identity()}
            self.network = copy.deepcopy(model, nothing).to(compute_dtype(tables))

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Outputs by name.

        Args:
            inputs: dense features, if there is a network; ids; offsets, if ids are jagged; then sample weights, if
                these were exported.
        """
        given = list(inputs)
        dense = given.pop(0) if self.network is not None else None
        ids = given.pop(0)
        offsets = given.pop(0) if self.jagged else None
        vectors = self._vectors(ids, offsets, given.pop() if given else None)
        if dense is None or self.network is None:
            return {"vectors": vectors.reshape(vectors.shape[0], *self.shape)}
        logits = self.network.logits(dense, vectors.reshape(dense.shape[0], sum(self.network.embedding_dims)))
        return {"logits": logits, "probabilities": logits.sigmoid()}

    def _vectors(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if offsets is not None:
            if self.last_is_missing:
                offsets = torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
            batch = (offsets.shape[0] - 1) // self.tables.num_features
            bag = torch.searchsorted(offsets[1:], torch.arange(ids.shape[0], device=ids.device), right=True)
            return self.tables.pool(ids, bag, batch, weights)
        if self.is_bag:  # each row of ids is a bag
            rows, length = ids.shape
            bag = torch.arange(rows * length, device=ids.device) // torch.sym_max(length, 1)
            return self.tables.pool(ids.reshape(-1), bag, rows, None if weights is None else weights.reshape(-1))
        return self.tables(ids if self.is_collection else ids.reshape(-1, 1))

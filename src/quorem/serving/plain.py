"""Models in plain torch operators, without quorem's own ops, for ``torch.export``.

Shapes: N ids, G features of a group, V ids of a jagged batch, B bags, W output columns of a table.
"""

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..embeddings import Embedding
from ..models.network import Network
from ..store.model_file import tables_in
from ..tables import Tables
from .groups import UnknownVector, columns_in_order, compute_dtype, groups_of, output_shape
from .plain_groups import ComposedVectors, PlainGroup, constant


class PlainTables(nn.Module):
    """The tables of a module: ``forward`` looks up ids ``[B, F]``, ``bag`` pools jagged ids."""

    columns: Tensor | None

    def __init__(self, tables: Tables, unknown_vector: UnknownVector) -> None:
        super().__init__()
        self.num_features, self.unknown_vector = len(tables.features), unknown_vector
        self.compute = compute_dtype(tables)
        groups, shared_rows = groups_of(tables), dict[str, nn.Module]()
        self.groups = nn.ModuleList([PlainGroup(group, tables, shared_rows) for group in groups])
        columns = columns_in_order(groups)
        constant(self, "columns", None if columns == sorted(columns) else columns)
        for number, group in enumerate(groups):
            members = [group.features.index(f) if f in group.features else -1 for f in range(self.num_features)]
            constant(self, f"members_{number}", members)
            constant(self, f"features_{number}", group.features)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors of ``ids`` ``[B, F]``, features in order: ``[B, sum W]``."""
        parts = []
        for number, group in enumerate(self.groups):
            features = getattr(self, f"features_{number}")
            composed = group(ids[:, features], torch.arange(len(features), device=ids.device))
            fill = torch.nan if self.unknown_vector == "nan" else 0.0
            vectors = torch.where(composed.in_range[..., None], composed.vectors, fill)
            parts.append(torch.where(composed.is_padding[..., None], 0.0, vectors).flatten(1))
        return self._ordered(parts)

    def bag(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str) -> Tensor:
        """Pooled vectors ``[B, sum W]`` of jagged ``ids`` ``[V]``; ``offsets`` ``[F * B + 1]``, feature by feature."""
        batch = (offsets.shape[0] - 1) // self.num_features
        bag = torch.searchsorted(offsets[1:], torch.arange(ids.shape[0], device=ids.device), right=True)
        return self.pool(ids, bag, batch, weights, mode)

    def pool(self, ids: Tensor, bag: Tensor, batch: int, weights: Tensor | None, mode: str) -> Tensor:
        """Pooled vectors ``[B, sum W]`` of ids ``[V]``; ``bag`` is the bag of each id, numbered feature by feature.

        Ids past the last bag are ignored.
        """
        size = torch.full((), batch, device=ids.device).clamp(
            min=1
        )  # a tensor: torch.export takes a batch to be over 1
        feature = bag // size
        parts = []
        for number, group in enumerate(self._groups()):
            members = getattr(self, f"members_{number}")
            member = members[feature.clamp(max=self.num_features - 1)]
            inside = (feature < self.num_features) & (member >= 0)
            member = member.clamp(min=0)
            composed = group(torch.where(inside, ids, 0), member)
            row = torch.where(inside, bag % size, batch)  # an extra row, for ids that are not of the group
            parts.append(self._pooled(composed, (row, member), batch, weights, mode, group).flatten(1))
        return self._ordered(parts)

    def _pooled(
        self,
        composed: ComposedVectors,
        bag: tuple[Tensor, Tensor],
        batch: int,
        weights: Tensor | None,
        mode: str,
        group: PlainGroup,
    ) -> Tensor:
        """Pooled vectors ``[B, G, W]``; ``bag`` is the row and the feature of each id, and row B is dropped."""
        tables = len(group.features)

        def count(mask: Tensor) -> Tensor:
            zeros = composed.vectors.new_zeros(batch + 1, tables, 1)
            return zeros.index_put(bag, mask.to(self.compute)[:, None], accumulate=True)[:-1]

        counted = composed.in_range & ~composed.is_padding
        start = -torch.inf if mode == "max" else 0.0
        vectors = torch.where(counted[:, None], composed.vectors, start)
        vectors = vectors if weights is None else vectors * weights[:, None]
        if mode == "max":  # only EmbeddingBag, which has one table
            lowest = vectors.new_full((batch + 1, group.width), start)
            pooled = lowest.scatter_reduce(0, bag[0][:, None].expand(vectors.shape), vectors, "amax")[:-1, None]
            pooled = torch.where(count(counted) > 0, pooled, 0.0)
        else:
            zeros = vectors.new_zeros(batch + 1, tables, group.width)
            pooled = zeros.index_put(bag, vectors, accumulate=True)[:-1]
        if mode == "mean":
            pooled = pooled / count(counted).clamp(min=1)
        return torch.where(count(~composed.in_range) > 0, torch.nan, pooled) if self.unknown_vector == "nan" else pooled

    def _groups(self) -> list[PlainGroup]:
        return cast(list[PlainGroup], list(self.groups))

    def _ordered(self, parts: Sequence[Tensor]) -> Tensor:
        together = torch.cat(list(parts), 1)
        return together if self.columns is None else together[:, self.columns]


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
        self.mode = getattr(tables, "mode", None)
        self.rows_are_bags = isinstance(tables, EmbeddingBag) and not jagged
        self.last_is_missing = isinstance(tables, EmbeddingBag) and not tables.include_last_offset
        self.one_table = isinstance(tables, Embedding)
        self.shape = output_shape(tables)
        self.num_columns = sum(getattr(model, "embedding_dims", ()))
        self.network: Network | None = None
        if isinstance(model, Network):
            self.network = _layers_of(model, self.tables.compute)

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
        logits = self.network.logits(dense, vectors.reshape(dense.shape[0], self.num_columns))
        return {"logits": logits, "probabilities": logits.sigmoid()}

    def _vectors(self, ids: Tensor, offsets: Tensor | None, sample_weights: Tensor | None) -> Tensor:
        if self.rows_are_bags:
            weights = None if sample_weights is None else sample_weights.reshape(-1)
            rows, length = ids.shape
            bag = torch.arange(rows * length, device=ids.device) // torch.sym_max(length, 1)
            return self.tables.pool(ids.reshape(-1), bag, ids.shape[0], weights, str(self.mode))
        if offsets is not None:
            if self.last_is_missing:
                offsets = torch.cat([offsets, offsets.new_full((1,), ids.shape[0])])
            return self.tables.bag(ids, offsets, sample_weights, str(self.mode))
        return self.tables(ids.reshape(-1, 1) if self.one_table else ids)


def _layers_of(model: Network, compute: torch.dtype) -> Network:
    """A copy of a network in one dtype, without its embeddings."""
    nothing: dict[int, object] = {id(model.embeddings): nn.Identity()}
    return copy.deepcopy(model, nothing).to(compute)

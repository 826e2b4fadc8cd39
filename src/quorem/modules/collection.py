"""``EmbeddingCollection``: the tables of all features of a model, looked up in one op."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import InvalidIdMode, Pooling, check_choice, check_int, check_offsets, check_unique, is_exporting
from ..ops.rows import IdBatch
from .growth import grow_
from .lookup import Tables
from .table import Table as Table

ByFeature = Mapping[str, Tensor | tuple[Tensor, Tensor]]


class EmbeddingCollection(Tables):
    """All features' tables, any mix of schemes, in one storage and one lookup.

    Args:
        tables: the tables, in the order of the columns of ``ids``; a table with several features has one column for
            each.
        mode: how jagged input is pooled, ``"mean"`` or ``"sum"``.
        sparse: give ``stored`` a sparse gradient.
        on_invalid_id: what an id outside its table does on a GPU: ``"raise"`` (device assert), ``"warn"`` (count it,
            warn, and return zeros) or ``"trust"`` (return zeros silently). On a CPU it is always an IndexError.
        init_std: standard deviation of the initial vectors of every table; if None, ``1 / sqrt(3 n)``.
        device: where the tables are.
        dtype: float32, float64, bfloat16 or float16, for every table.

    Shape:
        Input: ids ``[B, F]``, or values ``[V]`` with offsets ``[F * B + 1]``, feature by feature as in TorchRec's
        KeyedJaggedTensor. Output: ``[B, F', D]``, where F' counts a feature K times if its scheme is feature
        generation; ``[B, sum D]`` where widths differ.

    >>> from quorem import QR
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 16)]
    >>> EmbeddingCollection(tables)(torch.tensor([[999, 0], [5, 6]])).shape
    torch.Size([2, 2, 16])
    """

    ids_argument = "ids"

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        mode: Pooling = "mean",
        sparse: bool = False,
        on_invalid_id: InvalidIdMode = "warn",
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(tables, Iterable):
            raise TypeError(f"tables ({type(tables).__name__}) must be a sequence of Table objects")
        tables = list(tables)
        if not tables:
            raise ValueError("tables must hold at least one Table")
        for table in tables:
            if not isinstance(table, Table):
                raise TypeError(f"tables ({table!r}) must be Table objects")
            if not table.name:
                raise ValueError("name of a table ('') must not be empty")
        check_unique("names", [table.name for table in tables])
        check_unique("features", [feature for table in tables for feature in table.features])
        check_choice("mode", mode, Pooling)
        super().__init__(
            tables, sparse=sparse, on_invalid_id=on_invalid_id, init_std=init_std, device=device, dtype=dtype
        )
        self.mode = mode
        specs = [self.specs[t] for t in self.table_of]
        self.embedding_dims = tuple(spec.embedding_dim for spec in specs for _ in range(spec.num_vectors))
        self._one_width = len(set(self.embedding_dims)) == 1

    def forward(
        self, ids: Tensor | ByFeature, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Composed vectors of every feature, pooled where the input is jagged.

        Args:
            ids: ``[B, F]``; values ``[V]`` with ``offsets``; or a mapping from each feature's name to ids ``[B]``, bags
                of one length ``[B, L]``, or a pair of values ``[V]`` and offsets ``[B + 1]``.
            offsets: where each bag starts, ``[F * B + 1]``, feature by feature.
            per_sample_weights: a weight for each of the values, in the order of the collection's features.

        Raises:
            ValueError: if shapes, offsets or names do not fit.
            TypeError: if ids or weights have the wrong dtype.
        """
        if not isinstance(ids, Tensor) and isinstance(ids, Mapping):  # the second takes longer
            if offsets is not None:
                raise ValueError("offsets must be None where ids are given by feature")
            ids, offsets = self._joined(ids)
        ids, features = self._checked(ids), len(self.features)
        if offsets is None:
            if ids.dim() != 2 or ids.shape[1] != features:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be [B, {features}] without offsets")
            if per_sample_weights is not None:
                raise ValueError("per_sample_weights must be None without offsets")
            out = self._vectors(IdBatch(ids))
        else:
            if ids.dim() != 1:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be 1-D with offsets")
            offsets = check_offsets(offsets, ids.shape[0])
            # Not while exporting: torch would make it a rule for sizes, with which AOTInductor rounds the batch size.
            if not is_exporting() and (offsets.shape[0] == 0 or (offsets.shape[0] - 1) % features):
                raise ValueError(f"offsets has {len(offsets)} entries but must have a multiple of {features} plus one")
            weights = self._sample_weights(per_sample_weights, ids)
            out = self._vectors(IdBatch(ids, offsets, weights, self.mode == "mean"))
        if not self._one_width:
            return out.flatten(1)
        shape = (out.shape[0], len(self.embedding_dims), self.embedding_dims[0])
        return out if out.shape == shape else out.view(shape)

    def _joined(self, ids: ByFeature) -> tuple[Tensor, Tensor | None]:
        """Ids by feature as one tensor ``[B, F]`` or, if some are bags, as values and offsets ``[F * B + 1]``."""
        if set(ids) != set(self.features):
            missing, extra = sorted(set(self.features) - set(ids)), sorted(set(ids) - set(self.features))
            raise ValueError(f"ids must hold each feature: missing {missing}, unknown {extra}")
        values, lengths = zip(
            *(self._bags(ids[feature], f"ids[{feature!r}]") for feature in self.features), strict=True
        )
        batch = len(lengths[0])
        for feature, bags in zip(self.features, lengths, strict=True):
            if len(bags) != batch:
                raise ValueError(f"ids[{feature!r}] has {len(bags)} bags but must have {batch}, as the others")
        if all(isinstance(column, Tensor) and column.dim() == 1 for column in ids.values()):
            return torch.stack(values, 1), None
        return torch.cat(values), F.pad(torch.cat(lengths).cumsum(0), (1, 0))

    def _bags(self, column: Tensor | tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
        """The values of one feature, and the length of each of its bags."""
        column, offsets = column if isinstance(column, tuple) and len(column) == 2 else (column, None)
        column = self._checked(column, name)
        if column.dim() not in ((1, 2) if offsets is None else (1,)):
            raise ValueError(
                f"{name} has shape {tuple(column.shape)} but must be [B], [B, L] or a pair of [V] and [B + 1]"
            )
        if offsets is None:
            length = 1 if column.dim() == 1 else column.shape[1]
            return column.flatten(), torch.full((len(column),), length, device=column.device)
        offsets = check_offsets(offsets, len(column), f"{name}[1]")
        if not len(offsets) or offsets[-1] != len(column):
            raise ValueError(f"{name}[1] must end with the number of values ({len(column)})")
        return column, offsets.diff()

    def grow_(self, table: str, n: int, *, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Add ids to one table, in place, as ``Embedding.grow_`` does.

        Args:
            table: name of the table.
            n: number of ids of the table afterwards.
            optimizer: the optimizer that updates the module; its state is extended by new rows in their initial state.

        Raises:
            ValueError: if there is no such table, or for a reason that ``Embedding.grow_`` lists.

        >>> tables = EmbeddingCollection([Table("user", 1000, 16), Table("day", 7, 16)])
        >>> tables.grow_("user", 1300).to_dense()["user"].shape
        torch.Size([1300, 16])
        """
        if table not in self.names:
            raise ValueError(f"table ({table!r}) must be one of {', '.join(map(repr, self.names))}")
        grow_(self, self.names.index(table), check_int("n", n), optimizer)
        return self

    def to_dense(self) -> dict[str, Tensor]:
        """The full table that each stored table represents, by name; differentiable."""
        return {name: self.dense(t) for t, name in enumerate(self.names)}

    def extra_repr(self) -> str:
        rows = [
            f"({name}): {spec.num_embeddings}, {spec.embedding_dim}, {spec.scheme}"
            for name, spec in zip(self.names, self.specs, strict=True)
        ]
        return "\n".join([*rows, f"compression={self.compression:.1f}"])

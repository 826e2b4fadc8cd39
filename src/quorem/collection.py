"""``EmbeddingCollection``: the tables of all features of a model, looked up in one op."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import (
    InvalidIdMode,
    Pooling,
    check_choice,
    check_ids,
    check_offsets,
    check_padding,
    check_sample_weights,
)
from .schemes import Full, Scheme, check_scheme
from .tables import Tables


@dataclass(frozen=True)
class Table:
    """One feature's table.

    Args:
        name: of the feature; names the table in ``state_dict`` and in errors.
        num_embeddings: number of ids, n.
        embedding_dim: width that comes out, D.
        scheme: how the table is stored.
        padding_idx: an id whose vector is zero and takes no gradient.

    >>> from quorem import QR
    >>> Table("user", 1000, 16, QR(num_collisions=4))
    Table(name='user', num_embeddings=1000, embedding_dim=16, scheme=QR(num_collisions=4), padding_idx=None)
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    scheme: Scheme = Full()  # noqa: RUF009 - a scheme is frozen
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        """Check the name and the scheme."""
        if not isinstance(self.name, str) or not self.name or "\n" in self.name:
            raise ValueError(f"name ({self.name!r}) must be a string of one line that is not empty")
        check_scheme(self.scheme)


class EmbeddingCollection(Tables):
    """All features' tables, any mix of schemes, in one storage and one lookup.

    Args:
        tables: one per feature, in the order of the ids' columns.
        mode: how jagged input is pooled, ``"mean"`` or ``"sum"``.
        sparse: give ``stored`` a sparse gradient.
        on_invalid_id: as in ``Embedding``.
        device: where the tables are.
        dtype: float32, float64, bfloat16 or float16, of every table.

    Shape:
        ids ``[B, F]``, or values ``[V]`` with offsets ``[F * B + 1]`` (feature by feature, as TorchRec's
        KeyedJaggedTensor has them); output ``[B, F', D]``, where feature generation turns one feature into K; or
        ``[B, sum D]`` where widths differ.

    >>> from quorem import QR
    >>> tables = [Table("user", 1000, 16, QR(num_collisions=4)), Table("day", 7, 16, Full())]
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not tables:
            raise ValueError("tables must hold at least one Table")
        for table in tables:
            if not isinstance(table, Table):
                raise TypeError(f"tables ({table!r}) must be Table objects")
        names = [table.name for table in tables]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"names of tables ({', '.join(map(repr, repeated))}) must be unique")
        check_choice("mode", mode, Pooling)
        specs = [table.scheme.spec(table.num_embeddings, table.embedding_dim) for table in tables]
        padding = [check_padding(table.padding_idx, table.num_embeddings) for table in tables]
        super().__init__(names, specs, padding, sparse=sparse, on_invalid_id=on_invalid_id, device=device, dtype=dtype)
        self.mode = mode
        self.embedding_dims = tuple(spec.embedding_dim for spec in specs for _ in range(spec.num_vectors))
        self._one_width = len(set(self.embedding_dims)) == 1

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError("a collection has no weight: stored holds every row, to_dense() gives each table")
        return super().__getattr__(name)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Composed vectors of every feature, pooled where the input is jagged.

        Raises:
            ValueError: if shapes or offsets do not fit.
            TypeError: if ids or weights have the wrong dtype.
        """
        check_ids(ids, "ids")
        features = len(self.names)
        if offsets is None:
            if ids.dim() != 2 or ids.shape[1] != features:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be [B, {features}] without offsets")
            if per_sample_weights is not None:
                raise ValueError("per_sample_weights must be None without offsets")
            out = self._lookup(ids)
        else:
            if ids.dim() != 1:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be 1-D with offsets")
            offsets = check_offsets(offsets, ids.shape[0])
            if offsets.shape[0] == 0 or (offsets.shape[0] - 1) % features:
                raise ValueError(f"offsets has {len(offsets)} entries but must have a multiple of {features} plus one")
            if per_sample_weights is not None:
                check_sample_weights(per_sample_weights, ids, "ids")
                per_sample_weights = per_sample_weights.to(self.stored.dtype)
            out = self._bag(ids, offsets, per_sample_weights, self.mode == "mean")
        if not self._one_width:
            return out.flatten(1)
        shape = (out.shape[0], len(self.embedding_dims), self.embedding_dims[0])
        return out if out.shape == shape else out.view(shape)

    def to_dense(self) -> dict[str, Tensor]:
        """The table that each feature stands for, by name; differentiable."""
        return {name: self.dense(f) for f, name in enumerate(self.names)}

    def extra_repr(self) -> str:
        """Each table's size and scheme."""
        rows = [
            f"({name}): {spec.num_embeddings}, {spec.embedding_dim}, {spec.scheme}"
            for name, spec in zip(self.names, self.specs, strict=True)
        ]
        return "\n".join([*rows, f"compression={self.compression:.1f}"])

"""``EmbeddingCollection``: the tables of all features of a model, looked up in one op."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import (
    InvalidIdMode,
    Pooling,
    check_choice,
    check_ids,
    check_int,
    check_offsets,
    check_sample_weights,
    check_unique,
    is_exporting,
)
from ..ops.rows import IdBatch
from ..paper.schemes import Full, Scheme, check_scheme
from ..paper.schemes.frequency import Ranking, check_ranking
from .growth import grow_
from .id_rules import UnknownIds
from .lookup import Tables
from .storage import TableOptions

ByFeature = Mapping[str, Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Table:
    """One table of an ``EmbeddingCollection``.

    Args:
        name: name of the table, in ``state_dict`` and in errors.
        num_embeddings: number of ids, n.
        embedding_dim: width of an output vector, D.
        scheme: how the table is stored.
        padding_idx: an id whose vector is zero and takes no gradient.
        features: names of the features that read this table; if empty, one feature with the table's name.
        frequencies: what a ``HotCold`` scheme ranks ids by: how often each id occurs, ``[n]``; ``schemes.Ranks``, the
            hot and cold ids themselves; or ``schemes.RawCounts``, how often raw ids occur.
        raw_ids: take any 64-bit id, as in ``Embedding``.
        unknown: how an id outside ``[0, n)`` is treated: ``"error"``, ``"rest"`` or ``"hash"``, as in ``Embedding``.

    >>> from quorem import QR
    >>> Table("user", 1000, 16, QR(num_collisions=4))
    Table(name='user', num_embeddings=1000, embedding_dim=16, scheme=QR(num_collisions=4), ...)
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    scheme: Scheme = Full()  # noqa: RUF009 - a scheme is frozen
    padding_idx: int | None = None
    features: tuple[str, ...] = ()
    frequencies: Ranking | None = field(default=None, compare=False, repr=False)
    raw_ids: bool = field(default=False, kw_only=True)
    unknown: UnknownIds = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        """Check the name and the scheme."""
        if not isinstance(self.name, str) or not self.name or "\n" in self.name:
            raise ValueError(f"name ({self.name!r}) must be a string of one line that is not empty")
        check_scheme(self.scheme)
        if not isinstance(self.features, list | tuple) or not all(isinstance(f, str) and f for f in self.features):
            raise TypeError(f"features ({self.features!r}) must be a tuple of names")
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if self.frequencies is not None:
            object.__setattr__(self, "frequencies", check_ranking(self.frequencies, self.num_embeddings))


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
        features = [(feature, t) for t, table in enumerate(tables) for feature in table.features]
        check_unique("names", [table.name for table in tables])
        check_unique("features", [feature for feature, _ in features])
        check_choice("mode", mode, Pooling)
        specs = [table.scheme.spec(table.num_embeddings, table.embedding_dim) for table in tables]
        stored = [
            TableOptions(table.name, spec, table.padding_idx, table.frequencies, table.raw_ids, table.unknown)
            for table, spec in zip(tables, specs, strict=True)
        ]
        super().__init__(
            stored,
            features=features,
            sparse=sparse,
            on_invalid_id=on_invalid_id,
            init_std=init_std,
            device=device,
            dtype=dtype,
        )
        self.mode = mode
        self.embedding_dims = tuple(specs[t].embedding_dim for t in self.table_of for _ in range(specs[t].num_vectors))
        self._one_width = len(set(self.embedding_dims)) == 1

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError("a collection has no weight: stored holds every row, to_dense() gives each table")
        return super().__getattr__(name)

    def forward(
        self,
        ids: Tensor | ByFeature,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
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
        if not isinstance(ids, Tensor) and isinstance(ids, Mapping):
            if offsets is not None:
                raise ValueError("offsets must be None where ids are given by feature")
            signed = {name: self._signed_column(name, column) for name, column in ids.items()}
            ids, offsets = by_feature(signed, self.features)
        ids = self._signed(ids)
        check_ids(ids, "ids")
        features = len(self.features)
        if offsets is None:
            if ids.dim() != 2 or ids.shape[1] != features:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be [B, {features}] without offsets")
            if per_sample_weights is not None:
                raise ValueError("per_sample_weights must be None without offsets")
            out = self._projected(ids) if self.narrow else self._lookup(IdBatch(ids))
        else:
            if ids.dim() != 1:
                raise ValueError(f"ids has shape {tuple(ids.shape)} but must be 1-D with offsets")
            offsets = check_offsets(offsets, ids.shape[0])
            # Not while exporting: torch would make it a rule for sizes, with which AOTInductor rounds the batch size.
            if not is_exporting() and (offsets.shape[0] == 0 or (offsets.shape[0] - 1) % features):
                raise ValueError(f"offsets has {len(offsets)} entries but must have a multiple of {features} plus one")
            if per_sample_weights is not None:
                check_sample_weights(per_sample_weights, ids, "ids")
                per_sample_weights = per_sample_weights.to(self.dtype)
            out = self._lookup(IdBatch(ids, offsets, per_sample_weights, self.mode == "mean"))
            out = self._project(out) if self.narrow else out
        if not self._one_width:
            return out.flatten(1)
        shape = (out.shape[0], len(self.embedding_dims), self.embedding_dims[0])
        return out if out.shape == shape else out.view(shape)

    def _signed_column(self, feature: str, column: Any) -> Any:
        if not isinstance(column, tuple):
            return self._signed(column)
        if len(column) != 2:
            raise ValueError(f"ids[{feature!r}] has {len(column)} entries but must be a pair of values and offsets")
        return self._signed(column[0]), column[1]

    def row_numbers(self, ids: Tensor) -> Tensor:
        """The rows of ``stored`` whose sum is the vector of each id, ``[B, F, K]``; -1 where there is no row.

        Args:
            ids: ``[B, F]``.

        Raises:
            ValueError: if a scheme does not add rows, or widths differ.

        >>> from quorem import QR
        >>> tables = [Table("user", 10, 4, QR(2, operation="add")), Table("day", 7, 4)]
        >>> EmbeddingCollection(tables).row_numbers(torch.tensor([[7, 0]]))
        tensor([[[ 2,  6],
                 [ 7, -1]]])
        """
        ids = self._signed(ids)
        check_ids(ids, "ids")
        if ids.dim() != 2 or ids.shape[1] != len(self.features):
            raise ValueError(f"ids has shape {tuple(ids.shape)} but must be [B, {len(self.features)}]")
        return self._row_numbers(ids)

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
        """Each table's size and scheme."""
        rows = [
            f"({name}): {spec.num_embeddings}, {spec.embedding_dim}, {spec.scheme}"
            for name, spec in zip(self.names, self.specs, strict=True)
        ]
        return "\n".join([*rows, f"compression={self.compression:.1f}"])


def by_feature(ids: ByFeature, features: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Ids given by feature, as one tensor ``[B, F]``, or, if some are bags, as values and offsets ``[F * B + 1]``.

    >>> by_feature({"b": torch.tensor([3, 4]), "a": torch.tensor([1, 2])}, ["a", "b"])
    (tensor([[1, 3],
            [2, 4]]), None)
    """
    if set(ids) != set(features):
        missing, extra = sorted(set(features) - set(ids)), sorted(set(ids) - set(features))
        raise ValueError(f"ids must hold the features {list(features)}: missing {missing}, unknown {extra}")
    bags = [_bags(ids[feature], f"ids[{feature!r}]") for feature in features]
    batch = len(bags[0][1])
    for feature, (_, lengths) in zip(features, bags, strict=True):
        if len(lengths) != batch:
            raise ValueError(f"ids[{feature!r}] has {len(lengths)} bags but must have {batch}, as the others")
    if all(isinstance(column, Tensor) and column.dim() == 1 for column in ids.values()):
        return torch.stack([values for values, _ in bags], 1), None
    counts = torch.cat([lengths for _, lengths in bags])
    return torch.cat([values for values, _ in bags]), F.pad(counts.cumsum(0), (1, 0))


def _bags(column: Tensor | tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The values of one feature, and the length of each of its bags."""
    if isinstance(column, tuple):
        values, offsets = column
        check_ids(values, f"{name}[0]")
        if values.dim() != 1:
            raise ValueError(f"{name}[0] has shape {tuple(values.shape)} but must be 1-D")
        offsets = check_offsets(offsets, len(values), f"{name}[1]")
        if not len(offsets) or offsets[-1] != len(values):
            raise ValueError(f"{name}[1] must end with the number of values ({len(values)})")
        return values, offsets.diff()
    check_ids(column, name)
    if column.dim() not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(column.shape)} but must be [B], [B, L] or a pair")
    length = 1 if column.dim() == 1 else column.shape[1]
    return column.flatten(), torch.full((len(column),), length, device=column.device)

"""One table of a saved model: its description in the file, and the spec that it describes.

The scheme is saved, and so are the partitions that it gave: a file never changes its meaning where a later version
chooses other sizes for a scheme. Index maps and lists of hot and cold ids are tensors of the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..modules.id_rules import UnknownIds
from ..modules.lookup import Tables
from ..paper import schemes
from ..paper.operations import Operation
from ..paper.partitions import ExplicitPartition, Partition
from ..paper.schemes import Custom, Full, HotCold, Ranks, Scheme, TableSpec


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """The description of one table."""

    name: str  # "" for the only table of a module
    features: tuple[str, ...]
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    raw_ids: bool
    unknown: UnknownIds
    ranked: bool  # whether the file has lists of its hot and cold ids
    scheme: dict[str, Any]
    operation: Operation
    partitions: tuple[tuple[int, int], ...]  # stride and size; the stride of an index map is 0
    permutation: tuple[int, int] | None  # multiplier and shift


@dataclass(frozen=True, repr=False)
class Known(Scheme):
    """A scheme that returns a given spec, so that a module's constructor uses that spec."""

    table: TableSpec | None = None

    def spec(self, n: int, d: int) -> TableSpec:
        """The given spec."""
        assert self.table is not None
        return self.table


def description_of(tables: Tables, t: int) -> SavedTable:
    """The description of table ``t`` of a module."""
    spec = tables.specs[t]
    return SavedTable(
        name=tables.names[t],
        features=tuple(tables.features_of(t)),
        num_embeddings=spec.num_embeddings,
        embedding_dim=spec.embedding_dim,
        padding_idx=tables.padding_ids[t],
        raw_ids=tables.raw_ids[t],
        unknown=tables.unknown[t],
        ranked=tables.ranks_of[t] is not None,
        scheme=schemes.to_dict(spec.scheme, with_partitions=False),
        operation=spec.operation,
        partitions=_integers(spec)[0],
        permutation=_integers(spec)[1],
    )


def lists_of(tables: Tables) -> dict[str, Tensor]:
    """The index maps, and lists of hot and cold ids, by the names that they have in the file."""
    lists: dict[str, Tensor] = {}
    for t, (spec, ranks) in enumerate(zip(tables.specs, tables.ranks_of, strict=True)):
        for j, partition in enumerate(spec.partitions):
            if isinstance(partition, ExplicitPartition):
                fits = partition.size <= torch.iinfo(torch.int32).max
                lists[f"maps.{t}.{j}"] = partition.index.to(torch.int32) if fits else partition.index
        if ranks is not None:
            lists |= {f"ranks.{t}.{kind}": ids for kind, ids in ranks._asdict().items()}
    return lists


def spec_of(table: SavedTable, t: int, tensors: Mapping[str, Tensor]) -> TableSpec:
    """The spec of the ``t``-th table, which ``description_of`` described.

    Raises:
        ValueError: if it does not describe a table.
    """
    title = f"table {table.name!r}" if table.name else "the table"
    partitions: list[Partition | ExplicitPartition] = []
    for j, (stride, size) in enumerate(table.partitions):
        index = tensors.get(f"maps.{t}.{j}")
        if stride == 0 and (index is None or index.is_floating_point() or index.dim() != 1):
            raise ValueError(f"maps.{t}.{j} of {title} must be a list of integers")
        partitions.append(Partition(stride, size) if index is None or stride else ExplicitPartition(index))
    scheme = schemes.from_dict(table.scheme, partitions or (Partition(1, 1),))
    spec = _unchecked(scheme).spec(table.num_embeddings, table.embedding_dim)
    spec = replace(spec, scheme=scheme, operation=table.operation if isinstance(scheme, Full) else spec.operation)
    if spec.fallback is not None or spec.operation != table.operation:
        raise ValueError(f"scheme ({scheme}) of {title} does not fit its sizes or its operation")
    if _integers(spec) != (table.partitions, table.permutation):
        saved, own = (table.partitions, table.permutation), _integers(spec)
        raise ValueError(f"{title} has partitions and permutation {saved} in the file and {own} by its scheme")
    return spec


def ranks_of(table: SavedTable, t: int, spec: TableSpec, tensors: Mapping[str, Tensor]) -> Ranks | None:
    """The lists of hot and cold ids of a table; None if it has none.

    Raises:
        ValueError: if they are missing, or the table cannot have any.
    """
    if not table.ranked:
        return None
    names = [f"ranks.{t}.{kind}" for kind in Ranks._fields]
    if not spec.num_own or not tensors.keys() >= set(names):
        rule = "it has no hot ids and no rest" if not spec.num_own else f"{' and '.join(names)} are not in the file"
        raise ValueError(f"ranked (True) of table {table.name!r} must be False: {rule}")
    return Ranks(*(tensors[name] for name in names))


def _integers(spec: TableSpec) -> tuple[tuple[tuple[int, int], ...], tuple[int, int] | None]:
    pairs = tuple((p.stride if isinstance(p, Partition) else 0, p.size) for p in spec.partitions)
    permutation = spec.permutation
    return pairs, None if permutation is None else (permutation.multiplier, permutation.shift)


def _unchecked(scheme: Scheme) -> Scheme:
    """The scheme, but its partitions are not checked again to be complementary, which takes memory for every id."""
    if isinstance(scheme, HotCold) and isinstance(scheme.cold, Scheme):
        return replace(scheme, cold=_unchecked(scheme.cold))
    return replace(scheme, check=False) if isinstance(scheme, Custom) else scheme

"""The tables to plan, grouped by the module that holds them or will hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.collection import Table
from ..modules.lookup import Tables
from ..paper.schemes.frequency import check_frequencies


@dataclass(frozen=True, eq=False)
class Module:
    """Tables that are, or will be, stored in one module, and how it is trained."""

    tables: tuple[Table, ...]  # whatever their schemes are
    dtype: torch.dtype
    sparse: bool
    copies: int = 1  # tied modules that hold the tables, each with a layout and lists of its own
    lags: bool = True  # whether rows may lag behind under Adam, as with quorem.optim; not with TorchRec's kernels
    row_multiple: int = 1  # the width of narrow rows must be a multiple of this: of 4 for TorchRec's kernels

    def widths(self, times_narrower: int, few: int) -> list[int]:
        """Width of the rows of each table that is to be so many times narrower.

        Rows have at least 2 numbers. A table of at most ``few`` ids, or one that would not shrink, its matrix counted,
        keeps its width.
        """
        dims = [table.embedding_dim for table in self.tables]
        common = gcd(*dims)
        if common % times_narrower or common // times_narrower < 2 or common // times_narrower % self.row_multiple:
            return dims
        widths = [(dim // times_narrower, table.num_embeddings) for dim, table in zip(dims, self.tables, strict=True)]
        return [d if n > few and n * d + d * dim < n * dim else dim for dim, (d, n) in zip(dims, widths, strict=True)]

    def with_frequencies(self, frequencies: Mapping[str, Tensor]) -> "Module":
        """The module with the given frequencies of its tables, checked; other tables keep those that they have."""
        tables = list(self.tables)
        for t, table in enumerate(tables):
            if (counts := frequencies.get(table.name)) is not None:
                counts = check_frequencies(counts, table.num_embeddings, f"frequencies[{table.name!r}]")
                tables[t] = replace(table, frequencies=counts)
        return replace(self, tables=tuple(tables))


def modules_of(model_or_tables: Any, dtype: torch.dtype = torch.float32) -> list[Module]:
    """The tables to plan, grouped by module; ``dtype`` is that of tables that are not in a module yet."""
    if isinstance(model_or_tables, nn.Module):
        holders: dict[int, list[tuple[str, Any]]] = {}  # by parameter, so that tied tables are planned once
        for path, module in model_or_tables.named_modules():
            is_full = isinstance(module, Tables) and all(map(module.is_full, range(len(module.specs))))
            if is_full or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                parameter = module.stored if is_full else module.weight
                holders.setdefault(id(parameter), []).append((path, module))
        return [module_of(*tied[0], copies=len(tied)) for tied in holders.values()]
    if not isinstance(model_or_tables, Sequence) or not all(isinstance(table, Table) for table in model_or_tables):
        kind = type(model_or_tables).__name__
        raise TypeError(f"model_or_tables ({kind}) must be an nn.Module or a list of quorem.Table")
    return [Module(tuple(model_or_tables), dtype, sparse=True)] if model_or_tables else []


def module_of(path: str, module: Any, *, copies: int = 1) -> Module:
    """An embedding of torch's, or a quorem module, as a module to plan; ``copies`` modules are tied to each other."""
    if not isinstance(module, Tables):
        tables = [Table(path or "embedding", module.num_embeddings, module.embedding_dim)]
        return Module(tuple(tables), module.weight.dtype, module.sparse, copies)
    tables = []
    for t, (name, spec) in enumerate(zip(module.names, module.specs, strict=True)):
        full_name = ".".join(filter(None, (path, name))) or "embedding"
        options: dict[str, Any] = {"raw_ids": module.raw_ids[t], "unknown": module.unknown[t]}
        features = tuple(filter(None, module.features_of(t)))
        tables.append(Table(full_name, spec.num_embeddings, spec.embedding_dim, features=features, **options))
    return Module(tuple(tables), module.stored.dtype, module.sparse, copies)

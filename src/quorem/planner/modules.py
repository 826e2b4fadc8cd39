"""The tables to plan, grouped by the module that holds them or will hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_int
from ..modules.collection import Table
from ..modules.lookup import Tables
from ..paper.schemes import Full, RawCounts
from ..paper.schemes.frequency import check_frequencies, counts_by_id


class TableToPlan(NamedTuple):
    """One table, and how often its ids occur."""

    name: str
    num_embeddings: int
    embedding_dim: int
    num_features: int = 1
    num_modules: int = 1  # tied modules that hold it, each with a layout and lists of its own
    frequencies: Tensor | None = None  # counts of all ids, or for raw ids of those that occur


@dataclass(frozen=True, eq=False)
class Module:
    """Tables that are, or will be, stored in one module, and how it is trained."""

    tables: tuple[TableToPlan, ...]
    dtype: torch.dtype
    sparse: bool
    has_id_rules: bool = False  # whether a table takes raw or unknown ids
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

    def row_dtype(self, dtypes: Sequence[torch.dtype], itemsize: int) -> torch.dtype:
        """The first of ``dtypes`` that has ``itemsize`` bytes, if that is allowed and narrower than the own dtype."""
        if self.dtype not in dtypes or itemsize >= self.dtype.itemsize:
            return self.dtype
        return next(dtype for dtype in dtypes if dtype.itemsize == itemsize)


def modules_of(model_or_tables: Any, dtype: torch.dtype = torch.float32) -> list[Module]:
    """The tables to plan, grouped by module; ``dtype`` is used for tables that are not in a module yet."""
    if isinstance(model_or_tables, nn.Module):
        return _modules_in(model_or_tables)
    if isinstance(model_or_tables, Mapping):
        modules: list[Module] = []
        together: list[Table] = []
        for name, entry in model_or_tables.items():
            if isinstance(entry, nn.Module):
                modules += _modules_in(entry, name)
            elif isinstance(entry, Table):
                together.append(replace(entry, name=name))
            elif isinstance(entry, tuple) and len(entry) == 2:
                together.append(
                    Table(name, check_int("num_embeddings", entry[0]), check_int("embedding_dim", entry[1]))
                )
            else:
                rule = "a module, a quorem.Table or a pair (num_embeddings, embedding_dim)"
                raise TypeError(f"model_or_tables[{name!r}] ({type(entry).__name__}) must be {rule}")
        return modules + _collection(together, dtype)
    if not isinstance(model_or_tables, Sequence) or not all(isinstance(table, Table) for table in model_or_tables):
        rule = "an nn.Module, a list of quorem.Table, or a mapping"
        raise TypeError(f"model_or_tables ({type(model_or_tables).__name__}) must be {rule}")
    return _collection(list(model_or_tables), dtype)


def _collection(tables: Sequence[Table], dtype: torch.dtype) -> list[Module]:
    """The tables as one module: a collection that will hold them, updated in the backward pass."""
    planned = (
        TableToPlan(table.name, table.num_embeddings, table.embedding_dim, len(table.features), 1, _counts(table))
        for table in tables
    )
    has_id_rules = any(table.raw_ids or table.unknown != "error" for table in tables)
    return [Module(tuple(planned), dtype, True, has_id_rules)] if tables else []


def _counts(table: Table) -> Tensor | None:
    """How often the ids of a table occur (of raw ids, only those that do); None where that is not known."""
    if isinstance(table.frequencies, RawCounts):
        return counts_by_id(table.frequencies, table.num_embeddings)[1]
    return table.frequencies if isinstance(table.frequencies, Tensor) else None


def held_by(module: Module, number: int) -> Module:
    """The tables as held by so many tied modules."""
    return replace(module, tables=tuple(table._replace(num_modules=number) for table in module.tables))


def joined_modules(modules: Sequence[Module], holders: Mapping[str, int]) -> list[Module]:
    """Join modules of one table each into one module where ``holders`` maps their tables to the same number.

    Such tables will be held by one collection of TorchRec's and updated in the backward pass, so they may share a pool.
    """
    joined: dict[Any, Module] = {}
    for module in modules:
        holder = holders.get(module.tables[0].name, module)
        if holder is not module:
            module = replace(module, row_multiple=max(4, module.row_multiple))
        if (first := joined.get(holder)) is not None:
            module = replace(first, tables=first.tables + module.tables, sparse=True, lags=False)
        joined[holder] = module
    return list(joined.values())


def _modules_in(model: nn.Module, prefix: str = "") -> list[Module]:
    modules: dict[int, Module] = {}  # by parameter, so that tied tables are planned once
    for path, module in model.named_modules(prefix=prefix):
        weight: Tensor
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            weight = module.weight
            tables = [TableToPlan(path or "embedding", module.num_embeddings, module.embedding_dim)]
        elif (
            isinstance(module, Tables)
            and not module.bits
            and not any(s.is_narrow or not isinstance(s.scheme, Full) for s in module.specs)
        ):
            weight, tables = module.stored, []
            for t, (name, spec) in enumerate(zip(module.names, module.specs, strict=True)):
                full_name = ".".join(filter(None, (path, name))) or "embedding"
                size = (spec.num_embeddings, spec.embedding_dim)
                tables.append(TableToPlan(full_name, *size, module.table_of.count(t)))
        else:
            continue
        has_id_rules = hasattr(module, "id_rules")
        if (first := modules.get(id(weight))) is not None:
            modules[id(weight)] = held_by(first, first.tables[0].num_modules + 1)
        else:
            modules[id(weight)] = Module(tuple(tables), weight.dtype, module.sparse, has_id_rules)
    return list(modules.values())


def with_frequencies(module: Module, frequencies: Mapping[str, Tensor]) -> Module:
    """The module with the given frequencies of its tables, checked; other tables keep the frequencies they have."""
    tables = []
    for table in module.tables:
        if table.name in frequencies:
            name = f"frequencies[{table.name!r}]"
            counts = check_frequencies(frequencies[table.name], table.num_embeddings, name)
            table = table._replace(frequencies=counts)
        tables.append(table)
    return replace(module, tables=tuple(tables))

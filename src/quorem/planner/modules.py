"""The tables to plan, grouped by the module that holds them or will hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_int
from ..collection import Table
from ..optimizer_names import Optimizer
from ..schemes import Full, RawCounts, Scheme
from ..schemes.frequency import check_frequencies, check_ranking, counts_by_id
from ..tables import Tables
from .footprint import TrainedStorage


@dataclass(frozen=True, eq=False)
class Module:
    """Tables that are, or will be, stored in one module, and how it is trained."""

    names: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]  # num_embeddings and embedding_dim of each table
    schemes: tuple[Scheme, ...]  # the schemes before planning
    num_features: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool
    frequencies: tuple[Tensor | None, ...]  # of each table: counts of all ids, or for raw ids of those that occur
    has_id_rules: bool = False  # whether a table takes raw or unknown ids


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
    if not tables:
        return []
    return [
        Module(
            tuple(table.name for table in tables),
            tuple((table.num_embeddings, table.embedding_dim) for table in tables),
            tuple(table.scheme for table in tables),
            tuple(len(table.features) for table in tables),
            dtype,
            True,
            tuple(map(_counts, tables)),
            any(table.raw_ids or table.unknown != "error" for table in tables),
        )
    ]


def _counts(table: Table) -> Tensor | None:
    """How often the ids of a table occur (of raw ids, only those that do); None where that is not known."""
    if isinstance(table.frequencies, RawCounts):
        counted = check_ranking(table.frequencies, table.num_embeddings)
        assert isinstance(counted, RawCounts)
        return counts_by_id(counted, table.num_embeddings)[1]
    return table.frequencies if isinstance(table.frequencies, Tensor) else None


def joined_modules(modules: Sequence[Module], holders: Mapping[str, int]) -> list[Module]:
    """Join modules of one table each into one module where ``holders`` maps their tables to the same number.

    Such tables will be held by one collection and updated in the backward pass, so they may share a pool.
    """
    joined: dict[Any, list[Module]] = {}
    for module in modules:
        joined.setdefault(holders.get(module.names[0], module.names), []).append(module)
    return [group[0] if len(group) == 1 else _joined(group) for group in joined.values()]


def _joined(modules: Sequence[Module]) -> Module:
    return Module(
        tuple(name for module in modules for name in module.names),
        tuple(size for module in modules for size in module.sizes),
        tuple(scheme for module in modules for scheme in module.schemes),
        tuple(count for module in modules for count in module.num_features),
        modules[0].dtype,
        True,
        tuple(counts for module in modules for counts in module.frequencies),
        any(module.has_id_rules for module in modules),
    )


def _modules_in(model: nn.Module, prefix: str = "") -> list[Module]:
    modules: dict[int, Module] = {}  # by parameter, so that tied tables are planned once
    for path, module in model.named_modules(prefix=prefix):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            weight: Tensor = module.weight
            size = (module.num_embeddings, module.embedding_dim)
            found = Module((path or "embedding",), (size,), (Full(),), (1,), weight.dtype, module.sparse, (None,))
        elif isinstance(module, Tables) and all(isinstance(spec.scheme, Full) for spec in module.specs):
            weight = module.stored
            found = Module(
                tuple(".".join(filter(None, (path, name))) or "embedding" for name in module.names),
                tuple((spec.num_embeddings, spec.embedding_dim) for spec in module.specs),
                tuple(spec.scheme for spec in module.specs),
                tuple(module.table_of.count(t) for t in range(len(module.names))),
                weight.dtype,
                module.sparse,
                (None,) * len(module.names),
            )
        else:
            continue
        modules.setdefault(id(weight), found)
    return list(modules.values())


def storage_of(module: Module, optimizer: Optimizer | None, bits: int = 0) -> TrainedStorage:
    """How the tables of a module are stored and trained."""
    widths = tuple(d for _, d in module.sizes)
    return TrainedStorage(
        widths, module.num_features, module.dtype, module.sparse, optimizer, bits, module.has_id_rules
    )


def with_frequencies(module: Module, frequencies: Mapping[str, Tensor]) -> Module:
    """The module with the given frequencies of its tables, checked; other tables keep the frequencies they have."""
    counts = list(module.frequencies)
    for t, (name, (n, _)) in enumerate(zip(module.names, module.sizes, strict=True)):
        if name in frequencies:
            counts[t] = check_frequencies(frequencies[name], n, f"frequencies[{name!r}]")
    return replace(module, frequencies=tuple(counts))

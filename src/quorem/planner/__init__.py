"""Fitting a budget: a scheme for each table, so that all of them, optimizer state included, take so many bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import DTYPES, check_int
from ..collection import Table
from ..schemes import Full, Scheme
from ..schemes.frequency import check_frequencies
from ..tables import Tables
from .allocate import allocate, hull
from .budget import parse_bytes, show_bytes
from .choices import MEANS, Choices, TableToPlan, joined
from .footprint import Optimizer, Rate, Storage, check_optimizer
from .planned import Plan, PlannedTable

__all__ = ["Plan", "PlannedTable", "plan"]

ROUNDED = 1e-3  # what a narrower dtype is taken to cost a table, in its traffic


@dataclass(frozen=True, eq=False)
class Module:
    """Tables that are, or will be, stored in one module, and how it is trained."""

    names: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]  # num_embeddings and embedding_dim of each table
    schemes: tuple[Scheme, ...]  # as they are now
    num_features: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool
    frequencies: tuple[Tensor | None, ...]


def plan(
    model_or_tables: nn.Module | Sequence[Table] | Mapping[str, Any],
    budget: int | str,
    *,
    optimizer: Optimizer | None = "adagrad",
    frequencies: Mapping[str, Tensor] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
) -> Plan:
    """A scheme for each table, so that all of them fit a budget and lose as little as they can.

    Small tables stay full; the others get rows by how much traffic they share (``quorem.planner.choices``): one large
    table and one small where the budget allows it, three or four equal ones below that. No table grows.

    Args:
        model_or_tables: a model, whose ``nn.Embedding``, ``nn.EmbeddingBag`` and full quorem tables are planned, named
            by their path, shared ones once; ``quorem.Table`` objects, which one collection is to hold; or, by name,
            either of these or a pair ``(num_embeddings, embedding_dim)``.
        budget: bytes, or a string such as ``"512MB"`` or ``"2GiB"``. Rows, maps, layouts and the optimizer's state
            count; the rest of the model does not.
        optimizer: whose state counts: ``"sgd"``, ``"momentum_sgd"``, ``"adagrad"``, ``"rowwise_adagrad"``,
            ``"adam"``, ``"amsgrad"`` or ``"adamw"``; None for the tables alone.
        frequencies: how often each id of a table occurs, ``[n]``, by name of the table.
        dtypes: that rows may have. A module keeps its own, unless that is among them and a narrower one loses less.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the budget is too small, with the smallest that is not; or an argument is out of range.

    >>> tables = [Table("user", 1_000_000, 16), Table("item", 50_000, 16), Table("country", 200, 16)]
    >>> wished = plan(tables, "16MB", optimizer="adagrad")
    >>> wished["country"], wished["user"], wished.bytes <= 16_000_000
    (Full(), QR(num_collisions=14), True)
    """
    modules = modules_of(model_or_tables, dtypes[0] if dtypes else torch.float32)
    if not modules:
        raise ValueError(f"model_or_tables ({type(model_or_tables).__name__}) must hold an embedding table")
    return plan_modules(modules, budget, optimizer=optimizer, frequencies=frequencies, dtypes=dtypes)


def plan_modules(
    modules: Sequence[Module],
    budget: int | str,
    *,
    optimizer: Optimizer | None,
    frequencies: Mapping[str, Tensor] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    reserved: int = 0,
) -> Plan:
    """``plan`` for tables by the module that holds them; ``reserved`` bytes of the budget are spent already."""
    size = parse_bytes(budget)
    check_optimizer(optimizer)
    if not dtypes or any(dtype not in DTYPES for dtype in dtypes):
        raise ValueError(f"dtypes ({tuple(dtypes)}) must be one or more of {', '.join(map(str, DTYPES))}")
    modules = [_with_frequencies(module, frequencies or {}) for module in modules]
    if unknown := sorted(set(frequencies or {}) - {name for module in modules for name in module.names}):
        raise ValueError(f"frequencies has no table to go with {', '.join(map(repr, unknown))}")
    plans, least = [], []
    for itemsize in sorted({dtype.itemsize for dtype in dtypes}, reverse=True):
        narrowed = [_narrowed(module, dtypes, itemsize) for module in modules]
        planned, fewest = _plan(modules, narrowed, size - reserved, optimizer)
        least.append(fewest + reserved)
        plans += [planned] if planned is not None else []
    if not plans:
        tables = f"{sum(len(module.names) for module in modules)} tables"
        state = "" if optimizer is None else f", {optimizer}'s state included"
        others = f" and {reserved} bytes that cannot be compressed" if reserved else ""
        raise ValueError(
            f"budget ({budget!r}) must be at least {min(least)} bytes ({show_bytes(min(least))})"
            f" for {tables}{others}{state}"
        )
    return min(plans, key=lambda planned: planned.cost)


def modules_of(model_or_tables: Any, dtype: torch.dtype = torch.float32) -> list[Module]:
    """The tables to plan, by the module that holds them; ``dtype`` is that of tables which have none yet."""
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
    """Tables that one collection is to hold, updated in the backward pass."""
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
            tuple(table.frequencies if isinstance(table.frequencies, Tensor) else None for table in tables),
        )
    ]


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


def _with_frequencies(module: Module, frequencies: Mapping[str, Tensor]) -> Module:
    counts = list(module.frequencies)
    for t, (name, (n, _)) in enumerate(zip(module.names, module.sizes, strict=True)):
        if name in frequencies:
            counts[t] = check_frequencies(frequencies[name], n, f"frequencies[{name!r}]")
    return replace(module, frequencies=tuple(counts))


def _narrowed(module: Module, dtypes: Sequence[torch.dtype], itemsize: int) -> Module:
    """With the first of ``dtypes`` of so many bytes, where that is narrower than what it has, and that is allowed."""
    if module.dtype not in dtypes or itemsize >= module.dtype.itemsize:
        return module
    return replace(module, dtype=next(dtype for dtype in dtypes if dtype.itemsize == itemsize))


@dataclass(frozen=True, eq=False)
class _Planned:
    """One table while it is planned. The corners are the choices on the hull, smallest first."""

    name: str
    size: tuple[int, int]
    rate: Rate
    choices: Choices
    corners: list[int]
    bytes: list[int]  # of each corner, with state
    cost: list[float]


def _plan(
    modules: Sequence[Module], narrowed: Sequence[Module], budget: int, optimizer: Optimizer | None
) -> tuple[Plan | None, int]:
    """The plan with these dtypes, if there is one, and the smallest budget that has one."""
    totals = [float(f.sum()) for module in modules for f in module.frequencies if f is not None]
    average = sum(totals) / len(totals) if totals else 1.0
    storages, planned, fixed = [], [], 0
    for module in narrowed:
        widths = tuple(d for _, d in module.sizes)
        storage = Storage(widths, module.num_features, module.dtype, module.sparse, optimizer)
        tables = [
            _choices_of(name, size, storage.rate(size[1]), counts, average)
            for name, size, counts in zip(module.names, module.sizes, module.frequencies, strict=True)
        ]
        storages.append(storage)
        planned.append(tables)
        fixed += sum(storage.fixed(max(int(table.choices.tables[table.corners[0]]) for table in tables)))
    every = [table for tables in planned for table in tables]
    least = fixed + sum(table.bytes[0] for table in every)
    if least > budget:
        return None, least
    corners = iter(allocate([t.bytes for t in every], [t.cost for t in every], budget - fixed))
    entries, shared, shared_state = [], 0, 0
    for before, module, storage, tables in zip(modules, narrowed, storages, planned, strict=True):
        taken = [table.corners[next(corners)] for table in tables]
        layout, state = storage.fixed(max(int(table.choices.tables[i]) for table, i in zip(tables, taken, strict=True)))
        shared, shared_state = shared + layout, shared_state + state
        for table, i in zip(tables, taken, strict=True):
            entries.append(_entry(table, i, module.dtype, before.dtype))
    return (
        Plan(
            tables=tuple(entries),
            budget=budget,
            optimizer=optimizer,
            shared_bytes=shared,
            shared_state_bytes=shared_state,
        ),
        least,
    )


def _choices_of(name: str, size: tuple[int, int], rate: Rate, counts: Tensor | None, average: float) -> _Planned:
    traffic = 1.0 if counts is None else float(counts.sum()) / average
    choices = joined([means(TableToPlan(*size, counts, traffic)) for means in MEANS], size[0])
    bytes_ = choices.rows * (rate.row + rate.row_state) + choices.tables * rate.table_state
    corners = hull(bytes_, choices.cost)
    return _Planned(name, size, rate, choices, corners, bytes_[corners].tolist(), choices.cost[corners].tolist())


def _entry(table: _Planned, i: int, dtype: torch.dtype, before: torch.dtype) -> PlannedTable:
    (n, d), rate, rows = table.size, table.rate, int(table.choices.rows[i])
    return PlannedTable(
        name=table.name,
        num_embeddings=n,
        embedding_dim=d,
        scheme=table.choices.scheme(i),
        dtype=dtype,
        bytes_before=n * d * before.itemsize,
        bytes=rows * rate.row,
        state_bytes=rows * rate.row_state + int(table.choices.tables[i]) * rate.table_state,
        cost=float(table.choices.cost[i]) + ROUNDED * (dtype != before),
        why=table.choices.why(i),
    )

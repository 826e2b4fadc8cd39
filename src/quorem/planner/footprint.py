"""The tables to plan, by the module that holds or will hold them, and the bytes that they and an optimizer take.

The bytes of a module are those of all its tensors: rows, lists of ids, matrices of narrow rows, and the integers of its
layout. The bytes of an optimizer are those of its state for the module's parameters. Tables with sparse gradients, or
updated within the backward pass, have the row-wise state of ``quorem.optim``; tables with dense gradients, and the
matrices of narrow rows, have that of ``torch.optim``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..modules import meaning
from ..modules.collection import Table
from ..modules.id_rules import IdRule
from ..modules.lookup import Tables
from ..ops import replay
from ..ops.codes import NARROW, code_bytes, stored_shape
from ..ops.layout import PART_COLUMNS, SLOT_COLUMNS
from ..ops.state import RULES, row_state_bytes
from ..optimizer_names import Optimizer, StateDtype
from ..paper.schemes import Scheme
from ..paper.schemes.frequency import check_frequencies
from .by_count import Integers
from .planned import PlannedTable


@dataclass(frozen=True, eq=False)
class Module:
    """Tables that are, or will be, stored in one module, and how it is trained."""

    tables: tuple[Table, ...]  # whatever their schemes are
    dtype: torch.dtype
    sparse: bool
    copies: int = 1  # tied modules that hold the tables, each with a layout and lists of its own
    lags: bool = True  # whether rows may lag behind under Adam, as with quorem.optim; not with TorchRec's kernels
    row_multiple: int = 1  # the width of narrow rows must be a multiple of this: of 4 for TorchRec's kernels

    @classmethod
    def of(cls, path: str, module: Any, *, copies: int = 1) -> "Module":
        """An embedding of torch's, or a quorem module, at ``path``; ``copies`` modules are tied to each other."""
        if not isinstance(module, Tables):
            table = Table(path or "embedding", module.num_embeddings, module.embedding_dim)
            return cls((table,), module.weight.dtype, module.sparse, copies)
        tables = []
        for t, (name, spec) in enumerate(zip(module.names, module.specs, strict=True)):
            full_name = ".".join(filter(None, (path, name))) or "embedding"
            options: dict[str, Any] = {"raw_ids": module.raw_ids[t], "unknown": module.unknown[t]}
            features = tuple(filter(None, module.features_of(t)))
            tables.append(Table(full_name, spec.num_embeddings, spec.embedding_dim, features=features, **options))
        return cls(tuple(tables), module.stored.dtype, module.sparse, copies)

    def widths(self, times_narrower: int, few: int) -> list[int]:
        """The width of each table's rows, if rows are to be ``times_narrower``; they have at least 2 numbers.

        A table keeps its width if it has at most ``few`` ids, or if narrow rows and their matrix would not be smaller.
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
                holders.setdefault(id(module.stored if is_full else module.weight), []).append((path, module))
        return [Module.of(*tied[0], copies=len(tied)) for tied in holders.values()]
    if not isinstance(model_or_tables, Sequence) or not all(isinstance(table, Table) for table in model_or_tables):
        kind = type(model_or_tables).__name__
        raise TypeError(f"model_or_tables ({kind}) must be an nn.Module or a list of quorem.Table")
    return [Module(tuple(model_or_tables), dtype, sparse=True)] if model_or_tables else []


@dataclass(frozen=True)
class StateBytes:
    """The bytes that an optimizer keeps for a parameter."""

    optimizer: Optimizer | None
    dtype: torch.dtype  # of the parameter
    sparse: bool  # whether its gradients are sparse, or taken in the backward pass
    lags: bool = True  # whether rows may lag behind, under an optimizer of ``quorem.optim``
    state_dtype: StateDtype = "float32"  # of rows that are updated one by one

    @property
    def by_row(self) -> bool:
        """Whether rows are updated one by one: always by an optimizer with such a ``state_dtype``."""
        return self.sparse or self.state_dtype != "float32"

    def row(self, width: int) -> int:
        """Bytes for a row of ``width`` numbers."""
        if self.optimizer is None:
            return 0
        if self.by_row:
            return row_state_bytes(self.optimizer, width, self.dtype, self.state_dtype, self.lags)
        return width * self.dtype.itemsize * len(RULES[self.optimizer].averages)

    def whole(self, numbers: int, dtype: torch.dtype | None = None) -> int:
        """Bytes for another parameter of so many numbers, which is updated as a whole: of a matrix or a network."""
        dense = replace(self, sparse=False, state_dtype="float32", dtype=dtype or self.dtype)
        return dense.row(numbers) + dense.shared

    @property
    def table(self) -> int:
        """Bytes for each stored table, beside its rows."""
        return 16 if self.optimizer is not None and self.by_row and RULES[self.optimizer].by_row else 0

    @property
    def shared(self) -> int:
        """Bytes for all rows together."""
        if self.optimizer is None:
            return 0
        if not self.by_row:
            return 4 if RULES[self.optimizer].averages else 0  # torch's step
        history = self.lags and RULES[self.optimizer].lags
        return 8 + (replay.history_bytes(self.optimizer, self.dtype) if history else 0)


class Form(NamedTuple):
    """How the numbers of rows are stored."""

    itemsize: int  # bytes of a number in training; modules whose dtype is narrower, or not to be changed, keep theirs
    state_dtype: StateDtype = "float32"
    bits: int = 0  # of a number after training; 0 keeps the dtype


@dataclass(frozen=True, eq=False)
class StoredModule:
    """The tables of one module, with rows of the given ``widths`` in one parameter, and the bytes that they take."""

    module: Module
    widths: list[int]
    state: StateBytes
    bits: int = 0  # as in ``Form``

    @cached_property
    def width(self) -> int:
        """Width of a row of the parameter that holds all tables."""
        return gcd(*self.widths)

    @cached_property
    def integer_bytes(self) -> int:
        """Bytes of an integer of the layout."""
        num_ids = sum(table.num_embeddings for table in self.module.tables)
        return 4 if num_ids * max(self.widths) // self.width < 2**31 else 8

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of the slots of the layout, without their parts."""
        return self.integer_bytes * SLOT_COLUMNS * self._num_slots

    @cached_property
    def _num_slots(self) -> int:
        return sum(len(t.features) * d // self.width for t, d in zip(self.module.tables, self.widths, strict=True))

    def row(self, width: int) -> int:
        """Bytes of a row of ``width`` numbers, without what rows share (``shared_by_rows``)."""
        if not self.bits:
            return width * self.state.dtype.itemsize
        size = code_bytes(self.width, self.bits) if self.width <= NARROW else stored_shape(1, self.width, self.bits)[1]
        return width // self.width * size

    def shared_by_rows(self, num_rows: int) -> int:
        """Bytes of so many rows of the least width that ``row`` leaves out: scales of narrow rows in few bits."""
        if not self.bits:
            return 0
        return prod(stored_shape(num_rows, self.width, self.bits)) - num_rows * self.row(self.width)

    def row_state(self, width: int) -> int:
        """Bytes of the state for such a row."""
        return width // self.width * self.state.row(self.width)

    def matrix(self, width: int, embedding_dim: int) -> tuple[int, int]:
        """Bytes of the matrix that turns narrow rows into vectors, and of the state for it."""
        if width == embedding_dim:
            return 0, 0
        itemsize = 2 if self.bits else self.state.dtype.itemsize  # ``quantize_`` rounds it to bfloat16
        return width * embedding_dim * itemsize, self.state.whole(width * embedding_dim)

    def layout(self, most_partitions: int) -> int:
        """Bytes of the integers by which lookups find rows, if an id reads from at most so many stored tables."""
        features = sum(len(table.features) for table in self.module.tables)
        parts = self.integer_bytes * (PART_COLUMNS * most_partitions * self._num_slots + 2 * features)
        of_meaning = 4 * meaning.COLUMNS * len(self.widths)
        has_rules = any(table.raw_ids or table.unknown != "error" for table in self.module.tables)
        rules = len(IdRule._fields) * features * has_rules
        return self.slot_bytes + parts + of_meaning + 8 * (rules + 1)  # 1: the count of invalid ids


class StoredModules:
    """The tables of all modules, in order, and the bytes that they take.

    ``dtypes`` are those that rows may have; ``times_narrower`` is D / d, where rows have d numbers instead of D; tables
    of at most ``few`` ids are never narrow.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        optimizer: Optimizer | None,
        form: Form,
        dtypes: Sequence[torch.dtype],
        times_narrower: int = 1,
        few: int = 0,
    ) -> None:
        self.options: dict[str, Any] = {"optimizer": optimizer, "state_dtype": form.state_dtype}  # of the plan
        self.options["bits"] = form.bits or None
        self.stored = []
        for module in modules:
            dtype = module.dtype
            if dtype in dtypes and form.itemsize < dtype.itemsize:
                dtype = next(each for each in dtypes if each.itemsize == form.itemsize)
            state = StateBytes(optimizer, dtype, module.sparse, module.lags, form.state_dtype)
            self.stored.append(StoredModule(module, module.widths(times_narrower, few), state, form.bits))
        self.tables = [table for module in modules for table in module.tables]
        self.module_numbers = np.repeat(np.arange(len(modules)), [len(module.tables) for module in modules])  # by table
        self.copies = np.array([module.copies for module in modules])
        self.of_table = [self.stored[m] for m in self.module_numbers.tolist()]
        self.widths = [width for each in self.stored for width in each.widths]
        pairs = list(zip(self.of_table, self.widths, strict=True))
        self.row_state = [each.row_state(width) for each, width in pairs]
        self.row = np.array([each.row(width) for each, width in pairs]) + self.row_state  # bytes, the state included
        self.table_state = np.array([each.state.table for each in self.of_table])
        self.matrices = [each.matrix(d, t.embedding_dim) for (each, d), t in zip(pairs, self.tables, strict=True)]
        self.matrix_bytes = sum(map(sum, self.matrices))

    def shared(self, partitions: Integers, rows: Sequence[int] | None = None) -> tuple[int, int]:
        """Bytes of the modules, and of the state, that belong to no single table.

        ``partitions`` is how many stored tables an id of each table reads. ``rows`` is how many rows of the least width
        each module has; it matters only where rows are in few bits.
        """
        most = np.zeros(len(self.stored), np.int64)
        np.maximum.at(most, self.module_numbers, partitions)
        layouts = np.array([each.layout(number) for each, number in zip(self.stored, most.tolist(), strict=True)])
        scales = sum(each.shared_by_rows(n) for each, n in zip(self.stored, rows, strict=True)) if rows else 0
        return int((layouts * self.copies).sum()) + scales, sum(each.state.shared for each in self.stored)

    def planned_table(
        self, t: int, scheme: Scheme, rows: int, stored_tables: int, *, list_bytes: int = 0, **more: Any
    ) -> PlannedTable:
        """The plan's entry for table ``t``, stored in so many rows and stored tables of its own."""
        table, module, (matrix, matrix_state) = self.tables[t], self.of_table[t], self.matrices[t]
        n, dim, width = table.num_embeddings, table.embedding_dim, self.widths[t]
        return PlannedTable(
            name=table.name,
            num_embeddings=n,
            embedding_dim=dim,
            scheme=replace(scheme, width=width) if width < dim else scheme,
            dtype=module.state.dtype,
            bytes_before=n * dim * module.module.dtype.itemsize,
            bytes=rows * module.row(width) + list_bytes + matrix,
            state_bytes=rows * self.row_state[t] + stored_tables * module.state.table + matrix_state,
            **more,
        )

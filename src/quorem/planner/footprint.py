"""The bytes that tables take in a module, and the bytes that an optimizer keeps for them.

The bytes of a module are those of all its tensors: rows, lists of ids, matrices of narrow rows, and the integers of its
layout. The bytes of an optimizer are those of its state for the module's parameters. Tables with sparse gradients, or
updated within the backward pass, have the row-wise state of ``quorem.optim``; tables with dense gradients, and the
matrices of narrow rows, have that of ``torch.optim``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from ..modules import meaning
from ..modules.id_rules import RULE_COLUMNS
from ..ops import replay
from ..ops.codes import row_bytes
from ..ops.layout import PART_COLUMNS, SLOT_COLUMNS
from ..ops.state import RULES, row_state_bytes
from ..optimizer_names import Optimizer, StateDtype
from ..paper.schemes import Scheme
from .by_count import Integers
from .modules import Module
from .planned import Plan, PlannedPool, PlannedTable


class Rate(NamedTuple):
    """Bytes that a table takes for each row and for each stored table."""

    row: int  # in the module, for each row
    row_state: int  # in the optimizer's state, for each row
    table_state: int  # in the optimizer's state, for each stored table


@dataclass(frozen=True)
class TrainedStorage:
    """How the tables of one module are stored and trained.

    Args:
        widths: width of the rows of each table.
        num_features: number of features that read each table.
        dtype: dtype of the rows.
        sparse: whether rows are updated one by one (sparse gradients, or in the backward pass).
        optimizer: the optimizer whose state counts; None for none.
        bits: bits of a stored number, where rows are quantized after training; else 0.
        has_id_rules: whether a table takes raw or unknown ids: then each feature has a rule (``modules.id_rules``).
        lags: whether rows may lag behind, under an optimizer of ``quorem.optim``.
        state_dtype: dtype of the optimizer's state of rows that are updated one by one.
        num_ids: of all tables.
    """

    widths: tuple[int, ...]
    num_features: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool
    optimizer: Optimizer | None
    bits: int = 0
    has_id_rules: bool = False
    lags: bool = True
    state_dtype: StateDtype = "float32"
    num_ids: int = 0

    @cached_property
    def width(self) -> int:
        """Width of a row of the parameter that holds all tables: the greatest common divisor of their widths."""
        return gcd(*self.widths)

    @cached_property
    def num_slots(self) -> int:
        """Number of slots of the layout."""
        return sum(f * d // self.width for f, d in zip(self.num_features, self.widths, strict=True))

    @cached_property
    def integer_bytes(self) -> int:
        """Bytes of an integer of the layout."""
        return 4 if self.num_ids * max(self.widths) < 2**31 else 8

    def rate(self, width: int) -> Rate:
        """The bytes of a table with rows of ``width`` numbers, for each row and each stored table."""
        number = self.dtype.itemsize
        rows = width // self.width  # rows of the parameter that make up one row of the table
        row = rows * row_bytes(self.width, self.bits) if self.bits else width * number
        if self.bits or self.optimizer is None:
            return Rate(row, 0, 0)
        rule = RULES[self.optimizer]
        if not self.sparse:  # the state of torch.optim
            return Rate(row, width * number * len(rule.averages), 0)
        row_state = row_state_bytes(self.optimizer, self.width, self.dtype, self.state_dtype, self.lags)
        return Rate(row, rows * row_state, 16 if rule.by_row else 0)

    def matrix(self, width: int, embedding_dim: int) -> Rate:
        """The bytes of the matrix that turns narrow rows into vectors; its state has a number for each of its own."""
        dense = replace(self, sparse=False, bits=0)
        row, row_state, _ = dense.rate(embedding_dim)
        return Rate(width * row, width * row_state, dense.shared_state())

    def shared_state(self) -> int:
        """Bytes of the optimizer's state that do not depend on the rows."""
        if self.optimizer is None:
            return 0
        if not self.sparse:
            return 4 if RULES[self.optimizer].averages else 0  # torch's step
        if not self.lags or not RULES[self.optimizer].lags:
            return 8
        return 8 + replay.history_bytes(self.optimizer, self.dtype)

    def layout(self, most_partitions: int) -> int:
        """Bytes of the integers by which lookups find rows, if an id reads from at most so many stored tables."""
        slots = self.num_slots
        per_slot = SLOT_COLUMNS + PART_COLUMNS * most_partitions
        per_table = meaning.COLUMNS + meaning.PART_COLUMNS * most_partitions
        features = sum(self.num_features)
        integers = slots * per_slot + per_table * len(self.widths) + 2 * features
        rules = RULE_COLUMNS * features if self.has_id_rules else 0
        return self.integer_bytes * integers + 8 * (rules + 1)  # 1: count of invalid ids


class Form(NamedTuple):
    """How the numbers of rows are stored."""

    itemsize: int  # bytes of a number in training; modules whose dtype is narrower, or not to be changed, keep theirs
    state_dtype: StateDtype = "float32"
    bits: int = 0  # of a number after training; 0 keeps the dtype


class StoredModules:
    """The tables of all modules, in order, and the bytes that they take.

    Args:
        modules: the modules before planning.
        optimizer: the optimizer whose state counts; None for none.
        form: how the numbers of rows are stored.
        dtypes: dtypes that rows may have.
        times_narrower: D / d, where rows have d numbers instead of D.
        few: ids of a table whose rows are never narrow.
    """

    def __init__(
        self,
        modules: Sequence[Module],
        optimizer: Optimizer | None,
        form: Form,
        dtypes: Sequence[torch.dtype] = (),
        times_narrower: int = 1,
        few: int = 0,
    ) -> None:
        self.modules, self.optimizer, self.form, self.times_narrower = modules, optimizer, form, times_narrower
        self.tables = [table for module in modules for table in module.tables]
        self.module_of = np.repeat(np.arange(len(modules)), [len(module.tables) for module in modules])
        widths = [module.widths(times_narrower, few) for module in modules]
        self.widths = [width for of_module in widths for width in of_module]
        self.storages = [
            TrainedStorage(
                tuple(of_module),
                tuple(table.num_features for table in module.tables),
                module.row_dtype(dtypes, form.itemsize),
                module.sparse,
                optimizer,
                form.bits,
                module.has_id_rules,
                module.lags,
                form.state_dtype if module.sparse else "float32",
                sum(table.num_embeddings for table in module.tables),
            )
            for module, of_module in zip(modules, widths, strict=True)
        ]
        self.rates, self.matrices = [], []
        for m, table, width in zip(self.module_of.tolist(), self.tables, self.widths, strict=True):
            storage, dim = self.storages[m], table.embedding_dim
            self.rates.append(storage.rate(width))
            self.matrices.append(storage.matrix(width, dim) if width < dim else Rate(0, 0, 0))
        self.row = np.array([rate.row + rate.row_state for rate in self.rates])  # bytes, the state included
        self.table_state = np.array([rate.table_state for rate in self.rates])
        self.matrix_bytes = sum(map(sum, self.matrices))

    def shared(self, partitions: Integers) -> tuple[int, int]:
        """Bytes of the modules, and of the state, that belong to no single table.

        Args:
            partitions: number of stored tables that an id of each table reads.
        """
        most = np.zeros(len(self.storages), np.int64)
        np.maximum.at(most, self.module_of, partitions)
        copies = [module.tables[0].num_modules for module in self.modules]
        triples = zip(self.storages, most.tolist(), copies, strict=True)
        layouts = [storage.layout(number) * copies for storage, number, copies in triples]
        return sum(layouts), sum(storage.shared_state() for storage in self.storages)

    def planned_table(
        self, t: int, scheme: Scheme, rows: int, stored_tables: int, *, list_bytes: int = 0, **more: Any
    ) -> PlannedTable:
        """The plan's entry for table ``t``, stored in so many rows and stored tables of its own."""
        table, rate, m, matrix = self.tables[t], self.rates[t], self.module_of[t], self.matrices[t]
        if self.widths[t] < table.embedding_dim:
            scheme = replace(scheme, width=self.widths[t])
        return PlannedTable(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            scheme=scheme,
            dtype=self.storages[m].dtype,
            bytes_before=table.num_embeddings * table.embedding_dim * self.modules[m].dtype.itemsize,
            bytes=rows * rate.row + list_bytes + matrix.row,
            state_bytes=rows * rate.row_state
            + stored_tables * rate.table_state
            + matrix.row_state
            + matrix.table_state,
            **more,
        )

    def plan(
        self,
        tables: Sequence[PlannedTable],
        budget: int,
        partitions: Integers,
        pools: Sequence[PlannedPool] = (),
        index_bytes: int = 0,
    ) -> Plan:
        """The plan of these tables; ``partitions`` is as in ``shared``, ``index_bytes`` those of indices over lists."""
        layout, state = self.shared(partitions)
        return Plan(
            tables=tuple(tables),
            budget=budget,
            optimizer=self.optimizer,
            state_dtype=self.form.state_dtype,
            shared_bytes=layout,
            index_bytes=index_bytes,
            shared_state_bytes=state,
            pools=tuple(pools),
            bits=self.form.bits or None,
        )

"""Bytes of tables that are stored in one module, and of the optimizer's state for them."""

from collections.abc import Sequence

import torch

from quorem import Table
from quorem.optimizer_names import Optimizer
from quorem.paper.schemes import TableSpec
from quorem.planner.footprint import Module, StateBytes, StoredModule


def table_bytes(specs: Sequence[TableSpec], optimizer: Optimizer) -> int:
    """Bytes of float32 tables of these specs, updated row by row, with the state of the optimizer.

    The specs must have closed-form partitions and must not concatenate, like those of the planner's choices.
    """
    tables = tuple(Table(str(t), spec.num_embeddings, spec.embedding_dim) for t, spec in enumerate(specs))
    state = StateBytes(optimizer, torch.float32, True)
    stored = StoredModule(Module(tables, torch.float32, True), [spec.width for spec in specs], state)
    size = stored.layout(max(len(spec.shapes) for spec in specs)) + state.shared
    for spec in specs:
        rows = sum(rows for rows, _ in spec.shapes)
        size += rows * (stored.row(spec.width) + stored.row_state(spec.width)) + len(spec.shapes) * state.table
        size += sum(stored.matrix(spec.width, spec.embedding_dim))
    return size

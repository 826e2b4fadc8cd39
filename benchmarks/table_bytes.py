"""Bytes of tables that are stored in one module, and of the optimizer's state for them."""

from collections.abc import Sequence

import torch

from quorem.optimizer_names import Optimizer
from quorem.paper.schemes import TableSpec
from quorem.planner.footprint import TrainedStorage


def table_bytes(specs: Sequence[TableSpec], optimizer: Optimizer) -> int:
    """Bytes of float32 tables of these specs, updated row by row, with the state of the optimizer.

    The specs must have closed-form partitions and must not concatenate, like those of the planner's choices.
    """
    widths = tuple(spec.width for spec in specs)
    storage = TrainedStorage(widths, (1,) * len(specs), torch.float32, True, optimizer)
    size = storage.layout(max(len(spec.shapes) for spec in specs)) + storage.shared_state()
    for spec in specs:
        rate, rows = storage.rate(spec.width), sum(rows for rows, _ in spec.shapes)
        size += rows * (rate.row + rate.row_state) + len(spec.shapes) * rate.table_state
        size += sum(storage.matrix(spec.width, spec.embedding_dim)) if spec.is_narrow else 0
    return size

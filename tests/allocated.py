"""Bytes of a module's tensors and of what an optimizer keeps for it, to hold plans to."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quorem import EmbeddingCollection, Plan, Table, optim, plan

SMALL = [Table("a", 5000, 16), Table("b", 300, 8), Table("c", 100_000, 4), Table("d", 5, 16), Table("e", 2000, 1)]
OPTIMIZERS = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "rowwise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "amsgrad": optim.AMSGrad,
    "adamw": optim.AdamW,
}


def built(planned: Plan, tables: list[Table], dtype: torch.dtype = torch.float32) -> EmbeddingCollection:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a table that stays full against the plan
        return EmbeddingCollection(planned.applied_to(tables), dtype=dtype)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def size_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def state_size(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer keeps for its parameters, by rows or not."""
    by_row = optimizer.live_state() if isinstance(optimizer, optim.RowOptimizer) else {}
    kept = [tensor for state in by_row.values() for tensor in state]
    kept += [tensor for p, state in optimizer.state.items() if p not in by_row for tensor in state.values()]
    return size_of([tensor for tensor in kept if tensor is not None])


def least_of(tables: nn.Module | list[Table], planned: Callable[..., Plan] = plan, **options: object) -> int:
    """The smallest possible budget, as the refusal of a smaller one says."""
    with pytest.raises(ValueError, match=r"must be at least \d+ bytes") as refusal:
        planned(tables, 1, **options)
    return int(re.search(r"at least (\d+)", str(refusal.value))[1])

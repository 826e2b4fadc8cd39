"""Bytes of a module's tensors and of what an optimizer keeps for it, to hold plans to."""

import torch
from torch import Tensor, nn

from quorem import Table, optim

SMALL = [Table("a", 5000, 16), Table("b", 300, 8), Table("c", 100_000, 4), Table("d", 5, 16), Table("e", 2000, 1)]
OPTIMIZERS = {
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
    "rowwise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "amsgrad": optim.AMSGrad,
    "adamw": optim.AdamW,
}


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

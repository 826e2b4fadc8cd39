"""A compressed model of torch.nn in two processes; ``modules/test_replicas.py`` starts them."""

import copy
import tempfile
from pathlib import Path

import replicas
import torch
import torch.distributed as dist
from foreign_model import KINDS, assert_equal, batch, facts_of, train, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from quorem.optim import Adam

STEPS = range(3)


def train_wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each process has batches of its own."""
    for step in STEPS:
        optimizer.zero_grad()
        model(*batch(100 + 2 * step + dist.get_rank())).square().mean().backward()
        optimizer.step()


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What ``train_wrapped`` must do, by one process: the mean of both gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in STEPS:
        losses = [model(*batch(100 + 2 * step + rank)).square().mean() for rank in range(2)]
        both = [[g.to_dense() for g in torch.autograd.grad(loss, parameters)] for loss in losses]
        for parameter, first, second in zip(parameters, *both, strict=True):
            parameter.grad = first / 2 + second / 2
        optimizer.step()


def adam(model: nn.Module) -> Adam:
    return Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)


def twins(kind: str, steps: int, sparse: bool) -> list[tuple[nn.Module, Adam]]:
    """A model and its twin that have trained some steps: rows that were not read lag behind."""
    with tempfile.TemporaryDirectory() as folder:
        model = trained(kind, Path(folder))
    pairs = []
    for each in (model, copy.deepcopy(model)):
        each.users.sparse = each.items.sparse = sparse
        pairs.append((each, adam(each)))
        train(*pairs[-1], range(steps))
    return pairs


def data_parallel(kind: str, steps: int) -> None:
    (model, ours), (twin, theirs) = twins(kind, steps, sparse=kind != "quantized")
    wrapped = DistributedDataParallel(model)
    assert_equal(model.state_dict(), twin.state_dict())
    train_wrapped(wrapped, ours)
    train_alone(twin, theirs)
    assert_equal(facts_of(model), facts_of(twin))


def sharded(kind: str, steps: int) -> None:
    """By ``fully_shard``, whose optimizer is made afterwards."""
    (model, _), (twin, _) = twins(kind, steps, sparse=False)
    replicas.shard_(model)
    whole = StateDictOptions(full_state_dict=True)
    assert_equal(get_model_state_dict(model, options=whole), twin.state_dict())
    train_wrapped(model, adam(model))
    train_alone(twin, adam(twin))
    assert_equal(get_model_state_dict(model, options=whole), twin.state_dict())
    assert torch.equal(model(*batch(99)), twin(*batch(99)))


def every_kind() -> None:
    for kind in KINDS:
        for steps in (0, 3):
            data_parallel(kind, steps)
            sharded(kind, steps)

"""Checkpoints by torch.distributed.checkpoint, and copies, between plans and numbers of ranks; cases for two ranks."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec_ranks
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_ranks import OPTIMIZERS, TINY, B, D, all_of, dense_optimizer, jagged, near, same_tables, shard, slope
from torchrec_tables import collection_of, expected

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection

TRAINED = [*torchrec_ranks.TABLES, quorem.Table("tiny", TINY, D)]
PLANS: dict[str, Callable[[Any], Any]] = {
    "planner": lambda module: integration.constraints(module, batch_size=B),
    "columns": lambda module: all_of(module, "column_wise"),
}


def trained_reference(kind: str, steps: int) -> tuple[quorem.EmbeddingCollection, torch.optim.Optimizer]:
    """A single-device collection after some steps on the batches of two ranks."""
    _, ours, options = OPTIMIZERS[kind]
    collection = collection_of(TRAINED, sparse=True)
    optimizer = ours(collection.parameters(), **options)
    go_on(collection, optimizer, range(steps))
    return collection, optimizer


def global_batch(step: int) -> KeyedJaggedTensor:
    """The batches of two ranks, one after the other."""
    names = [table.name for table in TRAINED]
    parts = [jagged(rank, step, names=names) for rank in range(2)]
    by_key = [[part[name] for part in parts] for name in names]
    return KeyedJaggedTensor(
        names,
        torch.cat([p.values() for group in by_key for p in group]),
        lengths=torch.cat([p.lengths() for group in by_key for p in group]),
    )


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on this rank's part of the global batches, or on all of it where there is one rank or none."""
    ranks = dist.get_world_size() if dist.is_initialized() and not isinstance(model, quorem.EmbeddingCollection) else 1
    for step in steps:
        names = [table.name for table in TRAINED]
        batch = global_batch(step) if ranks == 1 else jagged(dist.get_rank(), step, names=names)
        optimizer.zero_grad()
        out = expected(model, batch) if isinstance(model, quorem.EmbeddingCollection) else model(batch).values()
        full = slope(0, step, torch.Size([2 * B, out.shape[1]]))
        part = full if ranks == 1 else full[dist.get_rank() * B :][:B]
        ((out * part).sum() * ranks / 2).backward()  # TorchRec takes the mean over ranks
        optimizer.step()


def sharded_to_train(kind: str, plan: str) -> tuple[nn.Module, CombinedOptimizer]:
    """A sharded model of its own start, with the optimizers of tables, of networks and of matrices."""
    theirs, _, options = OPTIMIZERS[kind]
    module = EmbeddingBagCollection(TRAINED)
    apply_optimizer_in_backward(theirs, module.vectors.parameters(), dict(options))
    model = shard(module, PLANS[plan](module))
    whole = torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs
    return model, CombinedOptimizer([model.fused_optimizer, dense_optimizer(model, lambda p: whole(p, **options))])


def save(name: str, model: nn.Module, optimizer: CombinedOptimizer) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder_of(name))


def load(name: str, model: nn.Module, optimizer: CombinedOptimizer) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with torch.no_grad(), warnings.catch_warnings():
        dcp.load(state, checkpoint_id=folder_of(name))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def check_training(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, done: int, case: str) -> None:
    """The model goes on from ``done`` steps as the single-device collection does."""
    collection, its = trained_reference(kind, done)
    same_tables(model, collection, f"{case} {kind} loaded")
    go_on(model, optimizer, range(done, done + 2))
    go_on(collection, its, range(done, done + 2))
    same_tables(model, collection, f"{case} {kind} after")


def folder_of(name: str) -> Path:
    return Path(os.environ["CHECKPOINTS"]) / name


def save_on_two(rank: int) -> None:
    """Two ranks train, save, and load into other plans."""
    for kind, plans in {"adagrad": list(PLANS), "rowwise": ["planner"]}.items():
        model, optimizer = sharded_to_train(kind, "planner")
        integration.copy_state_(model, collection_of(TRAINED))
        go_on(model, optimizer, range(2))
        save(f"two-{kind}", model, optimizer)
        check_training(model, optimizer, kind, 2, "the saved")
        for plan in plans:
            other, its = sharded_to_train(kind, plan)
            load(f"two-{kind}", other, its)
            check_training(other, its, kind, 2, plan)


def load_from_one(rank: int) -> None:
    """What one rank saved goes on with two."""
    for kind in ("adagrad", "rowwise"):
        model, optimizer = sharded_to_train(kind, "planner")
        load(f"one-{kind}", model, optimizer)
        check_training(model, optimizer, kind, 4, "from one")


def copies(rank: int) -> None:
    """Weights from a single device to ranks and back, without a file."""
    collection, _ = trained_reference("sgd", 2)
    for plan in PLANS:
        model, optimizer = sharded_to_train("sgd", plan)
        integration.copy_state_(model, collection)
        check_training(model, optimizer, "sgd", 2, f"to {plan}")
        back, its = trained_reference("sgd", 0)
        integration.copy_state_(back, model)
        go_on(back, its, range(4, 5))
        wanted, _ = trained_reference("sgd", 5)
        near(back.state_dict(), wanted.state_dict(), f"back from {plan}")

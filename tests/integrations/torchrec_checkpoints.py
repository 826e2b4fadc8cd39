"""Checkpoints and copies between plans and numbers of ranks; cases for two ranks."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_ranks import (
    OPTIMIZERS,
    TABLES,
    TINY,
    B,
    D,
    all_of,
    expected,
    jagged,
    near,
    raises,
    reference,
    same_tables,
    shard,
    slope,
    updated,
)

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection

TRAINED = [*TABLES, quorem.Table("tiny", TINY, D)]


def trained_reference(kind: str, steps: int) -> tuple[quorem.EmbeddingCollection, torch.optim.Optimizer]:
    """A single-device collection after some steps on the batches of two ranks."""
    _, ours, options = OPTIMIZERS[kind]
    collection = reference(TRAINED, sparse=True)
    optimizer = ours(collection.parameters(), **options)
    go_on(collection, [optimizer], range(steps))
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


def go_on(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """Train on this rank's part of the global batches, or on all of it where there is one rank or none."""
    ranks = dist.get_world_size() if dist.is_initialized() and not isinstance(model, quorem.EmbeddingCollection) else 1
    for step in steps:
        names = [table.name for table in TRAINED]
        batch = global_batch(step) if ranks == 1 else jagged(dist.get_rank(), step, names=names)
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = expected(model, batch) if isinstance(model, quorem.EmbeddingCollection) else model(batch).values()
        full = slope(0, step, torch.Size([2 * B, out.shape[1]]))
        part = full if ranks == 1 else full[dist.get_rank() * B :][:B]
        ((out * part).sum() * ranks / 2).backward()  # TorchRec takes the mean over ranks
        for optimizer in optimizers:
            optimizer.step()


def sharded_to_train(kind: str, plan: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A sharded model of its own start, with its optimizers of networks and of replicated tables."""
    theirs, _, options = OPTIMIZERS[kind]
    module = EmbeddingBagCollection(TRAINED, num_shards=2 if plan == "shards" else None)
    apply_optimizer_in_backward(theirs, updated(module), dict(options))
    model = shard(module, PLANS[plan](module))
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    whole = torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs
    groups = [
        ({k: p for k, p in rest.items() if "compose." in k}, whole),
        ({k: p for k, p in rest.items() if "compose." not in k}, theirs),
    ]
    return model, [KeyedOptimizerWrapper(g, lambda p, c=c: c(p, **options)) for g, c in groups if g]


PLANS: dict[str, Callable[[Any], Any]] = {
    "planner": lambda module: integration.constraints(module, batch_size=B),
    "columns": lambda module: all_of(module, "column_wise", "column_wise"),
    "replicated": lambda module: all_of(module, "data_parallel", "row_wise"),
    "tables": lambda module: all_of(module, "table_wise", "table_wise"),
    "shards": lambda module: integration.constraints(module, batch_size=B),
}


def check_training(model: nn.Module, optimizers: list[torch.optim.Optimizer], kind: str, done: int, case: str) -> None:
    """The model goes on from ``done`` steps as the single-device collection does."""
    collection, optimizer = trained_reference(kind, done)
    same_tables(model, collection, f"{case} {kind} loaded")
    go_on(model, optimizers, range(done, done + 2))
    go_on(collection, [optimizer], range(done, done + 2))
    same_tables(model, collection, f"{case} {kind} after")


def checkpoint_folder(name: str) -> Path:
    return Path(sys.argv[1]).parent / name


def save_on_two(rank: int) -> None:
    """Two ranks train, save, and load into other plans; the replicated tables' optimizer state included."""
    for kind, plans in {"adagrad": list(PLANS), "rowwise": ["replicated", "shards"]}.items():
        model, optimizers = sharded_to_train(kind, "planner")
        integration.copy_state_(model, reference(TRAINED))
        go_on(model, optimizers, range(2))
        integration.save(checkpoint_folder(f"two-{kind}"), model, optimizers, step=2)
        check_training(model, optimizers, kind, 2, "the saved")
        for plan in plans:
            other, its = sharded_to_train(kind, plan)
            assert integration.load(checkpoint_folder(f"two-{kind}"), other, its) == 2
            check_training(other, its, kind, 2, plan)


def load_from_one(rank: int) -> None:
    """What one rank saved goes on with two."""
    for kind, plan in {"adagrad": "planner", "rowwise": "replicated"}.items():
        model, optimizers = sharded_to_train(kind, plan)
        assert integration.load(checkpoint_folder(f"one-{kind}"), model, optimizers) == 4
        check_training(model, optimizers, kind, 4, plan)


def refuse_columns(rank: int) -> None:
    """Row-wise Adagrad over shards of columns keeps numbers that no other plan has."""
    model, optimizers = sharded_to_train("rowwise", "columns")
    folder = checkpoint_folder("columns")
    raises(ValueError, "row-wise Adagrad over shards of columns", lambda: integration.save(folder, model, optimizers))


def copies(rank: int) -> None:
    """Weights and optimizer state from a single device to ranks and back, without a file."""
    for kind, plan in {"sgd": "planner", "adagrad": "replicated", "rowwise": "shards"}.items():
        collection, optimizer = trained_reference(kind, 2)
        model, optimizers = sharded_to_train(kind, plan)
        integration.copy_state_(model, collection, target_optimizers=optimizers, source_optimizers=[optimizer])
        check_training(model, optimizers, kind, 2, f"to {plan}")
        back, its = trained_reference(kind, 0)
        integration.copy_state_(back, model, target_optimizers=[its], source_optimizers=optimizers)
        go_on(back, [its], range(4, 5))
        wanted, _ = trained_reference(kind, 5)
        for name, value in back.state_dict().items():
            near(value, wanted.state_dict()[name], f"back from {plan} {kind} {name}")

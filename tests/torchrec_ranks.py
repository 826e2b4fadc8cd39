"""What two ranks do together: each case is run by both, and must leave both at the same point.

Started by ``test_torchrec_ranks.py`` as ``python torchrec_ranks.py FOLDER CASE ...``, once for each rank.
"""

import inspect
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="needs TorchRec: `make install`, or the line in docs/torchrec.md")

import oracles
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import quorem
from quorem.integrations import scale
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection
from quorem.partitions import ExplicitPartition, Partition

N, D, B = 90, 16, 4
TINY = 2  # ids of the table that is replicated
GROUPS = ExplicitPartition([i * i % 7 for i in range(N)])
SCHEMES = {
    "full": quorem.Full(),
    "hash": quorem.Hash(4),
    "add": quorem.QR(4, operation="add"),
    "add3": quorem.ChineseRemainder(3, operation="add", permute=1),
    "mult": quorem.QR(4),
    "mult3": quorem.Custom((Partition(1, 10), Partition(10, 9), GROUPS)),
    "concat": quorem.GeneralizedQR(2, operation="concat"),
    "feature": quorem.QR(4, operation="feature"),
    "path": quorem.Path(4, (8,), force=True),
}
POOL = quorem.Pool(40)
HOT = {
    "hot": quorem.HotCold(8, cold=POOL, num_rest=20),
    "hot2": quorem.HotCold(3, cold=POOL),
    "hot_mult": quorem.HotCold(8, cold=quorem.QR(4), num_rest=20),
}
FREQUENCIES = torch.arange(N) % 13
TABLES = [quorem.Table(n, N, D, s, padding_idx=5 if n[0] in "mp" else None) for n, s in SCHEMES.items()]
TABLES += [quorem.Table(n, N, D, s, frequencies=None if n == "hot" else FREQUENCIES) for n, s in HOT.items()]
NAMES = [table.name for table in TABLES]
CPU = torch.device("cpu")


def reference(tables: list[quorem.Table] = TABLES, **options: Any) -> quorem.EmbeddingCollection:
    """A single-device collection, the same on every rank."""
    made = quorem.EmbeddingCollection(tables, **{"mode": "sum", **options})
    oracles.fill_(made)
    return made


def jagged(
    rank: int, step: int = 0, batch: int = B, names: list[str] = NAMES, weighted: bool = False
) -> KeyedJaggedTensor:
    """A rank's batch: zero to three ids in each bag."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(names) * batch,), generator=draw)
    sizes = torch.tensor([TINY if name == "tiny" else N for name in names]).repeat_interleave(batch)
    ids = torch.randint(0, N, (int(lengths.sum()),), generator=draw) % sizes.repeat_interleave(lengths)
    weights = torch.rand(ids.shape, generator=draw) if weighted else None
    return KeyedJaggedTensor(names, ids, lengths=lengths, weights=weights, stride=batch)


def slope(rank: int, step: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank + 50))


def expected(collection: quorem.EmbeddingCollection, features: KeyedJaggedTensor) -> Tensor:
    offsets = F.pad(features.lengths().cumsum(0), (1, 0))
    return collection(features.values(), offsets, features.weights_or_none()).flatten(1)


def near(actual: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


def same_tables(sharded: nn.Module, collection: quorem.EmbeddingCollection, case: str) -> None:
    wanted = collection.state_dict()
    for name, value in integration.to_collection(sharded).state_dict().items():
        near(value, wanted[name], f"{case} {name}")


def shard(module: nn.Module, constraints: Mapping[str, ParameterConstraints]) -> DistributedModelParallel:
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=dict(constraints), batch_size=B)
    plan = planner.collective_plan(module, get_default_sharders(), dist.group.WORLD)
    return DistributedModelParallel(module, plan=plan, device=CPU)


def all_of(module: Any, bags: str, vectors: str) -> dict[str, ParameterConstraints]:
    """Constraints that shard every pooled table in one way, and every unpooled one in another."""
    tables = {} if getattr(module, "bags", None) is None else dict.fromkeys(module.bags.embedding_bags, bags)
    tables |= {name: vectors for group in module.vectors for name in group.embeddings}
    return {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in tables.items()}


def dense_optimizer(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """For what is not updated in the backward pass: networks, and tables that are replicated."""
    return KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)


def step_of_both(rank: int, model: nn.Module, collection: quorem.EmbeddingCollection, step: int = 0, **options: Any):
    """Backward on this rank's batch, and on all ranks' batches by the single-device collection; their outputs too."""
    features = jagged(rank, step, **options)
    out = model(features).values()
    near(out, expected(collection, features), f"output of step {step}")
    (out * slope(rank, step, out.shape)).sum().backward()
    loss = torch.zeros(())
    for r in range(dist.get_world_size()):
        wanted = expected(collection, jagged(r, step, **options))
        loss = loss + (wanted * slope(r, step, wanted.shape)).sum() / dist.get_world_size()
    loss.backward()


def sharded_with_sgd(module: Any, collection: quorem.EmbeddingCollection, bags: str, vectors: str) -> nn.Module:
    tables = [*module.vectors.parameters(), *([] if module.bags is None else module.bags.parameters())]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.5})
    model = shard(module, all_of(module, bags, vectors))
    integration.copy_state_(model, collection)
    return model


TYPES = {
    "data_parallel": ("data_parallel", "table_wise"),
    "table_wise": ("table_wise", "table_wise"),
    "column_wise": ("column_wise", "column_wise"),
    "table_column_wise": ("table_column_wise", "column_wise"),
    "row_wise": ("table_wise", "row_wise"),
}


def every_type(rank: int) -> None:
    """Outputs, gradients and one update of every scheme under every sharding type that there is on the CPU."""
    for kind, (bags, vectors) in TYPES.items():
        collection = reference()
        model = sharded_with_sgd(EmbeddingBagCollection(TABLES), collection, bags, vectors)
        assert model(jagged(rank)).keys() == NAMES
        optimizers = [dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.5))]
        optimizers.append(torch.optim.SGD(collection.parameters(), lr=0.5))
        step_of_both(rank, model, collection)
        for optimizer in optimizers:
            optimizer.step()
        same_tables(model, collection, kind)


def sums(rank: int) -> None:
    """Where TorchRec pools all features, only their order is left to do."""
    tables = [table for table in TABLES if table.name in ("add3", "full", "hot2", "concat", "add", "hot", "hash")][::-1]
    names = [table.name for table in tables]
    collection = reference(tables)
    model = sharded_with_sgd(EmbeddingBagCollection(tables), collection, "table_wise", "table_wise")
    optimizer = torch.optim.SGD(collection.parameters(), lr=0.5)
    step_of_both(rank, model, collection, names=names)
    optimizer.step()
    same_tables(model, collection, "sums")


def unpooled(rank: int) -> None:
    """Vectors of every scheme, and their gradients."""
    for kind in ("table_wise", "column_wise", "row_wise"):
        collection = reference()
        module = EmbeddingCollection(TABLES)
        apply_optimizer_in_backward(torch.optim.SGD, module.vectors.parameters(), {"lr": 0.5})
        model = shard(module, all_of(module, "", kind))
        integration.copy_state_(model, collection)
        optimizers = [dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.5))]
        optimizers.append(torch.optim.SGD(collection.parameters(), lr=0.5))
        features = jagged(rank)
        out = model(features)
        assert list(out) == NAMES
        for f, name in enumerate(NAMES):
            near(out[name].values(), collection.dense(f).flatten(1)[features[name].values()], name)
            assert torch.equal(out[name].lengths(), features[name].lengths())
        vectors = torch.cat([out[name].values().flatten() for name in NAMES])
        (vectors * slope(rank, 0, vectors.shape)).sum().backward()
        for r in range(2):
            other = jagged(r)
            parts = [collection.dense(f)[other[name].values()].flatten() for f, name in enumerate(NAMES)]
            wanted = torch.cat(parts)
            ((wanted * slope(r, 0, wanted.shape)).sum() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        same_tables(model, collection, kind)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, quorem.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, quorem.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
    "rowwise": (RowWiseAdagrad, quorem.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
}


def optimizers(rank: int) -> None:
    """Three steps of each optimizer in TorchRec's backward pass, under the plan that its planner makes."""
    tables = [*TABLES, quorem.Table("tiny", TINY, D)]
    names = [table.name for table in tables]
    for name, (theirs, ours, options) in OPTIMIZERS.items():
        collection = reference(tables, sparse=True)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(theirs, [*module.bags.parameters(), *module.vectors.parameters()], dict(options))
        model = shard(module, integration.constraints(module, batch_size=B))
        kinds = {table: plan.sharding_type for group in model.plan.plan.values() for table, plan in group.items()}
        assert {table for table, kind in kinds.items() if kind == "data_parallel"} == {"tiny"}, kinds
        integration.copy_state_(model, collection)
        replicated, networks = [], []
        for key, parameter in in_backward_optimizer_filter(model.named_parameters()):
            (networks if "paths" in key else replicated).append(parameter)
        whole = torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs  # as quorem.optim does for networks
        both = [theirs(replicated, **options), whole(networks, **options), ours(collection.parameters(), **options)]
        for step in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            step_of_both(rank, model, collection, step, names=names)
            for optimizer in both:
                optimizer.step()
        same_tables(model, collection, name)


def odd_batches(rank: int) -> None:
    """Batches of other sizes, an empty one, keys in another order, features without ids, weights, the mean."""
    collection = reference()
    model = sharded_with_sgd(EmbeddingBagCollection(TABLES), collection, "table_wise", "row_wise")
    for step, sizes in enumerate([(3, 5), (1, 0), (0, 2), (0, 0), (4, 4)]):
        names = NAMES if step % 2 == rank else NAMES[::-1]
        drawn = jagged(rank, step, batch=sizes[rank], names=names)
        drawn = KeyedJaggedTensor(names, drawn.values().int() if rank else drawn.values(), lengths=drawn.lengths())
        lengths = drawn.lengths() * (0 if step == 4 and rank else 1)
        features = KeyedJaggedTensor(names, drawn.values()[: int(lengths.sum())], lengths=lengths, stride=sizes[rank])
        in_order = [features[name] for name in NAMES] if sizes[rank] else []
        out = model(features)
        assert out.keys() == NAMES and out.values().shape == (sizes[rank], (len(NAMES) + 1) * D)
        if in_order:
            ids, lengths = torch.cat([p.values() for p in in_order]), torch.cat([p.lengths() for p in in_order])
            near(out.values(), collection(ids, F.pad(lengths.cumsum(0), (1, 0))).flatten(1), f"sizes {sizes}")
    for mode in ("sum", "mean"):
        collection = reference(mode=mode)
        module = EmbeddingBagCollection(TABLES, mode=mode, is_weighted=True)
        model = sharded_with_sgd(module, collection, "column_wise", "table_wise")
        step_of_both(rank, model, collection, weighted=True)
        torch.optim.SGD(collection.parameters(), lr=0.5).step()
        dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.5)).step()
        same_tables(model, collection, mode)


def refused(rank: int) -> None:
    """An id out of range raises on its rank, and replicated unpooled tables on the CPU on all."""
    module = EmbeddingBagCollection(TABLES)
    model = shard(module, all_of(module, "data_parallel", "data_parallel"))
    raises(RuntimeError, "are replicated on the CPU, where FBGEMM would pool", lambda: model(jagged(rank)))
    vectors = EmbeddingCollection(TABLES)
    sharded = shard(vectors, all_of(vectors, "", "data_parallel"))
    raises(RuntimeError, "are replicated on the CPU, where FBGEMM would pool", lambda: sharded(jagged(rank)))
    module = EmbeddingBagCollection(TABLES)
    model = shard(module, integration.constraints(module, batch_size=B))
    ids = torch.full((len(NAMES),), N)
    features = KeyedJaggedTensor(NAMES, ids, lengths=torch.ones_like(ids))
    raises(IndexError, f"id {N} is outside [0, {N}) of table full", lambda: model(features))


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def starts(rank: int) -> None:
    """Shards of rows or columns and whole tables start in the interval of their partition, from the meta device too."""
    tables = [
        quorem.Table("add", 1000, D, quorem.QR(10, operation="add")),
        quorem.Table("mult", 1000, D, quorem.QR(10)),
    ]
    bound = (1 / 1000) ** 0.5
    for device in ("cpu", "meta"):
        for kind in ("row_wise", "column_wise", "table_wise"):
            module = EmbeddingCollection(tables, device=device)
            made = dict(integration.to_collection(shard(module, all_of(module, "", kind))).named_tables())
            spans = {name: float(table.max() - table.min()) / 2 for name, table in made.items()}
            wanted = {
                "tables.add.0": bound,
                "tables.add.1": 0.01 * bound,
                "tables.mult.0": bound,
                "tables.mult.1": 0.01,
            }
            for name, span in wanted.items():
                assert 0.85 * span < spans[name] <= 1.001 * span, (device, kind, name, spans[name], span)
            assert abs(float(made["tables.mult.1"].mean()) - 1) < 0.01


@dataclass
class Batch(Pipelineable):
    """What a training pipeline copies to the device ahead of time."""

    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)


class Scores(nn.Module):
    """A model as pipelines want it: a batch in, a loss and outputs out."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.top = nn.Linear((len(NAMES) + 1) * D, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scores = self.top(self.bags(batch.features).values())
        return scores.square().mean(), scores


def pipeline(rank: int) -> None:
    """``TrainPipelineSparseDist`` maps and sends the ids of the next batch ahead, and trains to the same losses."""
    losses = {}
    for ahead in (False, True):
        torch.manual_seed(0)
        module = Scores(EmbeddingBagCollection(TABLES))
        tables = [*module.bags.bags.parameters(), *module.bags.vectors.parameters()]
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.01})
        model = shard(module, all_of(module.bags, "table_wise", "row_wise"))
        integration.copy_state_(model.module.bags, reference())
        optimizer = dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.01))
        batches = [Batch(jagged(rank, step)) for step in range(5)]
        if ahead:
            trainer = TrainPipelineSparseDist(model, optimizer, CPU, pipeline_postproc=True)
            source = iter(batches)
            losses[ahead] = [float(trainer.progress(source).square().mean()) for _ in batches]
            assert [module.fqn for module in trainer._pipelined_postprocs] == ["bags.rows"]
            assert len(trainer._pipelined_modules) == 2  # the pooled tables and the unpooled ones
        else:
            losses[ahead] = []
            for batch in batches:
                optimizer.zero_grad()
                loss, _ = model(batch)
                loss.backward()
                optimizer.step()
                losses[ahead].append(float(loss.detach()))
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5, atol=1e-6)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Counts the bytes that this rank hands to all-to-alls for other ranks, call by call."""
    sent: list[int] = []
    all_to_all = dist.all_to_all_single

    def counted(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(all_to_all).bind(*arguments, **options).arguments
        sizes = given.get("input_split_sizes")
        share = 1 / dist.get_world_size() if not sizes else sizes[dist.get_rank()] / max(sum(sizes), 1)
        sent.append(round(given["input"].nbytes * (1 - share)))
        return all_to_all(*arguments, **options)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = all_to_all


def sent_bytes(rank: int) -> None:
    """The bytes of a step are those of the calculator, where ids follow Zipf's law."""
    n, batch = 4000, 512
    schemes = {
        "full": quorem.Full(),
        "add": quorem.QR(8, operation="add"),
        "concat": quorem.QR(8, operation="concat"),
        "mult": quorem.QR(8),
        "path": quorem.Path(8, ()),
        "hot": quorem.HotCold(200, cold=quorem.Pool(200), num_rest=1000),
        "hot2": quorem.HotCold(100, cold=quorem.Pool(200)),
    }
    tables = [quorem.Table(name, n, D, scheme) for name, scheme in schemes.items()]
    module = EmbeddingBagCollection(tables)
    model = shard(module, all_of(module, "table_wise", "table_wise"))
    draw = torch.Generator().manual_seed(rank)
    ids = (torch.rand(len(tables) * batch, generator=draw) * math.log(1 + n)).exp().long() - 1
    features = KeyedJaggedTensor(list(schemes), ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    with counting_bytes() as sent:
        model(features).values().sum().backward()
    total = torch.tensor(float(sum(sent)))
    dist.all_reduce(total)
    cost = scale.estimate(tables, 2, batch_size=batch, replicate=False)
    wanted = 2 * cost.sent_bytes  # of both ranks: tables are not split evenly between them
    assert abs(float(total) / wanted - 1) < 0.1, (float(total), wanted)


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


def sharded_to_train(kind: str, constraints: Callable[[Any], Any]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A sharded model of its own start, with its optimizers of networks and of replicated tables."""
    theirs, _, options = OPTIMIZERS[kind]
    module = EmbeddingBagCollection(TRAINED)
    apply_optimizer_in_backward(theirs, [*module.bags.parameters(), *module.vectors.parameters()], dict(options))
    model = shard(module, constraints(module))
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    whole = torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs
    groups = [
        ({k: p for k, p in rest.items() if "paths" in k}, whole),
        ({k: p for k, p in rest.items() if "paths" not in k}, theirs),
    ]
    return model, [KeyedOptimizerWrapper(g, lambda p, c=c: c(p, **options)) for g, c in groups if g]


PLANS: dict[str, Callable[[Any], Any]] = {
    "planner": lambda module: integration.constraints(module, batch_size=B),
    "columns": lambda module: all_of(module, "column_wise", "column_wise"),
    "replicated": lambda module: all_of(module, "data_parallel", "row_wise"),
    "tables": lambda module: all_of(module, "table_wise", "table_wise"),
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
    for kind, plans in {"adagrad": list(PLANS), "rowwise": ["replicated"]}.items():
        model, optimizers = sharded_to_train(kind, PLANS["planner"])
        integration.copy_state_(model, reference(TRAINED))
        go_on(model, optimizers, range(2))
        integration.save(checkpoint_folder(f"two-{kind}"), model, optimizers, step=2)
        check_training(model, optimizers, kind, 2, "the saved")
        for plan in plans:
            other, its = sharded_to_train(kind, PLANS[plan])
            assert integration.load(checkpoint_folder(f"two-{kind}"), other, its) == 2
            check_training(other, its, kind, 2, plan)


def load_from_one(rank: int) -> None:
    """What one rank saved goes on with two."""
    for kind, plan in {"adagrad": "planner", "rowwise": "replicated"}.items():
        model, optimizers = sharded_to_train(kind, PLANS[plan])
        assert integration.load(checkpoint_folder(f"one-{kind}"), model, optimizers) == 4
        check_training(model, optimizers, kind, 4, plan)


def refuse_columns(rank: int) -> None:
    """Row-wise Adagrad over shards of columns keeps numbers that no other plan has."""
    model, optimizers = sharded_to_train("rowwise", PLANS["columns"])
    folder = checkpoint_folder("columns")
    raises(ValueError, "row-wise Adagrad over shards of columns", lambda: integration.save(folder, model, optimizers))


def copies(rank: int) -> None:
    """Weights and optimizer state from a single device to ranks and back, without a file."""
    for kind, plan in {"sgd": "planner", "adagrad": "replicated", "rowwise": "planner"}.items():
        collection, optimizer = trained_reference(kind, 2)
        model, optimizers = sharded_to_train(kind, PLANS[plan])
        integration.copy_state_(model, collection, target_optimizers=optimizers, source_optimizers=[optimizer])
        check_training(model, optimizers, kind, 2, f"to {plan}")
        back, its = trained_reference(kind, 0)
        integration.copy_state_(back, model, target_optimizers=[its], source_optimizers=optimizers)
        go_on(back, [its], range(4, 5))
        wanted, _ = trained_reference(kind, 5)
        for name, value in back.state_dict().items():
            near(value, wanted.state_dict()[name], f"back from {plan} {kind} {name}")


ALONE = (
    every_type,
    sums,
    unpooled,
    optimizers,
    odd_batches,
    refused,
    starts,
    pipeline,
    sent_bytes,
    copies,
    refuse_columns,
)
CASES: dict[str, Callable[[int], None]] = {f.__name__: f for f in (*ALONE, save_on_two, load_from_one)}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=60), store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    for name in names:
        try:
            CASES[name](rank)
        except BaseException:
            (folder / f"error{rank}").write_text(f"{name}, rank {rank}: {traceback.format_exc()}")
            os._exit(1)  # the other rank may wait for this one: no farewell
        dist.barrier()
        (folder / f"done{rank}").open("a").write(f"{name}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

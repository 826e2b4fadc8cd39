"""Every scheme under every sharding type: outputs, gradients, updates, odd batches; cases for two ranks."""

import torch
import torch.nn.functional as F
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_ranks import (
    NAMES,
    OPTIMIZERS,
    TABLES,
    TINY,
    B,
    D,
    N,
    all_of,
    dense_optimizer,
    jagged,
    near,
    raises,
    reference,
    same_tables,
    shard,
    sharded_with_sgd,
    slope,
    step_of_both,
    updated,
)

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection

TYPES = {
    "data_parallel": ("data_parallel", "table_wise"),
    "table_wise": ("table_wise", "table_wise"),
    "column_wise": ("column_wise", "column_wise"),
    "table_column_wise": ("table_column_wise", "column_wise"),
    "row_wise": ("table_wise", "row_wise"),
}


def every_type(rank: int) -> None:
    """Outputs, gradients and one update of every scheme under every sharding type that there is on the CPU."""
    every = [(kind, types, None) for kind, types in TYPES.items()]
    every += [(f"{kind} shards", ("", kind), 2) for kind in TYPES if kind != "row_wise"]
    for kind, (bags, vectors), num_shards in every:
        collection = reference()
        model = sharded_with_sgd(EmbeddingBagCollection(TABLES, num_shards=num_shards), collection, bags, vectors)
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
    for kind, num_shards in (("table_wise", None), ("column_wise", None), ("row_wise", None), ("table_wise", 2)):
        collection = reference()
        module = EmbeddingCollection(TABLES, num_shards=num_shards)
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


def optimizers(rank: int) -> None:
    """Three steps of each optimizer in TorchRec's backward pass, under the plan that its planner makes."""
    tables = [*TABLES, quorem.Table("tiny", TINY, D)]
    names = [table.name for table in tables]
    for name, (theirs, ours, options) in OPTIMIZERS.items():
        collection = reference(tables, sparse=True)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(theirs, updated(module), dict(options))
        model = shard(module, integration.constraints(module, batch_size=B))
        kinds = {table: plan.sharding_type for group in model.plan.plan.values() for table, plan in group.items()}
        assert {table for table, kind in kinds.items() if kind == "data_parallel"} == {"tiny"}, kinds
        integration.copy_state_(model, collection)
        replicated, networks = [], []
        for key, parameter in in_backward_optimizer_filter(model.named_parameters()):
            (networks if "compose." in key else replicated).append(parameter)
        whole = (
            torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs
        )  # as quorem.optim does for networks and matrices
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
    for num_shards in (None, 2):
        _odd_batches(rank, num_shards)


def _odd_batches(rank: int, num_shards: int | None) -> None:
    collection = reference()
    module = EmbeddingBagCollection(TABLES, num_shards=num_shards)
    model = sharded_with_sgd(module, collection, "table_wise", "table_wise" if num_shards else "row_wise")
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
        out.values().sum().mul(0).backward()  # a rank without samples takes part too
    for mode in ("sum", "mean"):
        collection = reference(mode=mode)
        module = EmbeddingBagCollection(TABLES, mode=mode, is_weighted=True, num_shards=num_shards)
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
    shards = EmbeddingBagCollection(TABLES, num_shards=2)
    sharded = shard(shards, integration.constraints(shards, batch_size=B))
    ids = torch.full((len(NAMES),), N)
    features = KeyedJaggedTensor(NAMES, ids, lengths=torch.ones_like(ids))
    raises(IndexError, f"id {N} is outside [0, {N}) of table full", lambda: model(features))
    raises(IndexError, f"id {N} is outside [0, {N}) of table full", lambda: sharded(features))


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

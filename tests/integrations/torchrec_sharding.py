"""Every scheme under every sharding type: outputs, gradients, updates, odd batches; cases for two ranks."""

import torch
import torchrec_ranks as ranks
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_ranks import NAMES, TABLES, D, dense_optimizer, jagged, same_tables, sharded_with_sgd, slope, step_of_both
from torchrec_tables import collection_of, expected

import quorem
from quorem.integrations import torchrec as integration
from quorem.integrations.torchrec import EmbeddingBagCollection, EmbeddingCollection

TYPES = ("data_parallel", "table_wise", "column_wise", "table_column_wise")


def every_type(rank: int) -> None:
    """Outputs, gradients and one update of every scheme under every sharding type that there is on the CPU."""
    for kind in TYPES:
        collection = collection_of(TABLES)
        model = sharded_with_sgd(EmbeddingBagCollection(TABLES), collection, kind)
        assert model(jagged(rank)).keys() == NAMES
        optimizers = [dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.5))]
        optimizers.append(torch.optim.SGD(collection.parameters(), lr=0.5))
        step_of_both(rank, model, collection)
        for optimizer in optimizers:
            optimizer.step()
        same_tables(model, collection, kind)


def unpooled(rank: int) -> None:
    """Vectors of every scheme, and their gradients."""
    for kind in ("table_wise", "column_wise"):
        collection = collection_of(TABLES)
        model = sharded_with_sgd(EmbeddingCollection(TABLES, num_shards=2), collection, kind)
        optimizers = [dense_optimizer(model, lambda p: torch.optim.SGD(p, lr=0.5))]
        optimizers.append(torch.optim.SGD(collection.parameters(), lr=0.5))
        features = jagged(rank)
        out = model(features)
        assert list(out) == NAMES
        for f, name in enumerate(NAMES):
            ranks.near(out[name].values(), collection.dense(f).flatten(1)[features[name].values()], name)
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
    tables = [*TABLES, quorem.Table("tiny", ranks.TINY, D)]
    names = [table.name for table in tables]
    for name, (theirs, ours, options) in ranks.OPTIMIZERS.items():
        collection = collection_of(tables, sparse=True)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(theirs, module.vectors.parameters(), dict(options))
        model = ranks.shard(module, integration.constraints(module, batch_size=ranks.B))
        assert all(plan.sharding_type != "data_parallel" for p in model.plan.plan.values() for plan in p.values())
        integration.copy_state_(model, collection)
        # As quorem.optim does for networks and matrices.
        whole = torch.optim.Adagrad if theirs is RowWiseAdagrad else theirs
        both = [dense_optimizer(model, lambda p: whole(p, **options)), ours(collection.parameters(), **options)]  # noqa: B023
        for step in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            step_of_both(rank, model, collection, step, names=names)
            for optimizer in both:
                optimizer.step()
        same_tables(model, collection, name)


def odd_batches(rank: int) -> None:
    """Batches of other sizes, an empty one, keys in another order, features without ids."""
    collection = collection_of(TABLES)
    model = sharded_with_sgd(EmbeddingBagCollection(TABLES), collection, "table_wise")
    for step, sizes in enumerate([(3, 5), (1, 0), (0, 2), (0, 0), (4, 4)]):
        names = NAMES if step % 2 == rank else NAMES[::-1]
        drawn = jagged(rank, step, batch=sizes[rank], names=names)
        drawn = KeyedJaggedTensor(names, drawn.values().int() if rank else drawn.values(), lengths=drawn.lengths())
        lengths = drawn.lengths() * (0 if step == 4 and rank else 1)
        features = KeyedJaggedTensor(names, drawn.values()[: int(lengths.sum())], lengths=lengths, stride=sizes[rank])
        out = model(features)
        assert out.keys() == NAMES and out.values().shape == (sizes[rank], (len(NAMES) + 1) * D)
        if sizes[rank]:
            ranks.near(out.values(), expected(collection, features), f"sizes {sizes}")
        out.values().sum().mul(0).backward()  # a rank without samples takes part too


def starts(rank: int) -> None:
    """Shards of columns and whole tables start in the interval of their partition, from the meta device too."""
    tables = [quorem.Table(op, 1000, D, quorem.QR(10, operation=op)) for op in ("add", "mult")]
    bound = (1 / 1000) ** 0.5
    for device in ("cpu", "meta"):
        for kind in ("column_wise", "table_wise"):
            module = EmbeddingCollection(tables, num_shards=2, device=device)
            made = dict(integration.to_collection(ranks.shard(module, ranks.all_of(module, kind))).named_tables())
            spans = {name: float(table.max() - table.min()) / 2 for name, table in made.items()}
            wanted = {"tables.add.0": bound, "tables.add.1": bound / 100, "tables.mult.0": bound, "tables.mult.1": 0.01}
            for name, span in wanted.items():
                assert 0.85 * span < spans[name] <= 1.001 * span, (device, kind, name, spans[name], span)
            assert abs(float(made["tables.mult.1"].mean()) - 1) < 0.01

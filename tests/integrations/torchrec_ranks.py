"""What the cases for two ranks share: tables, batches, and a step of the sharded and the single-device model.

The cases are in ``torchrec_sharding``, ``torchrec_exchange`` and ``torchrec_checkpoints``; ``test_torchrec_ranks``
runs them.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import replicas
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_tables import expected

import quorem
from quorem.integrations import torchrec as integration
from quorem.paper.partitions import ExplicitPartition, Partition

N, D, B = 90, 16, 4
TINY = 2  # ids of the table that is replicated
GROUPS = ExplicitPartition([i * i % 7 for i in range(N)])
SCHEMES = {
    "full": quorem.Full(),
    "hash": quorem.Hash(4),
    "add": quorem.QR(4, operation="add"),
    "add3": quorem.ChineseRemainder(3, operation="add"),
    "mult": quorem.QR(4),
    "mult3": quorem.Custom((Partition(1, 10), Partition(10, 9), GROUPS)),
    "concat": quorem.GeneralizedQR(2, operation="concat"),
    "feature": quorem.QR(4, operation="feature"),
    "path": quorem.Path(4, (8,), force=True),
    "narrow": quorem.QR(4, operation="add", width=8),
    "narrow_mult": quorem.QR(4, width=8),
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
Case = Callable[[int], None]


def run(rank: int, folder: str, cases: tuple[Case, ...]) -> None:
    """All cases, in process ``rank`` of two."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    logging.disable(logging.CRITICAL)
    replicas.run(rank, folder, [partial(case, rank) for case in cases])


def jagged(rank: int, step: int = 0, batch: int = B, names: list[str] = NAMES) -> KeyedJaggedTensor:
    """A rank's batch: zero to three ids in each bag."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(names) * batch,), generator=draw)
    sizes = torch.tensor([TINY if name == "tiny" else N for name in names]).repeat_interleave(batch)
    ids = torch.randint(0, N, (int(lengths.sum()),), generator=draw) % sizes.repeat_interleave(lengths)
    return KeyedJaggedTensor(names, ids, lengths=lengths, stride=batch)


def slope(rank: int, step: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank + 50))


def near(actual: Any, wanted: Any, name: str) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


def same_tables(sharded: nn.Module, collection: quorem.EmbeddingCollection, case: str) -> None:
    near(integration.to_collection(sharded).state_dict(), collection.state_dict(), case)


def shard(module: nn.Module, constraints: Mapping[str, ParameterConstraints]) -> DistributedModelParallel:
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=dict(constraints), batch_size=B)
    plan = planner.collective_plan(module, get_default_sharders(), dist.group.WORLD)
    return DistributedModelParallel(module, plan=plan, device=CPU)


def all_of(module: Any, kind: str) -> dict[str, ParameterConstraints]:
    """Constraints that shard every table in one way."""
    names = [shard.name for group in module.rows.groups for shard in group]
    return {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name in names}


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


def sharded_with_sgd(module: Any, collection: quorem.EmbeddingCollection, kind: str) -> nn.Module:
    apply_optimizer_in_backward(torch.optim.SGD, module.vectors.parameters(), {"lr": 0.5})
    model = shard(module, all_of(module, kind))
    integration.copy_state_(model, collection)
    return model


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, quorem.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, quorem.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
    "rowwise": (RowWiseAdagrad, quorem.optim.RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}),
}

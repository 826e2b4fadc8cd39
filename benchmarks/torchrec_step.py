"""One training step of sharded tables on two gloo ranks: TorchRec's own full tables, and composed ones at 16x.

    python benchmarks/torchrec_step.py --batch 16384

The 26 tables of the Criteo Kaggle log, D = 16, Adagrad in the backward pass, ids of the synthetic log. The plan is that
of ``quorem.plan`` for a sixteenth of the bytes of rows and state, with the counts of the log's first rows. Each rank
has one thread. Steps of all models take turns in one run; the time is that of the slower rank. Bytes are those handed
to all-to-alls for the other rank. Writes results/torchrec_step.json.
"""

import argparse
import inspect
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders, get_unwrapped_module
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import quorem
from quorem.data.shape import CARDINALITIES
from quorem.data.synthetic import ClickLog
from quorem.files.provenance import commit, versions
from quorem.integrations import torchrec as integration

D, RANKS, TIMES, KEPT_FULL = 16, 2, 16, 4096
COUNTED, BLOCK = 2_000_000, 100_000  # rows of the log that the plan counts, and those drawn at a time
NAMES = [f"C{i + 1}" for i in range(len(CARDINALITIES))]
RESULT = Path(__file__).parent / "results" / "torchrec_step.json"
ADAGRAD = {"lr": 0.01, "eps": 1e-10}


def full(counts: list[Tensor]) -> list[quorem.Table]:
    return [quorem.Table(name, len(count), D, frequencies=count) for name, count in zip(NAMES, counts, strict=True)]


def sums(counts: list[Tensor]) -> list[quorem.Table]:
    """Remainder and quotient of each large table, added."""
    schemes = [quorem.QR(TIMES, operation="add") if n > KEPT_FULL else quorem.Full() for n in CARDINALITIES]
    return [quorem.Table(name, n, D, s) for name, n, s in zip(NAMES, CARDINALITIES, schemes, strict=True)]


def planned(counts: list[Tensor]) -> list[quorem.Table]:
    """The plan by frequency, for rows and state."""
    budget = sum(CARDINALITIES) * D * 2 * 4 // TIMES
    return quorem.plan(full(counts), budget, optimizer="adagrad").applied_to(full(counts))


FULL, PLAN, FLOOR = "full, TorchRec's own", "plan at 16x", "its exchange, lookup and update alone"
MODELS: dict[str, Callable[[list[Tensor]], list[quorem.Table]]] = {  # of how often each id occurs
    FULL: full,
    PLAN: planned,
    FLOOR: planned,
    "`QR(16)`, sums": sums,
    "full, rows sent once": full,
}


def counts_of_log(rows: int) -> list[Tensor]:
    """How often each id occurs in the first rows of the log."""
    log, counts = ClickLog(), [torch.zeros(n, dtype=torch.int64) for n in CARDINALITIES]
    for first in range(0, rows, BLOCK):
        for count, ids in zip(counts, log.draw(first, first + BLOCK).batch.ids.T, strict=True):
            count.add_(ids.long().bincount(minlength=len(count)))
    return counts


def sharded(name: str, counts: list[Tensor], batch: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model of the tables, sharded by TorchRec's planner, and the optimizer of replicated tables."""
    constraints = None
    if name == FULL:
        configs = [
            torchrec.EmbeddingBagConfig(name=key, num_embeddings=n, embedding_dim=D, feature_names=[key])
            for key, n in zip(NAMES, CARDINALITIES, strict=True)
        ]
        model: Any = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    else:
        model = integration.EmbeddingBagCollection(MODELS[name](counts), device="meta")
        constraints = integration.constraints(model, batch_size=batch)
    parameters = model.parameters() if name == FULL else model.vectors.parameters()
    apply_optimizer_in_backward(torch.optim.Adagrad, parameters, dict(ADAGRAD))
    topology = Topology(world_size=RANKS, compute_device="cpu", ddr_cap=2**36)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=batch)
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, device=torch.device("cpu"))
    rest = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    return model, [torch.optim.Adagrad(rest, **ADAGRAD)] if rest else []


def step_of(model: nn.Module, optimizers: list[torch.optim.Optimizer], slope: Tensor) -> Callable[[Any], None]:
    """A training step of a batch."""

    def step(features: KeyedJaggedTensor) -> None:
        model(features).values().backward(slope)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def step_of_rows(model: nn.Module) -> Callable[[Any], None]:
    """What TorchRec does of such a step: rows that were found out before are fetched, and updated."""

    def step(rows: Any) -> None:
        fetched = get_unwrapped_module(model).vectors[0](rows.rows[0]).values()
        fetched.backward(torch.ones_like(fetched))

    return step


def count_bytes() -> list[int]:
    """From now on, the bytes that each all-to-all of this rank sends to the other."""
    sent: list[int] = []
    all_to_all = dist.all_to_all_single

    def counted(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(all_to_all).bind(*arguments, **options).arguments
        sizes = given.get("input_split_sizes")
        share = 1 / RANKS if not sizes else sizes[dist.get_rank()] / max(sum(sizes), 1)
        sent.append(round(given["input"].nbytes * (1 - share)))
        return all_to_all(*arguments, **options)

    dist.all_to_all_single = counted
    return sent


def run(rank: int, names: list[str], batch: int, steps: int, folder: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    counts = torch.load(f"{folder}/counts", mmap=True)
    slope = torch.randn(batch, len(NAMES) * D)
    models = {name: sharded(name, counts, batch) for name in names if name != FLOOR}
    steps_of = {
        name: step_of_rows(models[PLAN][0]) if name == FLOOR else step_of(*models[name], slope) for name in names
    }
    sent, seconds, sizes = count_bytes(), {name: [] for name in names}, {}
    log = ClickLog()
    for step in range(steps):
        first = (step * RANKS + rank) * batch
        ids = log.draw(first, first + batch).batch.ids.T.flatten()
        for name, train in steps_of.items():
            features = KeyedJaggedTensor(NAMES, ids.long(), lengths=torch.ones(len(ids), dtype=torch.int32))
            if name == FLOOR:
                features = get_unwrapped_module(models[PLAN][0]).rows(features)
            sent.clear()
            dist.barrier()
            start = time.perf_counter()
            train(features)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            total = torch.tensor(sum(sent))
            dist.all_reduce(total)
            sizes[name] = int(total) / RANKS
    if rank == 0:
        medians = {name: statistics.median(times[2:]) for name, times in seconds.items()}
        RESULT.write_text(json.dumps(result(medians, sizes, batch, steps), indent=1) + "\n")
    dist.destroy_process_group()


def result(seconds: dict[str, float], sizes: dict[str, float], batch: int, steps: int) -> dict[str, Any]:
    """What was measured."""
    models = {name: {"ms": time_of * 1e3, "bytes": sizes[name]} for name, time_of in seconds.items()}
    about = {"ranks": RANKS, "batch": batch, "steps": steps, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    return {"models": models, **about, "versions": versions(), "commit": commit()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384, help="of each rank")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(counts_of_log(COUNTED), f"{folder}/counts")
        torch.multiprocessing.spawn(run, (list(MODELS), arguments.batch, arguments.steps, folder), RANKS)
    print(RESULT.read_text())

"""One training step of sharded tables on two gloo ranks: TorchRec's own full tables, and composed ones at 16x.

    python benchmarks/torchrec_step.py --batch 16384

The 26 tables of the Criteo Kaggle log, D = 16, Adagrad in the backward pass, ids of the synthetic log. Each rank has
one thread. Steps of all models take turns in one run; the time is that of the slower rank. Bytes are those handed to
all-to-alls for the other rank, beside what ``quorem.integrations.scale`` says. Writes results/torchrec_step.json.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import quorem
from quorem.data.shape import CARDINALITIES
from quorem.data.synthetic import ClickLog
from quorem.integrations import scale
from quorem.integrations import torchrec as integration
from quorem.provenance import commit, versions

D, RANKS, KEPT_FULL = 16, 2, 4096
NAMES = [f"C{i + 1}" for i in range(len(CARDINALITIES))]
RESULT = Path(__file__).parent / "results" / "torchrec_step.json"
ADAGRAD = {"lr": 0.01, "eps": 1e-10}


def sums(times: int) -> list[quorem.Table]:
    """Remainder and quotient of each large table, added."""
    scheme = quorem.QR(times, operation="add") if times > 1 else quorem.Full()
    return [
        quorem.Table(name, n, D, scheme if n > KEPT_FULL else quorem.Full())
        for name, n in zip(NAMES, CARDINALITIES, strict=True)
    ]


def hot_and_cold(times: int) -> list[quorem.Table]:
    """Rows of their own for the hot ids of each large table, and a pool for each rank for the cold ones."""
    rows = sum(CARDINALITIES) // times - sum(n for n in CARDINALITIES if n <= KEPT_FULL)
    tables = []
    for i, (name, n) in enumerate(zip(NAMES, CARDINALITIES, strict=True)):
        pool = quorem.Pool(rows // 4, name=f"pool{i % RANKS}")
        hot = quorem.HotCold(n * rows // sum(CARDINALITIES) // 2, cold=pool)
        tables.append(quorem.Table(name, n, D, hot if n > KEPT_FULL else quorem.Full()))
    return tables


MODELS = {"`QR(16)`, sums": sums(16), "`HotCold`, 2 pools, 16x": hot_and_cold(16)}
FULL = "full, TorchRec's own"
TABLES = {FULL: sums(1), **MODELS}


def sharded(name: str, batch: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model of the tables, sharded by TorchRec's planner, and the optimizer of replicated tables."""
    constraints = None
    if name == FULL:
        configs = [
            torchrec.EmbeddingBagConfig(name=key, num_embeddings=n, embedding_dim=D, feature_names=[key])
            for key, n in zip(NAMES, CARDINALITIES, strict=True)
        ]
        model: Any = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    else:
        model = integration.EmbeddingBagCollection(MODELS[name], device="meta")
        constraints = integration.constraints(model, batch_size=batch)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), dict(ADAGRAD))
    topology = Topology(world_size=RANKS, compute_device="cpu", ddr_cap=2**36)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=batch)
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, device=torch.device("cpu"))
    rest = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    return model, [torch.optim.Adagrad(rest, **ADAGRAD)] if rest else []


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


def run(rank: int, batch: int, steps: int, store: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    models = {name: sharded(name, batch) for name in (FULL, *MODELS)}
    sent, seconds, sizes = count_bytes(), {name: [] for name in models}, {}
    slope = torch.randn(batch, len(NAMES) * D)
    log = ClickLog()
    for step in range(steps):
        first = (step * RANKS + rank) * batch
        ids = log.draw(first, first + batch).batch.ids.T.flatten()
        for name, (model, optimizers) in models.items():
            features = KeyedJaggedTensor(NAMES, ids.long(), lengths=torch.ones(len(ids), dtype=torch.int32))
            sent.clear()
            dist.barrier()
            start = time.perf_counter()
            model(features).values().backward(slope)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
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
    """What was measured, beside the bytes that ``scale`` says."""
    models = {}
    for name, time_of in seconds.items():
        cost = scale.estimate(TABLES[name], RANKS, batch_size=batch)
        calculated = None if name == FULL else cost.id_bytes + cost.vector_bytes  # TorchRec plans full tables its way
        models[name] = {"ms": time_of * 1e3, "bytes": sizes[name], "calculated": calculated}
    about = {"ranks": RANKS, "batch": batch, "steps": steps, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    return {"models": models, **about, "versions": versions(), "commit": commit()}


def result_table(measured: dict[str, Any]) -> list[str]:
    """The result, as lines of Markdown."""
    lines = [
        "| tables | ms a step | full tables' time over it | MB that a rank sends | calculated |",
        "|---|---|---|---|---|",
    ]
    full = measured["models"][FULL]["ms"]
    for name, row in measured["models"].items():
        calculated = "" if row["calculated"] is None else f"{row['calculated'] / 1e6:.2f}"
        ratio, sent = f"{full / row['ms']:.2f}", f"{row['bytes'] / 1e6:.2f}"
        lines.append(f"| {name} | {row['ms']:.0f} | {ratio} | {sent} | {calculated} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16384, help="of each rank")
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (arguments.batch, arguments.steps, f"{folder}/store"), RANKS)
    print("\n".join(result_table(json.loads(RESULT.read_text()))))

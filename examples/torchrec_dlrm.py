"""DLRM on a synthetic click log, its tables sharded by TorchRec: the losses of one process, on any number of ranks.

    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --out runs/ranks     # two ranks on the CPU
    torchrun --nproc-per-node 8 examples/torchrec_dlrm.py --out runs/gpus --device cuda    # eight GPUs, NCCL
    python examples/torchrec_dlrm.py --out runs/single --single                # the same without TorchRec

A run that was interrupted goes on from its last checkpoint, with as many ranks as it is then given. Where a rank dies,
torchrun ends the others. docs/torchrec.md explains the parts.
"""

import argparse
import gc
import json
import logging
import os
import shutil
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import quorem
from quorem.data.synthetic import ClickLog
from quorem.integrations import torchrec as integration
from quorem.models import DLRM

CARDINALITIES = (1460, 580, 200_000, 80_000, 300, 24, 12_000, 630, 4, 90_000)
ADAGRAD = {"lr": 0.02, "eps": 1e-10}
NAMES = [f"C{f + 1}" for f in range(len(CARDINALITIES))]


def tables(collisions: int) -> list[quorem.Table]:
    """Full tables, or those of more than 1000 ids composed: sums, products and a path."""
    schemes = [quorem.QR(collisions, operation="add"), quorem.QR(collisions), quorem.Path(collisions, ())]
    return [
        quorem.Table(name, n, 16, schemes[f % 3] if collisions > 1 and n > 1000 else quorem.Full())
        for f, (name, n) in enumerate(zip(NAMES, CARDINALITIES, strict=True))
    ]


def network(embeddings: nn.Module, seed: int) -> DLRM:
    torch.manual_seed(seed)
    return ShardedDLRM(embeddings, num_dense=13, bottom=(64, 32), top=(64, 32))


class ShardedDLRM(DLRM):
    """DLRM whose embeddings take and give what TorchRec's do."""

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        if isinstance(self.embeddings, quorem.EmbeddingCollection):
            return super().forward(dense, ids)
        lengths = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
        features = KeyedJaggedTensor(NAMES, ids.T.flatten(), lengths=lengths)
        return self.logits(dense, self.embeddings(features).values())


def single(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model and its optimizer in one process; this is where every run starts from."""
    torch.manual_seed(arguments.seed)
    collection = quorem.EmbeddingCollection(tables(arguments.collisions), mode="sum", sparse=True)
    model = network(collection, arguments.seed)
    return model, quorem.optim.Adagrad(model.parameters(), **ADAGRAD)


def sharded(arguments: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The same model, sharded by TorchRec's planner, and its optimizer."""
    bags = integration.EmbeddingBagCollection(tables(arguments.collisions), device="meta")
    model = network(bags, arguments.seed)
    # The options are copied, since TorchRec writes into them.
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.vectors.parameters(), dict(ADAGRAD))
    ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, compute_device=arguments.device),
        constraints=integration.constraints(model, batch_size=arguments.batch // ranks, device=arguments.device),
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    model = DistributedModelParallel(model, plan=plan, device=device_of(arguments))
    start, _ = single(arguments)
    integration.copy_state_(model, start)  # the start of one process; TorchRec's own is as good
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))  # networks; the backward pass updates tables
    others = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, **ADAGRAD))
    return model, CombinedOptimizer([model.fused_optimizer, others])


def device_of(arguments: argparse.Namespace) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if arguments.device == "cuda" else torch.device("cpu")


def train(arguments: argparse.Namespace, model: nn.Module, optimizer: Any, rank: int, ranks: int) -> None:
    log = ClickLog(cardinalities=CARDINALITIES, seed=arguments.seed)
    share = arguments.batch // ranks  # of each step's rows
    losses = resume(arguments.out, model, optimizer)
    for step in range(len(losses), arguments.steps):
        first = step * arguments.batch + rank * share
        batch = log.draw(first, first + share).batch
        optimizer.zero_grad()
        dense, ids, labels = (tensor.to(device_of(arguments)) for tensor in (batch.dense, batch.ids, batch.labels))
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels.float())
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach(), ranks))
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(arguments.out, model, optimizer, losses, rank)
            if rank == 0:
                recent = losses[-arguments.save_every :]
                print(f"step {step + 1}: loss {sum(recent) / len(recent):.4f}", flush=True)


def mean_over_ranks(loss: Tensor, ranks: int) -> float:
    if ranks > 1:
        dist.all_reduce(loss)
    return float(loss) / ranks


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, the latest last."""
    return sorted(path.parent for path in out.glob("step-*/.metadata"))


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What a checkpoint holds: its names do not depend on the number of ranks or the plan."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def resume(out: Path, model: nn.Module, optimizer: Any) -> list[float]:
    """Load the latest checkpoint, if there is one, and return the losses so far."""
    if not (found := checkpoints(out)):
        return []
    state = state_of(model, optimizer)
    with torch.no_grad():
        checkpoint.load(state, checkpoint_id=found[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return json.loads((found[-1] / "losses.json").read_text())


def save(out: Path, model: nn.Module, optimizer: Any, losses: list[float], rank: int) -> None:
    """Write a checkpoint, and drop all but the last two."""
    path = out / f"step-{len(losses):06}"
    if rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        (path / "losses.json").write_text(json.dumps(losses))
    checkpoint.save(state_of(model, optimizer), checkpoint_id=path)
    if rank == 0:
        for old in checkpoints(out)[:-2]:
            shutil.rmtree(old)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="rows of a step, over all ranks")
    parser.add_argument("--collisions", type=int, default=4, help="1: full tables")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the ranks: gloo, or NCCL")
    parser.add_argument("--single", action="store_true", help="one process, without TorchRec")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # TorchRec logs its plan
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.single:
        arguments.device = "cpu"
        train(arguments, *single(arguments), rank=0, ranks=1)
        return
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    if arguments.device == "cuda":
        torch.cuda.set_device(device_of(arguments))
    # The group's threads must end before Python does: one that then asked for Python's lock would abort the process. So
    # nothing may keep the group: the functions of this module have it as a default if it is imported later.
    import_module("torch.distributed.nn")
    dist.init_process_group(backend, timeout=timedelta(seconds=60))  # a rank that hangs ends the others
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if arguments.batch % ranks:
            parser.error(f"--batch ({arguments.batch}) must be a multiple of the number of ranks ({ranks})")
        train(arguments, *sharded(arguments), rank=rank, ranks=ranks)
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        gc.collect()  # the model holds the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

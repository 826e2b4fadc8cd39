"""Rows a second of a training step on the CPU: quorem, and a plain PyTorch loop over 26 EmbeddingBags, in one run.

    python benchmarks/train_cpu.py --out benchmarks/results/train_cpu.json

Both look up the same ids of a log of Criteo's shape, batch 128, D = 16, Adagrad at 0.01. The loop is one
``nn.EmbeddingBag(sparse=True)`` a feature and ``torch.optim.Adagrad``, as the public DLRM code trains. ``tables`` is
lookup, backward and update of the embedding tables alone, under a gradient that is given; ``dlrm`` is a whole step of
the network of section 5.1. Providers take turns, a few steps each, so that all see the same disturbances; the median
turn is reported, with the 20% and 80% quantiles.
"""

import gc
import json
import time
import warnings
from collections.abc import Callable

import numpy as np
import result_file
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quorem import QR, Full, models, optim
from quorem.data.batches import Batch
from quorem.data.shape import scaled_cardinalities
from quorem.data.synthetic import ClickLog
from quorem.modules.collection import EmbeddingCollection
from quorem.paper.schemes import Scheme
from quorem.training.config import RunConfig
from quorem.training.tables import tables_of
from quorem.training.trial import Trial

BATCH, DIM, LR, STEPS = 128, 16, 0.01, 10  # steps of a turn
Step = Callable[[Batch], None]


class Bags(nn.Module):
    """One EmbeddingBag a feature, looked up one by one."""

    def __init__(self, cardinalities: tuple[int, ...]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, DIM, mode="sum", sparse=True) for n in cardinalities)
        for bag, n in zip(self.bags, cardinalities, strict=True):
            nn.init.uniform_(bag.weight, -(n**-0.5), n**-0.5)
        self.embedding_dims = (DIM,) * len(cardinalities)

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(ids))
        return torch.stack([bag(ids[:, k], offsets) for k, bag in enumerate(self.bags)], 1)


def loop(cardinalities: tuple[int, ...], mode: str, gradient: Tensor) -> Step:
    """The plain loop."""
    tables = Bags(cardinalities)
    model = tables if mode == "tables" else models.build("dlrm", tables)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        if mode == "tables":
            tables(batch.ids.long()).backward(gradient)
        else:
            logits = model(batch.dense, batch.ids.long())
            F.binary_cross_entropy_with_logits(logits, batch.labels.float()).backward()
        optimizer.step()

    return step


def quorem(cardinalities: tuple[int, ...], mode: str, gradient: Tensor, scheme: Scheme) -> Step:
    """The library: its tables alone, or the step of its training loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = EmbeddingCollection(tables_of(cardinalities, scheme))
    if mode == "tables":
        optim.apply_in_backward(tables, optim.Adagrad, lr=LR)
        return lambda batch: tables(batch.ids).backward(gradient)
    config = RunConfig(data="made up", scheme=scheme, lr=LR)
    return Trial(config, models.build("dlrm", tables), list(tables.names)).step


def turns(step: Step, batches: list[Batch]) -> float:
    """Rows a second of one turn."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    return sum(map(len, batches)) / (time.perf_counter() - began)


def measure(cardinalities: tuple[int, ...], threads: int, rounds: int) -> list[dict]:
    """Every provider, in turns."""
    torch.set_num_threads(threads)
    rows = ClickLog(cardinalities=cardinalities).draw(0, BATCH * STEPS * (rounds + 2)).batch
    batches = list(rows.batches(BATCH))
    gradient = torch.randn(BATCH, len(cardinalities), DIM) / BATCH
    found = []
    for mode in ("tables", "dlrm"):
        steps = {
            "loop": loop(cardinalities, mode, gradient),
            "quorem, full": quorem(cardinalities, mode, gradient, Full()),
            "quorem, QR(4)": quorem(cardinalities, mode, gradient, QR(4)),
        }
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds + 2):
            own = batches[turn * STEPS : (turn + 1) * STEPS]
            for name, step in steps.items():
                rate = turns(step, own)
                if turn >= 2:  # the first ones compile and fault in memory
                    rates[name].append(rate)
        for name in steps:
            low, middle, high = np.quantile(rates[name], [0.2, 0.5, 0.8])
            of_loop = float(np.median(np.array(rates[name]) / np.array(rates["loop"])))
            found.append(
                {
                    "mode": mode,
                    "provider": name,
                    "threads": threads,
                    "rows_per_second": round(middle),
                    "q20": round(low),
                    "q80": round(high),
                    "times_the_loop": round(of_loop, 2),
                }
            )
            print(json.dumps(found[-1]), flush=True)
        del steps
        gc.collect()
    return found


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=0.1, help="cardinalities relative to Criteo's (1 needs 12 GB)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of ten steps for each provider")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch")
    arguments = parser.parse_args()
    made_by = result_file.made_by()
    cardinalities = scaled_cardinalities(arguments.scale)
    rows = [row for threads in arguments.threads for row in measure(cardinalities, threads, arguments.rounds)]
    config = {"batch": BATCH, "dim": DIM, "lr": LR, "scale": arguments.scale, "rounds": arguments.rounds}
    result_file.write(arguments.out, {"config": config, **made_by, "rows": rows})


if __name__ == "__main__":
    main()

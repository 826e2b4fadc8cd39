"""Which optimizer and which width: test log loss, bytes an id, and processor time of a step.

    quorem prepare criteo PATH/train.txt.gz DATA --days 5
    python benchmarks/optimizers.py DATA --out benchmarks/results/optimizers.json

Full tables and ``QR(4)`` under every optimizer, and full tables with narrow rows under Adagrad: D = 16, batch 128, one
epoch, the optimizer's own learning rate. Bytes are rows, matrices and the state of each row; time is that of a lookup,
backward and update of the tables alone, on one CPU thread, all settings in turns. Losses are compared by seed with full
tables under Adagrad. Results are written as they come, into OUT.jsonl; runs that it has are not trained again.

*Lazy* AMSGrad moves only the rows of the batch, as ``torch.optim.SparseAdam`` does for Adam; quorem's is exact.
"""

import statistics
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import lookups
import plan_quality
import result_file
import torch
from torch import Tensor

from quorem import QR, Full
from quorem.data.prepared import Prepared
from quorem.training.config import RunConfig
from quorem.training.feed import Feed
from quorem.training.loop import evaluate
from quorem.training.trial import Trial

TIMED = 100  # batches
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adagrad": {},
    "Adagrad, rows in bfloat16": {"row_dtype": "bfloat16"},
    "Adagrad, rows in bfloat16, log8": {"row_dtype": "bfloat16", "state_dtype": "log8"},
    "RowWiseAdagrad": {"optimizer": "rowwise_adagrad"},
    "Adam": {"optimizer": "adam"},
    "AMSGrad": {"optimizer": "amsgrad"},
    "lazy AMSGrad": {"optimizer": "amsgrad"},
}
TABLES = {"full": Full(), "QR(4)": QR(4)}
NARROW = {f"full, rows of {width}": Full(width=width) for width in (8, 4, 2)}
SETTINGS = [(tables, scheme, name) for tables, scheme in TABLES.items() for name in OPTIMIZERS]
SETTINGS += [(tables, scheme, "Adagrad") for tables, scheme in NARROW.items()]


class LazyAMSGrad:
    """AMSGrad on the rows that have a gradient."""

    def __init__(self, table: Tensor, lr: float) -> None:
        self.table, self.lr, self.steps = table, lr, 0
        self.state = [torch.zeros_like(table) for _ in range(3)]

    @torch.no_grad()
    def step(self) -> None:
        assert self.table.grad is not None
        gradient = self.table.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        self.table.grad, self.steps = None, self.steps + 1
        first, second, largest = (tensor[rows] for tensor in self.state)
        first = 0.9 * first + 0.1 * values
        second = 0.999 * second + 0.001 * values.square()
        largest = torch.maximum(largest, second)
        for tensor, new in zip(self.state, (first, second, largest), strict=True):
            tensor[rows] = new
        divisor = (largest / (1 - 0.999**self.steps)).sqrt() + 1e-8
        self.table[rows] -= self.lr / (1 - 0.9**self.steps) * first / divisor


def begun(
    folder: str, device: str, network: str, seed: int, number: int
) -> tuple[Feed, RunConfig, Trial, LazyAMSGrad | None]:
    """A run of one setting before its first step."""
    _, scheme, name = SETTINGS[number]
    options = {"scheme": scheme, "network": network, "seed": seed, **OPTIMIZERS[name]}
    data, config, trial = plan_quality.begun(folder, device, **options)
    if not name.startswith("lazy"):
        return data, config, trial, None
    trial.tables.remove()
    trial.embeddings.sparse = True
    return data, config, trial, LazyAMSGrad(trial.embeddings.stored, config.learning_rate)


def train(task: tuple[str, str, str, int, int]) -> dict[str, Any]:
    """One run: its test loss, and bytes an id."""
    data, config, trial, lazy = begun(*task)
    for batch in data.training(config, 0, 1, (100, None)):
        trial.step(batch)
        if lazy is not None:
            lazy.step()
    stored, (tables, _, name) = trial.embeddings.stored, SETTINGS[task[-1]]
    state = lazy.state if lazy is not None else trial.tables.live_state()[stored]
    held = [stored, *trial.embeddings.matrices(), *(tensor for tensor in state if tensor.shape[:1] == stored.shape[:1])]
    return {
        "tables": tables,
        "optimizer": name,
        "network": config.network,
        "seed": config.seed,
        "test": evaluate(trial, data, "test").log_loss,
        "bytes": sum(tensor.nbytes for tensor in held) / sum(data.prepared.cardinalities),
    }


def step_of_tables(folder: str, device: str, number: int) -> Callable[[int], float]:
    """Processor seconds of the next step of the tables."""
    data, config, trial, lazy = begun(folder, device, "dlrm", 0, number)
    batches = islice(data.training(config, 0, 1, (100, None)), TIMED)
    inputs = [batch.embedding_inputs(trial.names) for batch in batches]
    grad, following = torch.randn_like(trial.embeddings(*inputs[0])) / len(inputs[0][0]), cycle(inputs)

    def step(_: int) -> None:
        trial.embeddings(*next(following)).backward(grad)
        if lazy is not None:
            lazy.step()

    return lookups.on_processor(step)


def main() -> None:
    """Read the command line, train, write."""
    parser = plan_quality.parser_of(__doc__, seeds=8)
    parser.add_argument("--networks", nargs="+", default=["dlrm", "dcn"])
    arguments = parser.parse_args()
    tasks = {
        (tables, name, network, seed): (network, seed, number)
        for seed in range(arguments.seeds)
        for network in arguments.networks
        for number, (tables, _, name) in enumerate(SETTINGS)
    }
    runs = plan_quality.all_runs(train, arguments, tasks, ("tables", "optimizer", "network", "seed"))
    calls = {number: step_of_tables(str(arguments.data), arguments.device, number) for number in range(len(SETTINGS))}
    times = lookups.in_turns(calls, 60.0, 3 * TIMED)
    rows = []
    for network in arguments.networks:
        of = {(r["tables"], r["optimizer"], r["seed"]): r for r in runs if r["network"] == network}
        seeds = sorted({seed for _, _, seed in of})
        base = [of["full", "Adagrad", seed]["test"] for seed in seeds]
        for number, (tables, _, name) in enumerate(SETTINGS):
            group = [of[tables, name, seed] for seed in seeds]
            changes = [100 * (run["test"] / full - 1) for run, full in zip(group, base, strict=True)]
            row = {"network": network, "tables": tables, "optimizer": name, "bytes": round(group[0]["bytes"], 1)}
            row |= {"test": statistics.mean(run["test"] for run in group), "percent": statistics.mean(changes)}
            row |= {"percent_error": plan_quality.standard_error(changes)}
            rows.append({**row, "step_us": round(statistics.median(times[number]) * 1e6)})
            print(*rows[-1].values(), flush=True)
    size = len(Prepared(arguments.data).split("train"))
    head = {"rows_trained": size, "seeds": arguments.seeds, "device": arguments.device}
    head |= result_file.made_by() | {"commit": arguments.commit}
    config = {"embedding_dim": plan_quality.D, "batch_size": 128, "epochs": 1}
    result_file.write(arguments.out, {**head, "config": config, "rows": rows})


if __name__ == "__main__":
    main()

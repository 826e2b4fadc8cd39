"""The plan at a 16th and a 60th of the bytes beside QR(4) and full tables, on the synthetic log at full cardinalities.

    PYTHONPATH=src python3 benchmarks/plan_synthetic.py --out benchmarks/results/plan_synthetic.json [--commit SHA]

DLRM, D = 16, batch 128, one epoch, Adagrad at 0.01 and AMSGrad at 0.001; ``quorem.plan`` with the counts of the
training rows, and bytes that are a 16th or a 60th of those of full tables with the optimizer's state. A seed draws its
own log and first weights, and all settings of a seed train on the same rows in the same order, at a time. Ids are
numbered as the log has them, so that plans keep lists of ids.

A run that a file has is not trained again: ``--out`` of an earlier call is added to.
"""

import json
import math
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import result_file
import torch
from table_bytes import table_bytes
from torch import Tensor
from torch.nn import functional as F

from quorem import QR, EmbeddingCollection, Full, Table, models, plan
from quorem.data.batches import Batch
from quorem.data.shape import day_split, scaled_cardinalities
from quorem.data.synthetic import ClickLog
from quorem.experiments.bench.run import facts_of_run
from quorem.paper.schemes.frequency import comes_by_frequency
from quorem.training.config import RunConfig
from quorem.training.metrics import Evaluation
from quorem.training.trial import Trial, capturing

D = 16
TIMES = (16, 60)
SETTINGS = ("full", "QR(4)", *(f"plan, {times}x" for times in TIMES))
OPTIMIZERS = ("adagrad", "amsgrad")
EVALUATION_ROWS = 1 << 16


class Rows(NamedTuple):
    """The rows of a seed, and how often the training rows have each id."""

    train: Batch
    test: Batch
    best: float  # log loss of the true probabilities on the test rows
    counts: dict[str, Tensor]


def draw(seed: int, num_rows: int, scale: float, device: torch.device) -> Rows:
    """The rows of a seed's log."""
    log = ClickLog(cardinalities=scaled_cardinalities(scale), seed=seed)
    split = day_split(num_rows, 7)
    train = log.draw(*split["train"]).batch.to(device)
    test, probability = log.draw(*split["test"])
    best = float(F.binary_cross_entropy(probability, test.labels.double()))
    counts = {
        f"C{f + 1}": torch.bincount(train.ids[:, f].long(), minlength=n).cpu() for f, n in enumerate(log.cardinalities)
    }
    return Rows(train, test.to(device), best, counts)


def tables_of(setting: str, optimizer: str, counts: dict[str, Tensor]) -> tuple[list[Table], int]:
    """The tables of a setting, and their bytes with the optimizer's state."""
    tables = [Table(name, len(count), D, Full()) for name, count in counts.items()]
    full = table_bytes([table.scheme.spec(table.num_embeddings, D) for table in tables], optimizer)
    if setting == "full":
        return tables, full
    if not setting.startswith("plan"):
        scheme = QR(4)
        size = table_bytes([scheme.spec(table.num_embeddings, D) for table in tables], optimizer)
        return [Table(table.name, table.num_embeddings, D, scheme) for table in tables], size
    times = int(setting.removeprefix("plan, ").removesuffix("x"))
    planned = plan(tables, full // times, optimizer=optimizer, frequencies=counts)
    chosen = []
    for name, count in counts.items():
        scheme = planned[name]
        frequencies = None if isinstance(scheme, Full) or comes_by_frequency(count) else count
        chosen.append(Table(name, len(count), D, scheme, frequencies=frequencies))
    return chosen, planned.bytes


def train(setting: str, optimizer: str, seed: int, rows: Rows) -> dict[str, Any]:
    """One run on the device of its rows: bytes, test log loss and seconds of training."""
    device = rows.train.ids.device
    tables, size = tables_of(setting, optimizer, rows.counts)
    config = RunConfig(data="synthetic", optimizer=optimizer, seed=seed)
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        with capturing, warnings.catch_warnings():  # which no random number must be drawn in
            warnings.simplefilter("ignore")  # of tables that stay full
            torch.manual_seed(seed)
            embeddings = EmbeddingCollection(tables, device=device, on_invalid_id="trust")
            torch.manual_seed(seed)
            model = models.build(config.network, embeddings, num_dense=rows.train.dense.shape[1], device=device)
        trial = Trial(config, model, list(rows.counts))
        began = time.perf_counter()
        for batches in rows.train.batches(trial.together * config.batch_size):
            trial.step(batches)
        mean_loss = trial.mean_loss(trial.steps)
        seconds = time.perf_counter() - began
        evaluation = Evaluation()
        for batch in rows.test.batches(EVALUATION_ROWS):
            evaluation.update(trial.logits(batch), batch.labels.float())
        metrics = evaluation.compute()
    return {
        "setting": setting,
        "optimizer": optimizer,
        "seed": seed,
        "bytes": size,
        "rows_stored": len(embeddings.stored),
        "test": metrics.log_loss,
        "auc": metrics.auc,
        "train": mean_loss,
        "best": rows.best,
        "seconds": round(seconds, 1),
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of rows, optimizer and setting: the mean test loss, and the mean difference from QR(4) of
    the same seed, each with its standard error."""
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for run in runs:
        groups.setdefault((run["rows"], run["optimizer"], run["setting"]), {})[run["seed"]] = run["test"]
    rows = []
    for (num_rows, optimizer, setting), losses in groups.items():
        beside = groups.get((num_rows, optimizer, "QR(4)"), {})
        differences = [loss - beside[seed] for seed, loss in losses.items() if seed in beside]
        rows.append(
            {
                "rows": num_rows,
                "optimizer": optimizer,
                "setting": setting,
                "seeds": len(losses),
                "test": statistics.mean(losses.values()),
                "error": standard_error(list(losses.values())),
                "over_qr": statistics.mean(differences) if differences else None,
                "over_qr_error": standard_error(differences),
            }
        )
    return rows


def standard_error(values: list[float]) -> float | None:
    """Of the mean; None of fewer than two.

    >>> standard_error([1.0, 3.0]), standard_error([1.0])
    (1.0, None)
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def main() -> None:
    """Read the command line, train, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the log: six sevenths train, a 14th tests")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--scale", type=float, default=1.0, help="of the cardinalities")
    parser.add_argument("--workers", type=int, default=8, help="runs at a time")
    options = parser.parse_args()
    began, device = time.perf_counter(), torch.device(options.device)
    runs: list[dict[str, Any]] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    done = {(run["rows"], run["seed"], run["optimizer"], run["setting"]) for run in runs}
    about: dict[str, Any] = {"facts": facts_of_run(device, "python benchmarks/plan_synthetic.py", options.commit)}
    about["config"] = {"network": "dlrm", "dim": D, "batch": 128, "epochs": 1, "scale": options.scale}
    for seed in options.seeds:
        rows = draw(seed, options.rows, options.scale, device)
        print(f"seed {seed}: rows drawn, {time.perf_counter() - began:.0f} s", flush=True)
        jobs = [
            (setting, optimizer)
            for setting in options.settings
            for optimizer in options.optimizers
            if (options.rows, seed, optimizer, setting) not in done
        ]
        with ThreadPoolExecutor(options.workers) as pool:
            for future in [pool.submit(train, *job, seed, rows) for job in jobs]:
                runs.append({"rows": options.rows, **future.result()})
                print(*runs[-1].values(), f"{time.perf_counter() - began:.0f} s", flush=True)
                result_file.write(options.out, {**about, "rows": summary(runs), "runs": runs})
        del rows
    for row in summary(runs):
        print(*row.values())


if __name__ == "__main__":
    main()

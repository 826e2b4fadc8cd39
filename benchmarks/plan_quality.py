"""Test log loss of plans by counts, of hashing and of the paper's trick, at equal bytes.

    quorem prepare criteo PATH/train.txt.gz DATA --days 5
    python benchmarks/plan_quality.py DATA --out benchmarks/results/plan_quality.json --workers 16

At a 4th, 16th, 60th, 250th and 1000th of what full tables take: tables hashed alike; the quotient-remainder trick on
all tables alike, down to the smallest that it can be; full tables with narrow rows; and the plans of ``quorem plan
DATA``, ``quorem plan DATA --search`` and ``quorem plan DATA --serving``, by the counts of the training rows. *Training*
bytes are rows, lists of ids, layouts, matrices of narrow rows and Adagrad's state; *serving* bytes are without state,
with rows of 8 or 4 bits after training. Full tables count as their rows (and state) alone. DLRM and DCN, D = 16, batch
128, one epoch, Adagrad at 0.01. Networks of one seed start alike around all tables, so losses are compared by seed.

Results are written as they come, into OUT.jsonl; runs that it has are not trained again.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import result_file
import torch
from table_bytes import table_bytes

from quorem import QR, Full, Hash, quantize_
from quorem.data.prepared import Prepared
from quorem.experiments import planning
from quorem.files.provenance import commit, versions
from quorem.paper.schemes import Scheme
from quorem.planner import by_count
from quorem.training.config import RunConfig
from quorem.training.feed import Feed
from quorem.training.loop import evaluate
from quorem.training.model import build_model, data_identity
from quorem.training.trial import Trial

SIZES = (4, 16, 60, 250, 1000)
SETTINGS = ("full", "plan", "plan, searched", "plan, served", "narrow", "hash", "QR")
D = 16
SLACK = 1.01  # what collisions, which are whole numbers, may take more than the plan


def alike(make: Callable[[int], Scheme], data: Prepared, budget: int) -> tuple[Scheme, int]:
    """The scheme with the fewest collisions with which all tables fit, or else the smallest; and its bytes."""
    sizes = {}
    for c in dict.fromkeys(round(1.02**k) for k in range(600)):
        if 2 <= c <= max(data.cardinalities):
            sizes[c] = table_bytes([make(c).spec(n, D) for n in data.cardinalities], "adagrad")
            if sizes[c] <= SLACK * budget:
                return make(c), sizes[c]
    smallest = min(sizes, key=sizes.__getitem__)
    return make(smallest), sizes[smallest]


def settings(data: Prepared, sizes: list[int], names: list[str]) -> list[dict[str, Any]]:
    """What is trained: its name, size, bytes and bits, and options of ``RunConfig``."""
    full = sum(data.cardinalities) * D * 4
    found: list[dict[str, Any]] = []

    def add(setting: str, times: int, size: int, **options: Any) -> None:
        if setting in names:
            bits = options.pop("bits", None) or 0
            found.append({"setting": setting, "times": times, "bytes": size, "bits": bits, "options": options})

    add("full", 1, 2 * full, scheme=Full())
    for times in sizes:
        for setting, budget, optimizer in (("plan", 2 * full, "adagrad"), ("plan, served", full, None)):
            try:
                planned = planning.plan(data, budget // times, D, optimizer=optimizer)
            except ValueError as error:  # a small log, of which a few bytes pay for no row a table
                print(f"{times}x is left out: {error}")
            else:
                add(setting, times, planned.bytes, **planning.options_of(planned))
        if "plan, searched" in names:
            chosen = {"optimizer": "adagrad", "row_dtype": "auto", "state_dtype": "auto"}
            planned = planning.search(data, 2 * full // times, D, say=print, **chosen)
            add("plan, searched", times, planned.bytes, **planning.options_of(planned))
        if 1 <= D // times < D:
            scheme = Full(width=D // times)
            add("narrow", times, table_bytes([scheme.spec(n, D) for n in data.cardinalities], "adagrad"), scheme=scheme)
        for name, make in {"hash": Hash, "QR": QR}.items():
            scheme, size = alike(make, data, 2 * full // times)
            if scheme not in [setting["options"].get("scheme") for setting in found]:  # as small as it can be
                add(name, times, size, scheme=scheme)
    return found


def train(task: tuple[str, str, str, int, dict[str, Any]]) -> dict[str, Any]:
    """One run: its validation and test loss, and the test loss of the rows as they were trained."""
    folder, device, network, seed, setting = task
    data, config, trial = begun(folder, device, network=network, seed=seed, **setting["options"])
    for batches in data.training(config, 0, trial.together, (100, None)):
        trial.step(batches)
    trained = evaluate(trial, data, "test").log_loss
    test = trained
    if setting["bits"]:
        trial.tables.remove()
        quantize_(trial.model, bits=setting["bits"])
        test = evaluate(trial, data, "test").log_loss
    about = {name: setting[name] for name in ("setting", "times", "bytes", "bits")}
    validation = evaluate(trial, data, "validation").log_loss
    return {**about, "network": network, "seed": seed, "test": test, "validation": validation, "trained": trained}


_feeds: dict[str, Feed] = {}


def begun(folder: str, device: str, **options: Any) -> tuple[Feed, RunConfig, Trial]:
    """A run on prepared data before its first step; all runs of a process share one feed, and use one thread."""
    torch.set_num_threads(1)
    if folder not in _feeds:
        _feeds[folder] = Feed(Prepared(folder), device)
    data = _feeds[folder]
    config = RunConfig(data=data_identity(data.prepared), **options)
    return data, config, Trial(config, build_model(config, data.prepared, device), data.prepared.names)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each network, size and setting: mean, standard error, and both against full tables in percent."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        groups.setdefault((run["network"], run["times"], run["setting"]), []).append(run)
    rows = []
    for (network, times, setting), group in sorted(groups.items()):
        losses = [run["test"] for run in group]
        full = {run["seed"]: run["test"] for run in groups.get((network, 1, "full"), group)}
        mean = statistics.mean(losses)
        whole = statistics.mean(full[run["seed"]] for run in group if run["seed"] in full)
        row = {"network": network, "times": times, "setting": setting, "bytes": group[0]["bytes"], "test": mean}
        error = standard_error(losses)
        row |= {"error": error, "percent": 100 * (mean / whole - 1)}
        row["percent_error"] = (
            100 * standard_error([run["test"] - full[run["seed"]] for run in group if run["seed"] in full]) / whole
        )
        row["validation"] = statistics.mean(run["validation"] for run in group)
        row["quantizing"] = mean - statistics.mean(run["trained"] for run in group)
        rows.append({**row, "losses": losses})
    return rows


def kept_rows(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an earlier file for cells that ``rows`` lacks, each with its device and commit.

    Their percentages are over the full tables of the same file.
    """
    earlier, found = json.loads(path.read_text()), {(row["network"], row["times"], row["setting"]) for row in rows}
    about = {name: earlier[name] for name in ("device", "commit")}
    return [
        {**about, **row}
        for row in earlier["rows"]
        if row["setting"] in SETTINGS and (row["network"], row["times"], row["setting"]) not in found
    ]


def standard_error(losses: list[float]) -> float:
    """Of the mean; 0 for a single loss."""
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def parser_of(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The options of every study of prepared data."""
    parser = result_file.parser_of(description)
    parser.add_argument("data", type=Path, help="prepared data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=seeds, help="how many starts of the network")
    parser.add_argument("--commit", default=commit(), help="of the sources, where git does not say")
    return parser


def all_runs(
    train: Callable[[Any], dict[str, Any]],
    arguments: argparse.Namespace,
    tasks: Mapping[tuple[Any, ...], tuple[Any, ...]],
    fields: Sequence[str],
) -> list[dict[str, Any]]:
    """The runs in OUT.jsonl, and those of the tasks that it lacks, which are trained and added to it.

    Args:
        train: makes one run, of the data's folder, the device and a task; it is called in other processes.
        arguments: those of ``parser_of``.
        tasks: what to train, by the values of ``fields`` in the run.
        fields: the entries by which runs differ.
    """
    lines = arguments.out.with_suffix(".jsonl")
    runs = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {tuple(run[field] for field in fields) for run in runs}
    missing = [(str(arguments.data), arguments.device, *task) for key, task in tasks.items() if key not in done]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool, open(lines, "a") as file:
        for run in pool.imap_unordered(train, missing):
            runs.append(run)
            file.write(json.dumps(run) + "\n")
            file.flush()
    return runs


def main() -> None:
    """Read the command line, train, write."""
    parser = parser_of(__doc__, seeds=10)
    parser.add_argument("--networks", nargs="+", default=["dlrm", "dcn"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--keep", type=Path, help="an earlier file of results: rows of cells that OUT.jsonl lacks")
    arguments = parser.parse_args()
    data = Prepared(arguments.data)
    todo = settings(data, arguments.sizes, arguments.settings)
    tasks = {
        (setting["setting"], setting["times"], network, seed): (network, seed, setting)
        for seed in range(arguments.seeds)
        for network in arguments.networks
        for setting in todo
    }
    rows = summary(all_runs(train, arguments, tasks, ("setting", "times", "network", "seed")))
    for row in rows:
        place = f"{row['network']:5} {row['times']:>5} {row['setting']:14} {row['bytes']:>10,}"
        print(f"{place} {row['test']:.5f} {row['percent']:+.2f} ± {row['percent_error']:.2f} %")
    rows += kept_rows(arguments.keep, rows) if arguments.keep else []
    head = {"rows_trained": len(data.split("train")), "ids": sum(data.cardinalities), "seeds": arguments.seeds}
    head |= {"device": arguments.device, "versions": versions(), "commit": arguments.commit}
    head["config"] = {"embedding_dim": D, "batch_size": 128, "epochs": 1, "optimizer": "adagrad", "lr": 0.01}
    names = ("POOL_SHARE", "KEPT_PER_ROW", "RARELY")
    head["config"]["rule"] = {name.lower(): getattr(by_count, name) for name in names}
    result_file.write(arguments.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()

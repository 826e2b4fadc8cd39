"""Test log loss of tables that are trained in 8 bits, against those that are rounded to 8 bits once trained.

    python benchmarks/int8_training.py DATA --out benchmarks/results/int8_training.json --workers 2

A prototype of training in int8: rows are float32 tensors, but after each step those that it changed are rounded to the
codes, scale and zero point that ``quantize_`` would store, each number up or down at random or to the nearest.
Adagrad's state stays float32. DLRM with the float32 plans of ``plan_quality.py``: D = 16, batch 128, one epoch, Adagrad
at 0.01.

Results are written as they come, into OUT.jsonl; runs that it has are not trained again.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch
from plan_quality import D, _data
from torch import Tensor

from quorem.data.batches import Prepared
from quorem.experiments import planning
from quorem.ops.quantized import dequantize, quantize
from quorem.provenance import commit, versions
from quorem.training.config import RunConfig
from quorem.training.loop import evaluate
from quorem.training.model import build_model, data_identity
from quorem.training.trial import Trial

SIZES = (16, 250)
KINDS = ("float32", "at random", "to nearest")


def rounded(rows: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """``rows`` as 8 bits hold them."""
    stored = quantize(rows, 8)
    if kind == "to nearest":
        return dequantize(stored, D, 8)
    scale = stored[:, -4:-2].contiguous().view(torch.float16).float()
    zero = stored[:, -2:].contiguous().view(torch.int16).float()
    codes = (rows / scale + torch.rand(rows.shape, generator=generator)).floor() + zero
    return (codes.clamp(0, 255) - zero) * scale


def train(task: tuple[str, int, str, int, dict[str, Any]]) -> dict[str, Any]:
    """One run: its test loss, and that of its rows in 8 bits."""
    folder, times, kind, seed, options = task
    data = _data(folder, "cpu")
    config = RunConfig(data=data_identity(data.prepared), seed=seed, **options)
    trial = Trial(config, build_model(config, data.prepared), data.prepared.names)
    stored, generator = trial.embeddings.stored.data, torch.Generator().manual_seed(seed)
    if kind != "float32":
        stored.copy_(rounded(stored, "to nearest", generator))
    for batches in data.training(config):
        before = stored.clone() if kind != "float32" else stored
        trial.step(batches)
        if kind != "float32":
            changed = (stored != before).any(1).nonzero().flatten()
            stored[changed] = rounded(stored[changed], kind, generator)
    test = evaluate(trial, data, "test").log_loss
    trial.quantize_(8)
    after = evaluate(trial, data, "test").log_loss
    return {"times": times, "kind": kind, "seed": seed, "test": test, "int8": after}


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="prepared data")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    data, full = Prepared(arguments.data), 4 * D
    lines = arguments.out.with_suffix(".jsonl")
    runs = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(run["times"], run["kind"], run["seed"]) for run in runs}
    tasks = []
    for times in SIZES:
        budget = 2 * full * sum(data.cardinalities) // times
        planned = planning.plan(data, budget, D, optimizer="adagrad", dtypes=(torch.float32,))
        for kind in KINDS:
            for seed in range(arguments.seeds):
                if (times, kind, seed) not in done:
                    tasks.append((str(arguments.data), times, kind, seed, planning.options_of(planned)))
    tasks.sort(key=lambda task: task[3])
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool, open(lines, "a") as file:
        for run in pool.imap_unordered(train, tasks):
            runs.append(run)
            file.write(json.dumps(run) + "\n")
            file.flush()
    rows = []
    for times in SIZES:
        after = {run["seed"]: run["int8"] for run in runs if (run["times"], run["kind"]) == (times, "float32")}
        for kind in KINDS:
            found = {run["seed"]: run["int8"] for run in runs if (run["times"], run["kind"]) == (times, kind)}
            lost = [100 * (found[seed] / after[seed] - 1) for seed in sorted(found)]
            error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
            row = {"times": times, "kind": kind, "runs": len(lost), "test": statistics.mean(found.values())}
            rows.append({**row, "percent": statistics.mean(lost), "percent_error": error})
            print(f"{times:>4}x {kind:12} {row['test']:.5f} {rows[-1]['percent']:+.3f} ± {error:.3f} %")
    head = {"rows_trained": len(data.split("train")), "versions": versions(), "commit": commit(), "rows": rows}
    arguments.out.write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Test log loss of tables that are trained in 8 bits, against those that are rounded to 8 bits once trained.

    python benchmarks/int8_training.py DATA --out benchmarks/results/int8_training.json --workers 2

What ``RunConfig(row_dtype="int8")`` does, with float32 tensors so that it may also round to the nearest: after each
step the rows that it changed are rounded by ``ops.codes.quantize``, each number up or down at random or to the nearest.
Adagrad's state stays float32. DLRM with the float32 plans of ``plan_quality.py``: D = 16, batch 128, one epoch, Adagrad
at 0.01.

Results are written as they come, into OUT.jsonl; runs that it has are not trained again.
"""

import statistics
from typing import Any

import result_file
import torch
from plan_quality import D, all_runs, begun, parser_of, standard_error
from torch import Tensor

from quorem.data.prepared import Prepared
from quorem.experiments import planning
from quorem.ops.codes import dequantize, quantize
from quorem.provenance import versions
from quorem.training.loop import evaluate

SIZES = (4, 16, 60, 250)
KINDS = ("float32", "at random", "to nearest")


def rounded(rows: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """``rows`` as 8 bits hold them."""
    noise = None if kind == "to nearest" else torch.rand(rows.shape, generator=generator, device=rows.device)
    return dequantize(quantize(rows, 8, noise), D, 8)


def train(task: tuple[str, str, int, str, int, dict[str, Any]]) -> dict[str, Any]:
    """One run: its test loss, and that of its rows in 8 bits."""
    folder, device, times, kind, seed, options = task
    data, config, trial = begun(folder, device, seed=seed, **options)
    stored, generator = trial.embeddings.stored.data, torch.Generator(device).manual_seed(seed)
    if kind != "float32":
        stored.copy_(rounded(stored, "to nearest", generator))
    for batches in data.training(config):
        before = stored.clone() if kind != "float32" else stored
        trial.step(batches)
        if kind != "float32":
            changed = (stored != before).any(1, keepdim=True)
            stored.copy_(torch.where(changed, rounded(stored, kind, generator), stored))
    test = evaluate(trial, data, "test").log_loss
    trial.quantize_(8)
    after = evaluate(trial, data, "test").log_loss
    return {"times": times, "kind": kind, "seed": seed, "test": test, "int8": after}


def main() -> None:
    """Read the command line, train, write."""
    arguments = parser_of(__doc__, seeds=40).parse_args()
    data, full = Prepared(arguments.data), 4 * D
    options = {}
    for times in SIZES:
        budget = 2 * full * sum(data.cardinalities) // times
        planned = planning.plan(data, budget, D, optimizer="adagrad", dtypes=(torch.float32,))
        options[times] = planning.options_of(planned)
    tasks = {
        (times, kind, seed): (times, kind, seed, options[times])
        for seed in range(arguments.seeds)
        for times in SIZES
        for kind in KINDS
    }
    runs = all_runs(train, arguments, tasks, ("times", "kind", "seed"))
    rows = []
    for times in SIZES:
        after = {run["seed"]: run["int8"] for run in runs if (run["times"], run["kind"]) == (times, "float32")}
        for kind in KINDS:
            found = {run["seed"]: run["int8"] for run in runs if (run["times"], run["kind"]) == (times, kind)}
            lost = [100 * (found[seed] / after[seed] - 1) for seed in sorted(found) if seed in after]
            error = standard_error(lost)
            row = {"times": times, "kind": kind, "runs": len(lost), "test": statistics.mean(found.values())}
            row["median"] = statistics.median(lost)
            rows.append({**row, "percent": statistics.mean(lost), "percent_error": error})
            percent = f"{rows[-1]['percent']:+.3f} ± {error:.3f} %, median {row['median']:+.3f} %"
            print(f"{times:>4}x {kind:12} {row['test']:.5f} {percent}")
    head = {"rows_trained": len(data.split("train")), "versions": versions(), "commit": arguments.commit}
    head |= {"device": arguments.device, "rows": rows}
    result_file.write(arguments.out, head)


if __name__ == "__main__":
    main()

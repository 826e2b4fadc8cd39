"""The eager training step on a GPU beside FBGEMM's on the same tables, with the backward pass on either thread.

    PYTHONPATH=src python3 benchmarks/eager.py --out DIR [--commit SHA]

Writes ``DIR/eager.json``. An eager step of a small batch is bound by the host. PyTorch runs the backward pass on a
thread of its own for each GPU; ``torch.autograd.set_multithreading_enabled(False)`` runs it on the thread that calls
``backward``. Both are measured, for each provider, in turns on the same batches.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import grid, measure, run

PROVIDERS = ("fbgemm", "fbgemm_fastest", "fused")
THREADS = {"engine": True, "caller": False}  # who runs the backward pass, and whether autograd is multithreaded then
SETTINGS = [(16, "zipf", 128), (16, "zipf", 2048), (64, "zipf", 2048), (128, "zipf", 2048), (16, "uniform", 2048)]


def on_thread(step: Callable[[], Any], multithreaded: bool) -> Callable[[], None]:
    """``step`` with autograd's threads on or off."""

    def call() -> None:
        with torch.autograd.set_multithreading_enabled(multithreaded):
            step()

    return call


def measured(dim: int, how: str, batch: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each provider and thread."""
    ids = [grid.draw_ids(how, CARDINALITIES, batch, seed=seed).to(device) for seed in range(4)]
    calls = {}
    for provider in PROVIDERS:
        contender = run.build(provider, "QR(4)", "step", CARDINALITIES, dim, device)
        steps = [run.operation("step", contender, rows) for rows in ids]
        for thread, multithreaded in THREADS.items():
            for step in steps:
                on_thread(step, multithreaded)()
            call = run.rotation([on_thread(step, multithreaded) for step in steps])
            calls[provider, thread] = measure.Call(provider, call)
    measure.time_in_turns(list(calls.values()), device, measure.EFFORTS[device.type])
    rows = []
    for (provider, thread), timed in calls.items():
        q20, median, q80 = (round(x, 2) for x in timed.quantiles())
        setting = {"dim": dim, "ids": how, "batch": batch, "provider": provider, "thread": thread}
        rows.append(setting | {"median_us": median, "q20_us": q20, "q80_us": q80, "samples": len(timed.seconds)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    options = parser.parse_args()
    device = torch.device("cuda")
    command = "python benchmarks/eager.py"
    results: dict[str, Any] = {"facts": run.facts_of_run(device, command, options.commit), "rows": []}
    for setting in SETTINGS:
        rows = measured(*setting, device)
        results["rows"] += rows
        for row in rows:
            print(*row.values(), flush=True)
        torch.cuda.empty_cache()
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "eager.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

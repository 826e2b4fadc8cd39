"""Lookup and training step on the CPU against one nn.EmbeddingBag a table, alone and beside a busy process.

    python benchmarks/cpu_loop.py --out benchmarks/results/cpu_loop.json

The 26 Criteo Kaggle features at D = 16, ``QR(4)``, Zipf ids, Adagrad, all cores: ``fused`` and ``loop`` of ``quorem
bench``. They take turns. First with the machine as it is, then beside a process that keeps one core busy and is started
here. The loop is measured on one thread and on all, since torch's threads wait for each other on a busy machine; the
quicker of the two counts. A row has the medians, and how many times as fast ``fused`` is; the aim is 8.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quorem.data.shape import CARDINALITIES, scaled_cardinalities
from quorem.experiments.bench import facts, grid, measure, run

DIM, SCHEME, BATCHES = 16, "QR(4)", (1, 128, 2048, 16384)
RUNS_BEFORE = 16  # enough to choose between one thread and several
BUSY = "while True: pass"


@contextmanager
def busy_process(wanted: bool) -> Any:
    """A process that computes all the time, if wanted."""
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def on_threads(call: Callable[[], Any], threads: int) -> Callable[[], Any]:
    """``call``, with that many threads of torch."""

    def set_and_call() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call()

    return set_and_call


def measured(mode: str, cardinalities: tuple[int, ...], effort: measure.Effort) -> list[dict[str, Any]]:
    """A row for each batch size, alone and beside another process."""
    cpu, cores, rows = torch.device("cpu"), os.cpu_count() or 1, []
    contenders = {
        name: run.build(name, SCHEME, run.RULE_OF_MODE[mode], cardinalities, DIM, cpu) for name in ("loop", "fused")
    }
    for batch in BATCHES:
        ids = [grid.draw_ids("zipf", cardinalities, batch, seed=seed) for seed in range(grid.ROTATION)]
        for beside in (False, True):
            with busy_process(beside):
                calls = []
                for name, threads in (("loop", 1), ("loop", cores), ("fused", cores)):
                    operations = [run.operation(mode, contenders[name], each) for each in ids]
                    calls.append(measure.Call(name, on_threads(run.rotation(operations), threads)))
                for call in calls:
                    for _ in range(RUNS_BEFORE):
                        call.run()
                measure.time_in_turns(calls, cpu, effort, grid.ROTATION)
            one, several, fused = (call.quantiles() for call in calls)
            loop, threads = (one, 1) if one[1] < several[1] else (several, cores)
            row = {"mode": mode, "batch": batch, "beside": "a busy process" if beside else "nothing"}
            for name, (low, median, high) in (("loop", loop), ("fused", fused)):
                row |= {f"{name}_us": round(median, 1), f"{name}_q20": round(low, 1), f"{name}_q80": round(high, 1)}
            row |= {
                "loop_threads": threads,
                "times_as_fast": round(loop[1] / fused[1], 2),
                "load": round(os.getloadavg()[0], 2),
            }
            rows.append(row)
            print(*row.values(), flush=True)
    del contenders
    gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="of Criteo's cardinalities")
    parser.add_argument("--seconds", type=float, default=1.0, help="of samples for each time")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    cardinalities = CARDINALITIES if options.scale == 1 else scaled_cardinalities(options.scale)
    effort = measure.Effort(total=options.seconds)
    head = facts.facts_of_run(torch.device("cpu"), "python benchmarks/cpu_loop.py")
    head |= {"load_before": round(os.getloadavg()[0], 2), "scale": options.scale}
    rows = [row for mode in ("forward", "step") for row in measured(mode, cardinalities, effort)]
    options.out.write_text(json.dumps({"facts": head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Lookup and training step on the CPU against one nn.EmbeddingBag a table, alone and beside a busy process.

    python benchmarks/cpu_loop.py --out benchmarks/results/cpu_loop.json

The 26 Criteo Kaggle features at D = 16, ``QR(4)``, Zipf ids, Adagrad, all cores: ``fused`` and ``loop`` of ``quorem
bench``. They take turns, each after a pause and an untimed run: torch's threads spin for some milliseconds after they
were used, and would take a core from the next. First with the machine as it is, then beside a process that keeps one
core busy and is started here. The loop is measured on one thread and on all, since torch's threads wait for each other
on a busy machine; the quicker of the two counts. ``fused`` chooses; its time on one thread is there to compare. A row
has the medians, the means, and how many times as fast ``fused`` is by its median; the aim is 8. The command takes about
90 seconds.
"""

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import result_file
import torch

from quorem.data.shape import CARDINALITIES, scaled_cardinalities
from quorem.experiments.bench import facts, grid, run

DIM, SCHEME, BATCHES = 16, "QR(4)", (1, 128, 2048, 16384)
RUNS_BEFORE = 12  # enough to choose between one thread and several
TURNS, PAUSE = 8, 0.02  # of each call; seconds before each
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


def times_in_turns(calls: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """The microseconds of each run of each call, within about so many seconds."""
    times: list[list[float]] = [[] for _ in calls]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(TURNS):
            for call, of_call in zip(calls, times, strict=True):
                time.sleep(PAUSE)
                call()
                end = time.perf_counter() + seconds / TURNS
                while True:
                    began = time.perf_counter()
                    call()
                    of_call.append(1e6 * (time.perf_counter() - began))
                    if time.perf_counter() > end:
                        break
    finally:
        if collecting:
            gc.enable()
    return times


def measured(mode: str, cardinalities: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
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
                for name, threads in (("loop", 1), ("loop", cores), ("fused", 1), ("fused", cores)):
                    operations = [run.operation(mode, contenders[name], each) for each in ids]
                    calls.append(on_threads(run.rotation(operations), threads))
                for call in calls:
                    for _ in range(RUNS_BEFORE):
                        call()
                one, several, fused_on_one, fused = times_in_turns(calls, seconds)
            loop, threads = min((one, 1), (several, cores), key=lambda pair: statistics.median(pair[0]))
            row = {"mode": mode, "batch": batch, "beside": "a busy process" if beside else "nothing"}
            for name, times in (("loop", loop), ("fused", fused)):
                low, median, high = np.quantile(times, [0.2, 0.5, 0.8]).round(1).tolist()
                row |= {f"{name}_us": median, f"{name}_q20": low, f"{name}_q80": high}
                row[f"{name}_mean"] = round(statistics.fmean(times), 1)
            row |= {
                "fused_on_one_thread_us": round(statistics.median(fused_on_one), 1),
                "loop_threads": threads,
                "times_as_fast": round(statistics.median(loop) / statistics.median(fused), 2),
                "load": round(os.getloadavg()[0], 2),
            }
            rows.append(row)
            print(*row.values(), flush=True)
    del contenders
    gc.collect()
    return rows


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of Criteo's cardinalities")
    parser.add_argument("--seconds", type=float, default=0.4, help="of runs for each time")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    cardinalities = CARDINALITIES if options.scale == 1 else scaled_cardinalities(options.scale)
    head = facts.facts_of_run(torch.device("cpu"), "python benchmarks/cpu_loop.py")
    head |= {"load_before": round(os.getloadavg()[0], 2), "scale": options.scale}
    rows = [row for mode in ("forward", "step") for row in measured(mode, cardinalities, options.seconds)]
    result_file.write(options.out, {"facts": head, "rows": rows})


if __name__ == "__main__":
    main()

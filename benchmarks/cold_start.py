"""What compiling the CPU kernels costs at first use, and what loading them costs later.

    python benchmarks/cold_start.py --out benchmarks/results/cold_start.json

A process with an empty folder for machine code imports the library, looks up a batch, takes a backward pass, a step of
Adagrad and one of AMSGrad, then bags and a lookup in 8 bits. A second process does the same with what the first has
kept. Then both again with QUOREM_FAST_COMPILE=0, which is Numba's usual way (see ``ops/cpu/inlining.py``). A row has
the seconds of each first call, on the clock and of the processor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def first_calls() -> None:
    """Time the first calls of this process and print them."""
    rows = []

    def timed(name: str, call: Any) -> Any:
        clock, processor = time.perf_counter(), time.process_time()
        result = call()
        seconds = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - processor}
        rows.append({"call": name, **{key: round(value, 3) for key, value in seconds.items()}})
        return result

    def load() -> Any:
        import quorem
        from quorem.ops import cpu

        cpu.kernels()
        return quorem

    quorem = timed("import", load)
    import torch

    tables = [quorem.Table(f"C{i}", 10_000 + i, 16, quorem.QR(4)) for i in range(4)]
    plain, adagrad, amsgrad = (quorem.EmbeddingCollection(tables) for _ in range(3))
    quorem.optim.apply_in_backward(adagrad, quorem.optim.Adagrad, lr=0.01)
    quorem.optim.apply_in_backward(amsgrad, quorem.optim.AMSGrad, lr=0.01)
    ids, offsets = torch.randint(0, 10_000, (128, 4)), torch.arange(0, 128, 4)
    bags = quorem.EmbeddingBag(10_000, 16, quorem.QR(4), mode="sum")
    few_bits = quorem.quantize_(quorem.EmbeddingCollection(tables), 8)
    timed("lookup", lambda: plain(ids))
    timed("backward", lambda: plain(ids).sum().backward())
    timed("step", lambda: adagrad(ids).sum().backward())
    timed("step of AMSGrad", lambda: [amsgrad(ids).sum().backward() for _ in range(2)])
    timed("bags", lambda: bags(ids[:, 0], offsets).sum().backward())
    timed("lookup in 8 bits", lambda: few_bits(ids))
    print(json.dumps(rows))


def measured(fast: bool) -> list[dict[str, Any]]:
    """The rows of a process with an empty folder and of one after it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "QUOREM_FAST_COMPILE": str(int(fast))}
        for kernels in ("compiled", "kept"):
            command = [sys.executable, __file__, "--first-calls"]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            for row in json.loads(done.stdout):
                rows.append({"kernels": kernels, "fast_compile": fast, **row})
                print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first-calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_calls:
        first_calls()
        return
    if options.out is None:
        parser.error("--out is needed")
    import result_file

    head = {**result_file.made_by(), "command": "python benchmarks/cold_start.py"}
    rows = [row for fast in (True, False) for row in measured(fast)]
    result_file.write(options.out, head | {"rows": rows})


if __name__ == "__main__":
    main()

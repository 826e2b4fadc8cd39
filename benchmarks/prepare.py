"""Time and memory of preparing a file of Criteo's form (docs/data.md).

    python benchmarks/prepare.py --work DIR --rows 1000000 45840617 --out benchmarks/results/prepare.json

The raw files are drawn from the synthetic log with the real cardinalities and kept in DIR. Each measurement is a fresh
process; imports are not timed.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from quorem.data.criteo import prepare_criteo
from quorem.data.raw import write_raw
from quorem.data.synthetic import ClickLog
from quorem.files.provenance import commit


def child(raw: str, out: str) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    prepare_criteo(Path(raw), Path(out), overwrite=True)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"wall_s": round(wall, 3), "cpu_s": round(cpu, 3), "peak_gb": round(peak, 3)}))


def run(work: Path, rows: list[int], rounds: int, out: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    results = []
    for count in rows:
        raw = work / f"criteo-{count}.txt"
        if not raw.exists():
            write_raw(ClickLog(), count, raw)
        samples = []
        for _ in range(rounds):
            command = [sys.executable, __file__, "--child", str(raw), str(work / "prepared")]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            samples.append(json.loads(done.stdout.splitlines()[-1]))
            shutil.rmtree(work / "prepared", ignore_errors=True)
            print(count, samples[-1], flush=True)
        middle = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        results.append({"rows": count, "work": "quorem prepare", **middle, "rounds": samples})
    facts = {"commit": commit(), "date": date.today().isoformat(), "cores": os.cpu_count()}
    text = json.dumps({**facts, "python": platform.python_version(), "results": results}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/prepare"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prepare.json"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    else:
        run(options.work, options.rows, options.rounds, options.out)


if __name__ == "__main__":
    main()

"""Time to plan many large tables.

    python benchmarks/plan.py --out benchmarks/results/plan.json

10,000 tables of 1 to 10^9 ids, evenly over the orders of magnitude, widths 1, 8, 16 and 64, optimizer state included.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

from quorem import Table, plan
from quorem.provenance import commit, versions


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--tables", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    draw = random.Random(0)
    sizes = [(int(10 ** draw.uniform(0, 9)), draw.choice((1, 8, 16, 64))) for _ in range(arguments.tables)]
    tables = [Table(f"t{i}", n, d) for i, (n, d) in enumerate(sizes)]
    rows = []
    for optimizer in (None, "adagrad", "amsgrad"):
        for budget in ("500MB", "50GB", "5TB"):
            seconds, busy = [], []
            for _ in range(arguments.repeats):
                began, clock = time.perf_counter(), time.process_time()
                planned = plan(tables, budget, optimizer=optimizer)
                seconds.append(time.perf_counter() - began)
                busy.append(time.process_time() - clock)
            times = {"seconds": round(min(seconds), 2), "cpu_seconds": round(min(busy), 2)}
            row = {"optimizer": optimizer, "budget": budget, **times, "bytes": planned.bytes, "cost": planned.cost}
            rows.append({**row, "load": round(os.getloadavg()[0], 1)})
            print(json.dumps(rows[-1]), flush=True)
    head = {"tables": arguments.tables, "repeats": arguments.repeats, "versions": versions(), "commit": commit()}
    if arguments.out is not None:
        text = json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

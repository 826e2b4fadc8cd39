"""Time to plan many large tables.

    python benchmarks/plan.py --out benchmarks/results/plan.json

10,000 tables of 1 to 10^9 ids, evenly over the orders of magnitude, widths 1, 8, 16 and 64, optimizer state included;
then 10,000 tables of 1 to 10^5 ids whose frequencies are known (91 million ids, in no order).
"""

import json
import os
import random
import time
from typing import Any

import result_file
import torch

from quorem import Table, plan
from quorem.files.provenance import commit, versions


def drawn_tables(number: int, most: int) -> list[Table]:
    """Tables of 1 to 10**most ids."""
    draw = random.Random(0)
    sizes = [(int(10 ** draw.uniform(0, most)), draw.choice((1, 8, 16, 64))) for _ in range(number)]
    return [Table(f"t{i}", n, d) for i, (n, d) in enumerate(sizes)]


def drawn_counts(n: int, draw: torch.Generator) -> torch.Tensor:
    """How often each of ``n`` ids occurs: Zipf's law with noise, ids in no order."""
    falling = 1e6 / (1 + torch.arange(n)) ** 1.05 * torch.rand(n, generator=draw)
    return falling.long()[torch.randperm(n, generator=draw)]


def measured(
    tables: list[Table], budget: str, optimizer: str | None, counts: dict[str, torch.Tensor], repeats: int
) -> dict[str, Any]:
    """The quickest of some plans for a budget."""
    seconds, busy = [], []
    for _ in range(repeats):
        began, clock = time.perf_counter(), time.process_time()
        planned = plan(tables, budget, optimizer=optimizer, frequencies=counts or None)
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - clock)
    row = {"optimizer": optimizer, "budget": budget, "ids_counted": sum(map(len, counts.values()))}
    row |= {"seconds": round(min(seconds), 2), "cpu_seconds": round(min(busy), 2)}
    row |= {"bytes": planned.bytes, "cost": planned.cost, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--tables", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    tables = drawn_tables(arguments.tables, 9)
    for optimizer in (None, "adagrad", "amsgrad"):
        for budget in ("1GB", "50GB", "5TB"):
            rows.append(measured(tables, budget, optimizer, {}, arguments.repeats))
    tables = drawn_tables(arguments.tables, 5)
    draw = torch.Generator().manual_seed(0)
    counts = {table.name: drawn_counts(table.num_embeddings, draw) for table in tables}
    for budget in ("100MB", "1GB"):
        rows.append(measured(tables, budget, "adagrad", counts, 1))
    head = {"tables": arguments.tables, "repeats": arguments.repeats, "versions": versions(), "commit": commit()}
    result_file.write(arguments.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()

"""How long ``topk`` and ``cross_entropy`` over a composed table take, and how much memory, against the full table.

    python benchmarks/catalogue.py --out benchmarks/results/catalogue.json

``topk`` is compared with ``torch.topk(queries @ weight.T, k)`` on a table of the same size, ``cross_entropy`` with
``F.cross_entropy(queries @ weight.T, targets)`` and its backward pass. Each case runs in a process of its own, where
both ways alternate on one thread; times are medians of CPU seconds, which other work on the machine hardly changes.
Memory is what a way adds to the peak of the process, its table included.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import result_file
import torch
import torch.nn.functional as F

import quorem

D, K, COMPRESSION = 64, 10, 60
SIZES = (1_000_000, 2_200_000)
SCHEMES = ("qr", "pool", "mult")


def scheme_of(name: str, n: int) -> quorem.Scheme:
    rows = n // COMPRESSION
    schemes = {
        "qr": quorem.QR(COMPRESSION, operation="add"),
        "mult": quorem.QR(COMPRESSION),
        "pool": quorem.HotCold(rows // 2, cold=quorem.Pool(rows // 2)),
    }
    return schemes[name]


def peak() -> int:
    """Bytes of the process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def median(work: Callable[[], object], other: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median CPU seconds of two ways, which alternate."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for way, taken in zip((work, other), times, strict=True):
            began = time.process_time()
            way()
            taken.append(time.process_time() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def best(name: str, n: int, batch: int, repeat: int) -> dict[str, Any]:
    torch.manual_seed(0)
    queries, before = torch.randn(batch, D), peak()
    items = quorem.Embedding(n, D, scheme_of(name, n), init_std=1.0)
    values, _ = items.topk(queries, K)
    mine = peak()
    full = items.weight.detach().clone()
    expected = torch.topk(queries @ full.T, K).values
    theirs = peak()
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    ours, dense = median(lambda: items.topk(queries, K), lambda: torch.topk(queries @ full.T, K), repeat)
    return {
        **{"op": "topk", "scheme": name, "n": n, "batch": batch, "k": K, "ms": 1000 * ours, "full_ms": 1000 * dense},
        **{"bytes": mine - before, "full_bytes": theirs - mine},
    }


def loss(name: str, n: int, batch: int, repeat: int) -> dict[str, Any]:
    torch.manual_seed(0)
    queries, targets, before = torch.randn(batch, D, requires_grad=True), torch.randint(n, (batch,)), peak()
    items = quorem.Embedding(n, D, scheme_of(name, n), init_std=0.1)

    def ours() -> torch.Tensor:
        items.zero_grad()
        value = quorem.cross_entropy(queries, items, targets)
        value.backward()
        return value

    mine_loss = ours()
    mine = peak()
    full = items.weight.detach().clone().requires_grad_()

    def dense() -> torch.Tensor:
        full.grad = None
        value = F.cross_entropy(queries @ full.T, targets)
        value.backward()
        return value

    torch.testing.assert_close(mine_loss, dense(), rtol=1e-4, atol=1e-4)
    theirs = peak()
    seconds, full_seconds = median(ours, dense, repeat)
    return {
        **{"op": "cross_entropy", "scheme": name, "n": n, "batch": batch, "ms": 1000 * seconds},
        **{"full_ms": 1000 * full_seconds, "bytes": mine - before, "full_bytes": theirs - mine},
    }


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        op, *arguments = json.loads(options.case)
        print(json.dumps({"topk": best, "cross_entropy": loss}[op](*arguments)))
        return
    cases: list[tuple[Any, ...]] = [
        ("topk", scheme, n, batch, 21) for scheme in SCHEMES for n in SIZES for batch in (1, 32)
    ]
    cases += [("cross_entropy", scheme, SIZES[0], 512, 1) for scheme in SCHEMES]
    result: dict[str, Any] = {**result_file.made_by("torch"), "threads": 1, "dim": D, "rows": []}
    for case in cases:
        command = [sys.executable, __file__, "--out", str(options.out), "--case", json.dumps(case)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(row, flush=True)
        result["rows"].append(row)
    result_file.write(options.out, result)


if __name__ == "__main__":
    main()

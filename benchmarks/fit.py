"""Time and memory of the fit of a trained table by a scheme, on the CPU.

    python benchmarks/fit.py --out benchmarks/results/fit.json
    python benchmarks/fit.py --out benchmarks/results/fit.json --cases 5 7  # measure some anew, keep the others

Each fit runs in a process of its own. The trained table is half noise and half a product of two tables, so that no
scheme holds it exactly. ``extra_mb`` is how much more memory the process took at most during the fit than right before
it, when the trained and the stored tables were there already; ``error`` is relative to the norm of the table, each id
weighted by its frequency where those are given (those of Zipf's law, a third of the ids never seen).
"""

import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import result_file
import torch

from quorem import Embedding, schemes
from quorem.files.provenance import commit, versions
from quorem.fit import fit_
from quorem.paper.schemes import QR, ChineseRemainder, GeneralizedQR, Hash, Scheme

CASES: tuple[tuple[Scheme, bool], ...] = (
    (Hash(4), False),
    (QR(4, operation="concat"), False),
    (QR(4, operation="add"), False),
    (QR(4, operation="add"), True),
    (QR(4), False),
    (QR(4), True),
    (QR(60), False),
    (QR(60), True),
    (QR(4, permute=0), False),
    (GeneralizedQR(3), False),
    (GeneralizedQR(3), True),
    (ChineseRemainder(3, operation="add"), False),
)


def measure(scheme: Scheme, frequencies: bool, n: int, d: int, threads: int) -> dict:
    """One fit, in this process."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    trained = torch.empty(n, d).normal_(generator=draw)
    rows, few = torch.randn(n // 4, d, generator=draw), torch.randn(4, d, generator=draw)
    for j in range(4):
        trained[j * len(rows) : (j + 1) * len(rows)].addcmul_(rows, few[j])
    del rows
    counts = None
    if frequencies:
        counts = (2 * n / 3 / torch.arange(1, n + 1)).floor()[torch.randperm(n, generator=draw)]
    spec = scheme.spec(n, d)
    tables = [torch.zeros(shape) for shape in spec.shapes]
    before, load = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, os.getloadavg()[0]
    began, busy = time.perf_counter(), time.process_time()
    fit_(tables, spec, trained, counts)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "scheme": repr(scheme),
        "frequencies": frequencies,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(busy, 1),
        "load": round(load, 1),
        "table_mb": round(trained.nbytes / 2**20),
        "stored_mb": round(sum(table.nbytes for table in tables) / 2**20, 1),
        "extra_mb": round(extra / 2**10),
        "error": round(error_of(spec, tables, trained, counts), 6),
    }


def error_of(spec: schemes.TableSpec, tables: list, trained: torch.Tensor, counts: torch.Tensor | None) -> float:
    """Weighted norm of what the fit misses, over that of the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Embedding(spec.num_embeddings, spec.embedding_dim, spec.scheme)
    with torch.no_grad():
        for stored, table in zip(module.tables(), tables, strict=True):
            stored.copy_(table)
        missed = norm = 0.0
        for ids in torch.arange(len(trained)).split(2**18):
            weight = torch.ones(len(ids), 1) if counts is None else counts[ids, None]
            missed += float((weight * (module(ids) - trained[ids]).square()).sum())
            norm += float((weight * trained[ids].square()).sum())
    return (missed / norm) ** 0.5


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument(
        "--cases", type=int, nargs="*", default=range(len(CASES)), help="which of them; all where not given"
    )
    parser.add_argument("--case", type=int, help="measure one case in this process, and print it")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(*CASES[arguments.case], arguments.ids, arguments.dim, arguments.threads)))
        return
    config = {"ids": arguments.ids, "dim": arguments.dim, "threads": arguments.threads, "dtype": "float32"}
    head = {"config": config, "cores": os.cpu_count(), "versions": versions()}
    rows = kept_rows(arguments.out, head)
    for case in arguments.cases:
        run = [sys.executable, __file__, *sys.argv[1:], "--case", str(case)]
        row = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
        rows[case] = row | {"commit": commit()}
        print(json.dumps(rows[case]), flush=True)
        result_file.write(arguments.out, {**head, "rows": [rows[case] for case in sorted(rows)]})


def kept_rows(out: Path, head: dict) -> dict[int, dict]:
    """By case, the rows of a file of the same sizes and versions."""
    if not out.exists():
        return {}
    written = json.loads(out.read_text(encoding="utf-8"))
    if any(written.get(key) != value for key, value in head.items()):
        raise ValueError(f"{out} has other sizes, cores or versions than this run: remove it, or write another file")
    case_of = {(repr(scheme), counted): case for case, (scheme, counted) in enumerate(CASES)}
    return {case_of[row["scheme"], row["frequencies"]]: row for row in written["rows"]}


if __name__ == "__main__":
    main()

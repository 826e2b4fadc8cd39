"""Time and memory of the fit of a trained table by a scheme, on the CPU.

    python benchmarks/fit.py --out benchmarks/results/fit.json

Each fit runs in a process of its own. The trained table is half noise and half a product of two tables, so that no
scheme holds it exactly. Frequencies, where given, are those of Zipf's law, a third of the ids never seen. ``extra_mb``
is how much more memory the process took at most during the fit than right before it, when the trained and the stored
tables were there already.
"""

import json
import os
import resource
import subprocess
import sys
import time

import result_file
import torch

from quorem.files.provenance import commit, versions
from quorem.fit import fit_
from quorem.paper.schemes import QR, ChineseRemainder, GeneralizedQR, Scheme

CASES: tuple[tuple[Scheme, bool], ...] = (
    (QR(4), False),
    (QR(4), True),
    (QR(60), False),
    (QR(60), True),
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
    began = time.perf_counter()
    fit_(tables, spec, trained, counts)
    seconds = time.perf_counter() - began
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "scheme": repr(scheme),
        "frequencies": frequencies,
        "seconds": round(seconds, 1),
        "load": round(load, 1),
        "extra_mb": round(extra / 2**10),
    }


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--case", type=int, help="measure one case in this process, and print it")
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(*CASES[arguments.case], arguments.ids, arguments.dim, arguments.threads)))
        return
    config = {"ids": arguments.ids, "dim": arguments.dim, "threads": arguments.threads, "dtype": "float32"}
    head = {"config": config, "cores": os.cpu_count(), "versions": versions(), "commit": commit()}
    rows = []
    for case in range(len(CASES)):
        run = [sys.executable, __file__, *sys.argv[1:], "--case", str(case)]
        rows.append(json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
        result_file.write(arguments.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()

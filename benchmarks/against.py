"""Two source trees against each other: the same lookups and training steps, on the same ids, in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before . --out ratios.json [--device cuda] [--mode step --batch 2048 ...]

Each tree runs in a process of its own, by its public names only, and the two take turns: a sample of one, a sample of
the other, in an order that reverses each time. A row has the median time of each and the ratio after / before: its
median over the pairs of samples, their 20% and 80% quantiles, and the ratio of the shortest samples. ``same_bits`` says
whether both ended with the same vectors. ``--processes`` starts both trees anew so many times: on some machines one
process is slower than another of the same tree as long as it lives. ``--clock processor`` counts the time of the
process on its cores instead of the time that passes, for a machine that others use too; with one thread. ``--pin``
keeps both trees on one core, since only one of them works at a time, and the backward pass on the thread that calls
it: so steps that the host bounds can be compared. Rows have the time on cores beside the time that passes. ``--out``
may end in .json or .csv. The exit code is 1 if a ratio is above ``--limit``.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

MODES = ("forward", "step", "step_amsgrad")
SCHEMES = ("QR(4)", "GeneralizedQR(3)", "ChineseRemainder(3)", "Path(4, (64,))", "Full()")


class Worker:
    """A tree at work in its own process; it answers one JSON line for each line it is sent."""

    def __init__(self, tree: Path, threads: int, core: int | None) -> None:
        source = tree / "src"
        if not (source / "quorem").is_dir():
            raise SystemExit(f"against: {tree} has no src/quorem")
        threading = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        environment = {**os.environ, **threading, "PYTHONPATH": str(source.resolve())}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("against_worker.py"), *([] if core is None else [str(core)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"against: a worker ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


Samples = dict[str, list[float]]  # microseconds of each tree, "before" and "after", and those on its cores


def compare(
    before: Worker, after: Worker, cell: dict[str, Any], rounds: int, seconds: float, earlier: dict[Any, Samples]
) -> Iterator[dict]:
    """The rows of one cell: eager, and in a CUDA graph where there is a GPU.

    ``earlier`` has the samples of earlier processes, which these are added to.
    """
    ready = {name: worker.ask(do="prepare", **cell) for name, worker in (("before", before), ("after", after))}
    for graph in ready["before"]["graphs"]:
        runs = max(
            worker.ask(do="runs", graph=graph, seconds=seconds)["runs"] for worker in (before, after)
        )  # the same number for both
        names = ("before", "after", "before on cores", "after on cores")
        us = earlier.setdefault((*cell.values(), graph), {name: [] for name in names})
        for turn in range(rounds):
            pair = [("before", before), ("after", after)]
            for name, worker in pair if turn % 2 == 0 else pair[::-1]:
                answer = worker.ask(do="time", graph=graph, runs=runs)
                us[name].append(answer["us"])
                us[f"{name} on cores"].append(answer["us_on_cores"])
        ratios = [b / a for a, b in zip(us["before"], us["after"], strict=True)]
        on_cores = [b / a for a, b in zip(us["before on cores"], us["after on cores"], strict=True)]
        yield {
            **cell,
            "graph": int(graph),
            "before_us": round(quantile(us["before"], 0.5), 3),
            "after_us": round(quantile(us["after"], 0.5), 3),
            "ratio": round(quantile(ratios, 0.5), 4),
            "ratio_q20": round(quantile(ratios, 0.2), 4),
            "ratio_q80": round(quantile(ratios, 0.8), 4),
            "ratio_of_best": round(min(us["after"]) / min(us["before"]), 4),
            "ratio_on_cores": round(quantile(on_cores, 0.5), 4),
            "before_us_on_cores": round(quantile(us["before on cores"], 0.5), 3),
            "after_us_on_cores": round(quantile(us["after on cores"], 0.5), 3),
            "samples": len(ratios),
            "same_bits": ready["before"]["digest"] == ready["after"]["digest"],
        }


def quantile(values: Sequence[float], part: float) -> float:
    """Between the two nearest values, as NumPy does.

    >>> quantile([4.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.2)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def commit_of(tree: Path) -> str:
    """The commit of a tree, with a plus where its sources differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src")) or "unknown"


def write(out: Path, made: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The rows so far: JSON with what made them, or CSV whose rows stand alone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".csv":
        whole = [{**row, **made} for row in rows]
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(whole[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(whole)
    else:
        out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="tree of the earlier commit")
    parser.add_argument("after", type=Path, help="tree of the later one")
    parser.add_argument("--out", type=Path, required=True, help="file.json or file.csv")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mode", action="append", choices=MODES, help="by default all")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="by default QR(4)")
    parser.add_argument("--batch", action="append", type=int, help="by default 128, 2048 and 16384; on a GPU 65536 too")
    parser.add_argument("--dim", action="append", type=int, help="by default 16; on a GPU 64 too")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each tree in each cell")
    parser.add_argument("--processes", type=int, default=1, help="of each tree, one after another; all samples count")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a sample")
    parser.add_argument("--scale", type=float, default=1.0, help="of Criteo's cardinalities")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"])
    parser.add_argument("--commits", nargs=2, metavar=("BEFORE", "AFTER"), help="of trees without a repository")
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio that passes")
    parser.add_argument("--pin", action="store_true", help="both trees on one core, each in one thread")
    return parser.parse_args()


def started(options: argparse.Namespace, process: int) -> tuple[Worker, Worker]:
    """A process of each tree, the ``process``-th."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[len(cores) // 2 + process] if options.pin else None
    return Worker(options.before, options.threads, core), Worker(options.after, options.threads, core)


def main() -> None:
    options = arguments()
    on_gpu = options.device == "cuda"
    dims = options.dim or ([16, 64] if on_gpu else [16])
    batches = options.batch or ([128, 2048, 16384, 65536] if on_gpu else [128, 2048, 16384])
    before, after = started(options, 0)
    about = [worker.ask(do="about", device=options.device) for worker in (before, after)]
    commits = options.commits or [commit_of(tree) for tree in (options.before, options.after)]
    made = {
        "before": commits[0],
        "after": commits[1],
        **{name: about[0][name] for name in ("torch", "device")},
        "threads": options.threads,
        "clock": options.clock,
        "pinned": options.pin,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    rows: list[dict[str, Any]] = []
    samples: dict[Any, Samples] = {}
    for process in range(options.processes):
        if process:
            before, after = started(options, process)
        rows = []
        for mode, scheme, dim, batch in product(options.mode or MODES, options.scheme or SCHEMES[:1], dims, batches):
            cell = {"mode": mode, "scheme": scheme, "dim": dim, "batch": batch, "scale": options.scale}
            cell |= {"device": options.device, "threads": options.threads, "clock": options.clock}
            for row in compare(before, after, cell, options.rounds, options.seconds, samples):
                rows.append({name: value for name, value in row.items() if name not in ("device", "threads", "clock")})
                times = f"{row['before_us']:>10,.1f} {row['after_us']:>10,.1f} us"
                where = "graph" if row["graph"] else "eager"
                bits = "" if row["same_bits"] else "  other bits"
                text = f"{mode:13} {scheme:20} D={dim:<4} B={batch:<6} {where} {times}  x{row['ratio']:.3f}{bits}"
                print(text, flush=True)
                if not process:
                    write(options.out, made, rows)
        write(options.out, made, rows)
        before.close()
        after.close()
    slower = [row for row in rows if row["ratio"] > options.limit]
    print(f"{len(slower)} of {len(rows)} ratios are above {options.limit:g}")
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    main()

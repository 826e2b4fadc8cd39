"""Two source trees against each other: the same lookups and training steps, on the same ids, in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before . --out ratios.json [--device cuda] [--mode step --batch 2048 ...]

Each tree runs in a process of its own, by its public names only, and the two take turns: a sample of one, a sample of
the other, in an order that reverses each time. A row has the median time of each and the ratio after / before: its
median over the pairs of samples, their 20% and 80% quantiles, and the ratio of the shortest samples. ``same_bits`` says
whether both ended with the same vectors. ``--clock processor`` counts the time of the process on its cores instead of
the time that passes, for a machine that others use too; with one thread. ``--pin`` keeps both trees on one core, since
only one of them works at a time, and the backward pass on the thread that calls it: so steps that the host bounds can
be compared. Rows have the time on cores beside the time that passes. The exit code is 1 if a ratio is above
``--limit``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median, quantiles
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


def compare(before: Worker, after: Worker, cell: dict[str, Any], rounds: int, seconds: float) -> Iterator[dict]:
    """The rows of one cell: eager, and in a CUDA graph where there is a GPU."""
    ready = {name: worker.ask(do="prepare", **cell) for name, worker in (("before", before), ("after", after))}
    for graph in ready["before"]["graphs"]:
        runs = max(
            worker.ask(do="runs", graph=graph, seconds=seconds)["runs"] for worker in (before, after)
        )  # the same number for both
        us: dict[str, list[float]] = {name: [] for name in ("before", "after", "before on cores", "after on cores")}
        for turn in range(rounds):
            pair = [("before", before), ("after", after)]
            for name, worker in pair if turn % 2 == 0 else pair[::-1]:
                answer = worker.ask(do="time", graph=graph, runs=runs)
                us[name].append(answer["us"])
                us[f"{name} on cores"].append(answer["us_on_cores"])
        ratios = [b / a for a, b in zip(us["before"], us["after"], strict=True)]
        on_cores = [b / a for a, b in zip(us["before on cores"], us["after on cores"], strict=True)]
        low, *_, high = quantiles(ratios, n=5, method="inclusive")
        yield {
            **cell,
            "graph": int(graph),
            "before_us": round(median(us["before"]), 3),
            "after_us": round(median(us["after"]), 3),
            "ratio": round(median(ratios), 4),
            "ratio_q20": round(low, 4),
            "ratio_q80": round(high, 4),
            "ratio_of_best": round(min(us["after"]) / min(us["before"]), 4),
            "ratio_on_cores": round(median(on_cores), 4),
            "before_us_on_cores": round(median(us["before on cores"]), 3),
            "after_us_on_cores": round(median(us["after on cores"]), 3),
            "samples": len(ratios),
            "same_bits": ready["before"]["digest"] == ready["after"]["digest"],
        }


def commit_of(tree: Path) -> str:
    """The commit of a tree, with a plus where its sources differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src")) or "unknown"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="tree of the earlier commit")
    parser.add_argument("after", type=Path, help="tree of the later one")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mode", action="append", choices=MODES, help="by default all")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="by default QR(4)")
    parser.add_argument("--batch", action="append", type=int, help="by default 128, 2048 and 16384; on a GPU 65536 too")
    parser.add_argument("--dim", action="append", type=int, help="by default 16; on a GPU 64 too")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each tree in each cell")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a sample")
    parser.add_argument("--scale", type=float, default=1.0, help="of Criteo's cardinalities")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"])
    parser.add_argument("--commits", nargs=2, metavar=("BEFORE", "AFTER"), help="of trees without a repository")
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio that passes")
    parser.add_argument("--pin", action="store_true", help="both trees on one core, each in one thread")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    on_gpu = options.device == "cuda"
    dims = options.dim or ([16, 64] if on_gpu else [16])
    batches = options.batch or ([128, 2048, 16384, 65536] if on_gpu else [128, 2048, 16384])
    cores = sorted(os.sched_getaffinity(0))
    core = cores[len(cores) // 2] if options.pin else None
    before, after = (Worker(tree, options.threads, core) for tree in (options.before, options.after))
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
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for mode, scheme, dim, batch in product(options.mode or MODES, options.scheme or SCHEMES[:1], dims, batches):
        cell = {"mode": mode, "scheme": scheme, "dim": dim, "batch": batch, "scale": options.scale}
        cell |= {"device": options.device, "threads": options.threads, "clock": options.clock}
        for row in compare(before, after, cell, options.rounds, options.seconds):
            rows.append({name: value for name, value in row.items() if name not in ("device", "threads", "clock")})
            times = f"{row['before_us']:>10,.1f} {row['after_us']:>10,.1f} us"
            where = "graph" if row["graph"] else "eager"
            bits = "" if row["same_bits"] else "  other bits"
            text = f"{mode:13} {scheme:20} D={dim:<4} B={batch:<6} {where} {times}  x{row['ratio']:.3f}{bits}"
            print(text, flush=True)
            options.out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    before.close()
    after.close()
    slower = [row for row in rows if row["ratio"] > options.limit]
    print(f"{len(slower)} of {len(rows)} ratios are above {options.limit:g}")
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    main()

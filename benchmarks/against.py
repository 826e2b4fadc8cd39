"""Two source trees against each other: the same lookups and training steps, on the same ids, in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/against.py /tmp/before . --out ratios.json [--device cuda] [--mode step --batch 2048 ...]

Each tree runs in a process of its own, by its public names only, and the two take turns: a sample of one, a sample of
the other, in an order that reverses each time. A row has the median time of each and the ratio after / before: its
median over the pairs of samples, and their 20% and 80% quantiles; and the same of the time on cores, which other work
on the machine hardly changes. ``same_bits`` says whether both ended with the same vectors. On a GPU each cell is
measured eager and in a CUDA graph. ``--pin`` keeps both trees on one core, since only one of them works at a time, and
the backward pass on the thread that calls it, for steps that the host bounds. The exit code is 1 if a ratio is above
``--limit``.
"""

import argparse
import json
import os
import subprocess
import sys
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
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("against_worker.py"), *([] if core is None else [str(core)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threading, "PYTHONPATH": str(source.resolve())},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"against: a worker ended with exit code {self.process.wait()}")
        return json.loads(line)


def compare(trees: dict[str, Worker], cell: dict[str, Any], rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows of one cell: eager, and in a CUDA graph where there is a GPU."""
    ready = {name: worker.ask(do="prepare", **cell) for name, worker in trees.items()}
    for graph in ready["before"]["graphs"]:
        runs = max(worker.ask(do="runs", graph=graph, seconds=seconds)["runs"] for worker in trees.values())
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for turn in range(rounds):
            for name in list(trees)[:: 1 if turn % 2 == 0 else -1]:
                samples[name].append(trees[name].ask(do="time", graph=graph, runs=runs))
        row = {**cell, "graph": int(graph), "samples": rounds}
        for clock, ending in (("us", ""), ("us_on_cores", "_on_cores")):
            before, after = ([sample[clock] for sample in samples[name]] for name in trees)
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            row[f"before_{clock}"], row[f"after_{clock}"] = round(median(before), 3), round(median(after), 3)
            row[f"ratio{ending}"] = round(median(ratios), 4)
            if not ending:
                low, *_, high = quantiles(ratios, n=5, method="inclusive")
                row |= {"ratio_q20": round(low, 4), "ratio_q80": round(high, 4)}
        yield row | {"same_bits": ready["before"]["digest"] == ready["after"]["digest"]}


def commit_of(tree: Path) -> str:
    """The commit of a tree, with a plus where its sources differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src")) or "unknown"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("before", type=Path, help="tree of the earlier commit")
    parser.add_argument("after", type=Path, help="tree of the later one")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mode", action="append", choices=MODES, help="by default all")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="by default QR(4)")
    parser.add_argument("--batch", action="append", type=int, help="by default 128, 2048 and 16384; on a GPU 65536 too")
    parser.add_argument("--dim", action="append", type=int, help="by default 16; on a GPU 64 too")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each tree in each cell")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a sample")
    parser.add_argument("--scale", type=float, default=1.0, help="of Criteo's cardinalities")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio that passes")
    parser.add_argument("--pin", action="store_true", help="both trees on one core, each in one thread")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    on_gpu = options.device == "cuda"
    dims = options.dim or ([16, 64] if on_gpu else [16])
    batches = options.batch or ([128, 2048, 16384, 65536] if on_gpu else [128, 2048, 16384])
    core = min(os.sched_getaffinity(0)) if options.pin else None
    places = {"before": options.before, "after": options.after}
    trees = {name: Worker(tree, options.threads, core) for name, tree in places.items()}
    made = {name: commit_of(tree) for name, tree in places.items()} | {
        "threads": options.threads,
        "pinned": options.pin,
    }
    made |= trees["before"].ask(do="about", device=options.device)
    rows: list[dict[str, Any]] = []
    for mode, scheme, dim, batch in product(options.mode or MODES, options.scheme or SCHEMES[:1], dims, batches):
        cell = {"mode": mode, "scheme": scheme, "dim": dim, "batch": batch, "scale": options.scale}
        cell |= {"device": options.device, "threads": options.threads}
        for row in compare(trees, cell, options.rounds, options.seconds):
            rows.append(row)
            times = f"{row['before_us']:>10,.1f} {row['after_us']:>10,.1f} us"
            place = "graph" if row["graph"] else "eager"
            bits = "" if row["same_bits"] else "  other bits"
            text = f"{mode:13} {scheme:20} D={dim:<4} B={batch:<6} {place} {times}  x{row['ratio']:.3f}{bits}"
            print(text, flush=True)
            options.out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    slower = [row for row in rows if row["ratio"] > options.limit]
    print(f"{len(slower)} of {len(rows)} ratios are above {options.limit:g}")
    raise SystemExit(1 if slower else 0)


if __name__ == "__main__":
    main()

"""Write the tables of the result files into the documents; a test compares. Run after a new benchmark:

    python benchmarks/result_tables.py

A table of this file stands between ``<!-- name -->`` and ``<!-- /name -->``. A table that a command prints stands
between the command, which may be broken over several lines, and ``<!-- end -->``:

    <!-- quorem bench --table benchmarks/results/cpu.csv --mode step -->
"""

import json
import re
import shlex
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from quorem.cli import app
from quorem.experiments.bench import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"dlrm": "DLRM", "dcn": "DCN"}
PLAN_SIZES = (4, 16, 60, 250, 1000)
PLAN_SETTINGS = {
    "hash": "hashing, every table alike",
    "QR": "`QR(c)`, every table alike",
    "narrow": "full tables with narrow rows",
    "plan": "**the plan**, in training",
    "plan, served": "**the plan**, served",
}
MOVIELENS_SIZES = (2, 4, 16, 60)
OTHER_SIZES = (2, 4, 16, 60, 250)
OTHER_METHODS = {"hash": "hashing", "QR": "`QR`", "narrow": "narrow"}

OTHER_LOGS = {
    "two": "two tables, counts as 1 / rank",
    "giant": "one of 100,000 ids, three of five",
    "once": "ids all seen once, and 500 others",
    "many": "80 tables of 300 ids",
    "flat": "three of 4,000, all as frequent",
    "rare": "three of 10,000, seen three times",
}


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machine(result: dict[str, Any]) -> str:
    """The machine, and whether other work shared it, as a line above a table."""
    load = result["load_before"]
    others = "otherwise idle" if load < 0.5 else f"shared with other work (load {load:.1f})"
    return f"{result['cores']} cores, {others}; torch {result['versions']['torch']}, commit {result['commit']}.\n\n"


def markdown(*rows: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def percent(run: dict[str, Any]) -> str:
    """The change of the test loss in percent, with its standard error."""
    return f"{run['percent']:+.2f} ± {run['percent_error']:.2f}"


def plan_quality() -> str:
    """Test log loss against full tables in percent, mean and standard error of the runs, at equal bytes."""
    return _over_full(results("plan_quality"), ("dlrm", "dcn"), PLAN_SIZES)


def movielens() -> str:
    """The same for MovieLens-100k."""
    return _over_full(results("movielens"), ("dlrm",), MOVIELENS_SIZES)


def _over_full(result: dict[str, Any], networks: Sequence[str], sizes: Sequence[int]) -> str:
    runs = {(r["network"], r["setting"], r["times"]): r for r in result["rows"]}
    full = runs["dlrm", "full", 1]["bytes"]
    rows = []
    for network, (setting, name) in product(networks, PLAN_SETTINGS.items()):
        cells = [runs.get((network, setting, times)) for times in sizes]
        texts = [percent(r) if r else "" for r in cells]
        for k, (times, r) in enumerate(zip(sizes, cells, strict=True)):
            if r is not None and setting != "plan, served" and r["bytes"] > 1.1 * full / times:
                texts[k] += f" at {full / r['bytes']:.0f}x, its least"
        if any(cells):
            rows.append((NAMES[network], name, *texts))
    return markdown(("", "", *(f"{times}x" for times in sizes)), *rows)


def other_logs() -> str:
    """Change of the test log loss against full tables on logs of other shapes; and the plan against the best other."""
    rows = []
    for name, about in OTHER_LOGS.items():
        found = {(r["times"], r["setting"]): r for r in results(f"other_logs/{name}")["rows"]}
        full = found[1, "full"]
        plans, differences = [], []
        for times in OTHER_SIZES:
            plan, most = found[times, "plan"], 1.1 * full["bytes"] / times
            plans.append(percent(plan))
            others = [found[times, setting] for setting in OTHER_METHODS if (times, setting) in found]
            best = min((r for r in others if r["bytes"] <= most), key=lambda r: r["test"], default=None)
            if best is None:
                differences.append("no other so small")
                continue
            pairs = zip(plan["losses"], best["losses"], strict=True)  # both in order of seeds
            over = [100 * (a - b) / full["test"] for a, b in pairs]
            mean, error = statistics.mean(over), statistics.stdev(over) / len(over) ** 0.5
            differences.append(f"{mean:+.2f} ± {error:.2f} {OTHER_METHODS[best['setting']]}")
        rows += [(about, "**the plan**", *plans), ("", "against others", *differences)]
    return markdown(("log", "", *(f"{times}x" for times in OTHER_SIZES)), *rows)


def medians(name: str) -> dict[tuple[str, int, int, str, str, int], float]:
    """Medians of Zipf ids in a file by mode, width, batch, provider, scheme and graph."""
    return {
        (r.mode, r.dim, r.batch, r.provider, r.scheme, r.graph): r.median_us
        for r in report.read(RESULTS / f"{name}.csv")
        if r.ids == "zipf"
    }


def against_fbgemm() -> str:
    """How many times as fast ``fused`` with QR(4) is as FBGEMM on full tables, in each of its settings."""
    rows = medians("h200_fbgemm")
    lines = []
    for mode, dim, batch in product(("forward", "step"), (16, 64), (2048, 65536)):
        cells = []
        for graph, provider in product((0, 1), ("fbgemm_full", "fbgemm_full_fastest")):
            fused = rows[mode, dim, batch, "fused", "QR(4)", graph]
            fbgemm = rows[mode, dim, batch, provider, "Full()", graph]
            cells.append(f"{fbgemm / fused:.2f}x")
        lines.append((f"{mode}, B = {batch}, D = {dim}", *cells))
    settings = ("default", "fastest", "default, CUDA graph", "fastest, CUDA graph")
    return markdown(("times as fast as FBGEMM on full tables", *settings), *lines)


def lookups_cpu() -> str:
    """Ratios of times on one CPU thread: few bits, hot and cold ids over one pool, narrow rows, and state in log8."""
    settings = product(("small", "full"), (2048, 65536))
    heads = {(size, 16, batch): f"{'in cache' if size == 'small' else size}, B = {batch}" for size, batch in settings}
    return _lookups(results("lookups_cpu"), heads)


def lookups_h200() -> str:
    """The same on an H200, in CUDA graphs: tables with all of their ids, and at D = 64 with a hundredth of them."""
    settings = product((("full", 16), ("small", 64)), (2048, 65536))
    heads = {(size, dim, batch): f"D = {dim}, B = {batch}" for (size, dim), batch in settings}
    return _lookups(results("lookups_h200"), heads, left_out=("lists", "8 bits", "4 bits"))


def _lookups(result: dict[str, Any], heads: dict[tuple[str, int, int], str], left_out: Sequence[str] = ()) -> str:
    times: dict[Any, float] = {}
    for row in result["rows"]:
        setting = row["tables"], row.get("dim", 16), row["batch"]
        times[row["part"], row["provider"], row.get("mode", "lookup"), setting] = row["p50_us"]
    lines = []
    for label, part, provider, base, mode in (
        ("8 bits against float32, lookup", "bits", "8 bits", "float32", "lookup"),
        ("4 bits against float32, lookup", "bits", "4 bits", "float32", "lookup"),
        ("one pool against `QR(4)`, lookup", "pool", "pool", "qr", "lookup"),
        ("one pool against `QR(4)`, step of Adagrad", "pool", "pool", "qr", "step"),
        ("the same with lists of hot ids, lookup", "pool", "lists", "qr", "lookup"),
        ("the same with lists of hot ids, step", "pool", "lists", "qr", "step"),
        (
            "rows of D/4 numbers against D at equal bytes, lookup",
            "narrow",
            "rows of {narrow}",
            "rows of {dim}",
            "lookup",
        ),
        ("the same, step", "narrow", "rows of {narrow}", "rows of {dim}", "step"),
        ("state in log8 against float32, step", "state", "log8", "float32", "step"),
    ):
        if provider in left_out:
            continue
        ratios = []
        for setting in heads:
            dims = {"dim": setting[1], "narrow": setting[1] // 4}
            own, other = (times[part, name.format(**dims), mode, setting] for name in (provider, base))
            ratios.append(f"{own / other:.2f}")
        lines.append((label, *ratios))
    return markdown(("ratio of times", *heads.values()), *lines)


def epoch() -> str:
    """Seconds of the paper's epoch on an H200."""
    lines = [
        (
            f"{NAMES[row['network']]}, {row['optimizer']}; compiled {row['compiled']}",
            f"{row['training_s']:.0f} s",
            f"{row['command_s']:.0f} s",
            f"{row['rows_per_second'] / 1e6:.2f} million",
        )
        for row in results("epoch_h200")["rows"]
    ]
    return markdown(("39.3 million rows, batch 128", "training", "whole command", "rows a second"), *lines)


def optimizers() -> str:
    """Loss, bytes an id and time of a step of optimizers and widths."""
    result = results("optimizers")
    found = {(row["network"], row["tables"], row["optimizer"]): row for row in result["rows"]}
    rows = []
    for tables, optimizer in dict.fromkeys((row["tables"], row["optimizer"]) for row in result["rows"]):
        dlrm, dcn = (found[network, tables, optimizer] for network in ("dlrm", "dcn"))
        costs = (f"{dlrm['bytes']:.0f}", f"{dlrm['step_us']}")
        rows.append((tables, optimizer, percent(dlrm), percent(dcn), *costs))
    head = ("tables", "optimizer", "DLRM, %", "DCN, %", "bytes an id", "us a step")
    return machine(result) + markdown(head, *rows)


def first_minutes() -> str:
    """Seconds of each step of a newcomer."""
    result = results("first_minutes")
    steps = result["steps"]
    table = sum(steps[name]["seconds"] for name in ("prepare", "train", "predict"))
    demo = steps["demo"]
    rows = [
        ("`pip install`, packages from a nearby mirror", f"{steps['install']['seconds']:.0f} s"),
        ("`quorem --help`", f"{steps['help']['seconds']:.1f} s"),
        ("first vectors and gradients, CPU kernels compiled", f"{steps['first vectors']['seconds']:.0f} s"),
        ("the same in the next process", f"{steps['first vectors, again']['seconds']:.0f} s"),
        ("`quorem demo`", f"first line after {demo['first_line_s']:.0f} s, all after {demo['seconds']:.0f} s"),
        ("your own CSV of 10,000 rows: prepared, trained, scored", f"{table:.0f} s"),
    ]
    return machine(result) + markdown(("step", "wait"), *rows)


def foreign_models() -> str:
    """Models of other libraries before and after ``compress_``."""
    rows = []
    for row in results("foreign_models")["rows"]:
        losses = [f"{row[key]:.3f}" for key in ("loss_before", "loss_after")]
        rows.append((row["model"], *losses, *(f"{row[key] / 1e6:.1f}" for key in ("bytes_before", "bytes_after"))))
    return markdown(("model", "loss before", "100 steps after", "MB before", "MB after"), *rows)


def fits() -> str:
    """Time and memory of fits, from ``fit.json``."""
    rows = []
    for row in results("fit")["rows"]:
        if "collisions=4, " not in row["scheme"] and "Hash" not in row["scheme"]:
            numbers = (f"{row['seconds']:.0f}", f"{row['extra_mb']}")
            rows.append((f"`{row['scheme']}`", "yes" if row["frequencies"] else "no", *numbers))
    return markdown(("scheme", "frequencies", "seconds", "MB beside the tables"), *rows)


CATALOGUE_SCHEMES = {"qr": '`QR(60, operation="add")`', "pool": "`HotCold` over a pool", "mult": "`QR(60)`, `mult`"}


def catalogue() -> str:
    """Time and memory of ``topk`` and ``cross_entropy`` against the full table."""
    result = results("catalogue")
    rows = []
    for run in result["rows"]:
        if run["n"] > 1_000_000 and run["scheme"] == "mult":
            continue  # as slow as with fewer; the file has them
        factor = run["full_ms"] / run["ms"]
        rows.append(
            (
                f"`{run['op']}`",
                CATALOGUE_SCHEMES[run["scheme"]],
                f"{run['n'] / 1e6:.1f}M",
                str(run["batch"]),
                f"{short(run['ms'])} ms",
                f"{short(run['full_ms'])} ms",
                f"**{short(factor)}x**" if factor >= 1 else f"{short(factor)}x",
                f"{run['bytes'] / 1e6:,.0f} MB",
                f"{run['full_bytes'] / 1e6:,.0f} MB",
            )
        )
    head = ("", "scheme", "items", "queries", "time", "full table", "faster", "memory", "full table")
    return f"{machine(result)}{markdown(head, *rows)}"


def catalogue_quality() -> str:
    """Recall@20 with its standard error, NDCG@20, and bytes of schemes; large quotients only where ids are in order."""
    result = results("catalogue_quality")
    found = {(row["log"], row["setting"], row["times"]): row for row in result["rows"]}
    logs = list(dict.fromkeys(log for log, _, _ in found))
    left_out = ("full", "QR add, large quotient")
    settings = list(dict.fromkeys(setting for _, setting, _ in found if setting not in left_out))

    def cell(row: dict[str, Any]) -> str:
        return f"{row['recall']:.3f} ± {row['recall_error']:.3f} / {row['ndcg']:.3f}, {row['bytes'] / 1024:.0f} KB"

    text = f"torch {result['versions']['torch']}, commit {result['commit']}.\n"
    for log in logs:
        full = found[log, "full", 1]
        head = (f"{log}, {full['items']:,} items", "4x", "16x", "60x")
        rows = [(setting, *(cell(found[log, setting, times]) for times in (4, 16, 60))) for setting in settings]
        text += f"\n{markdown(head, ('full table', cell(full), '', ''), *rows)}"
    return text


def torchrec_step() -> str:
    """Time and bytes of a step on two ranks."""
    models = results("torchrec_step")["models"]
    full = next(iter(models.values()))["ms"]
    rows = []
    for name, row in models.items():
        rows.append((name, f"{row['ms']:.0f}", f"{full / row['ms']:.2f}", f"{row['bytes'] / 1e6:.2f}"))
    return markdown(("tables", "ms a step", "full tables' time over it", "MB that a rank sends"), *rows)


DOCUMENTS: dict[str, tuple[Callable[[], str], ...]] = {  # the tables of each
    "README.md": (first_minutes,),
    "docs/appendix/fit.md": (fits,),
    "docs/appendix/plan_quality.md": (other_logs,),
    "docs/benchmarks.md": (against_fbgemm,),
    "docs/catalogue.md": (catalogue, catalogue_quality),
    "docs/choosing.md": (plan_quality, movielens),
    "docs/compress.md": (foreign_models,),
    "docs/kernels.md": (lookups_cpu, lookups_h200),
    "docs/optimizers.md": (optimizers,),
    "docs/torchrec.md": (torchrec_step,),
    "docs/training.md": (epoch,),
}
PRINTED = re.compile(r"(<!-- (quorem bench (?:(?!-->).)*)\s-->\n).*?(<!-- end -->\n)", re.DOTALL)


def printed(match: re.Match[str]) -> str:
    """What a command prints, between its comments."""
    done = CliRunner().invoke(app, shlex.split(match[2])[1:])
    if done.exit_code:
        raise SystemExit(f"{match[2]}: {done.output}")
    return match[1] + done.output + match[3]


def with_tables(document: str) -> str:
    """The text of a document with its tables as they have to be; run it in the root of a checkout."""
    text = PRINTED.sub(printed, (ROOT / document).read_text(encoding="utf-8"))
    for table in DOCUMENTS[document]:
        name = table.__name__
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->\n")
        if not end:
            raise SystemExit(f"{document}: <!-- {name} --> and <!-- /{name} --> must stand in it")
        text = f"{before}<!-- {name} -->\n{table()}{end}{after}"
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        (ROOT / document).write_text(with_tables(document), encoding="utf-8")

"""Plans for a budget: losses at equal bytes, and the time to make them."""

import statistics
from itertools import product
from typing import Any

from .files import NAMES, markdown, results

PLAN_SIZES = (4, 16, 60, 250, 1000)
PLAN_SETTINGS = {
    "hash": "hashing, every table alike",
    "QR": "`QR(c)`, every table alike",
    "plan": "**the plan**, in training",
    "plan in float32": "the plan, in training, rows in float32",
    "plan, int8": "the plan, served in 8 bits",
    "plan, int4": "**the plan**, served in 4 bits",
}
SYNTHETIC_PLANS = {"plan, 16x": "**the plan**, 16x", "plan, 60x": "**the plan**, 60x"}

OTHER_LOGS = {
    "two": "two tables, counts as 1 / rank",
    "giant": "one of 100,000 ids, three of five",
    "once": "ids all seen once, and 500 others",
    "many": "80 tables of 300 ids",
    "flat": "three of 4,000, all as frequent",
    "rare": "three of 10,000, seen three times",
}


def percent(run: dict[str, Any]) -> str:
    """The change of the test loss in percent, with its standard error."""
    return f"{run['percent']:+.2f} ± {run['percent_error']:.2f}"


def plan_quality() -> str:
    """Test log loss against full tables in percent, mean and standard error of the runs, at equal bytes."""
    runs = {(r["network"], r["setting"], r["times"]): r for r in results("plan_quality")["rows"]}
    full = runs["dlrm", "full", 1]["bytes"]
    rows = []
    for network, (setting, name) in product(("dlrm", "dcn"), PLAN_SETTINGS.items()):
        cells = [runs.get((network, setting, times)) for times in PLAN_SIZES]
        texts = [percent(r) if r else "" for r in cells]
        for k, (times, r) in enumerate(zip(PLAN_SIZES, cells, strict=True)):
            if r is not None and not setting.startswith("plan,") and r["bytes"] > 1.01 * full / times:
                texts[k] += f" at {full / r['bytes']:.0f}x, its least"
        rows.append((NAMES[network], name, *texts))
    return markdown(("", "", *(f"{times}x" for times in PLAN_SIZES)), *rows)


def plan_targets() -> str:
    """What was aimed for, and what was reached, in percent of log loss against full tables."""
    runs = {(r["network"], r["setting"], r["times"]): r["percent"] for r in results("plan_quality")["rows"]}
    aims = {"training": (0.1, 0.4, 1.0, 1.8, None), "serving": (0.1, 0.1, 0.4, 1.2, 2.5)}
    rows = []
    for bytes_, network in product(aims, ("dlrm", "dcn")):
        cells = []
        for times, aim in zip(PLAN_SIZES, aims[bytes_], strict=True):
            served = "plan, int8" if times == 4 else "plan, int4"  # what the planner chooses
            change = runs[network, "plan" if bytes_ == "training" else served, times]
            cells.append(f"{change:+.2f}" + ("" if aim is None else f" ({'<=' if change <= aim else 'above'} {aim})"))
        rows.append((f"{bytes_} bytes", NAMES[network], *cells))
    return markdown(("", "", *(f"{times}x" for times in PLAN_SIZES)), *rows)


def plan_synthetic() -> str:
    """Test log loss on the synthetic log at full cardinalities, and the difference from QR(4) of the same seeds."""
    numbered, rows = {"log": "as in the log", "frequency": "by count"}, []
    runs = {(r["ids"], r["optimizer"], r["setting"]): r for r in results("plan_synthetic")["rows"]}
    for ids, optimizer in product(numbered, ("adagrad", "amsgrad")):
        for setting, name in {"full": "full", "QR(4)": "`QR(4)`, 4x", **SYNTHETIC_PLANS}.items():
            r = runs.get((ids, optimizer, setting))
            if r is not None:
                error = "" if r["over_qr_error"] is None else f" ± {r['over_qr_error']:.4f}"
                over = "" if setting == "QR(4)" else f"{r['over_qr']:+.4f}{error}"
                rows.append((numbered[ids], NAMES[optimizer], name, f"{r['seeds']}", f"{r['test']:.4f}", over))
    return markdown(("ids", "optimizer", "tables", "logs", "test log loss", "against `QR(4)`"), *rows)


def id_orders() -> str:
    """DLRM, test log loss with ids by first appearance and by frequency."""
    orders = {"first appearance": "plan_quality_appearance", "frequency": "plan_quality"}
    rows = []
    for name, file in orders.items():
        runs = {(r["setting"], r["times"]): r for r in results(file)["rows"] if r["network"] == "dlrm"}
        keys = [("full", 1), ("hash", 4), ("hash", 16), ("QR", 4), ("QR", 16)]
        rows.append((name, *(f"{runs[key]['test']:.4f} ± {runs[key]['error']:.4f}" for key in keys)))
    return markdown(("ids by", "full", "hashing, 4x", "hashing, 16x", "`QR`, 4x", "`QR`, 16x"), *rows)


def dead_units() -> str:
    """DLRMs whose bottom network gives next to nothing after a few steps, by the tables that they train with."""
    names = {"full": "full", "hash": "hashed", "plan": "a plan"}
    rows = [
        (
            names[r["setting"]] + (f", {r['times']}x" if r["times"] > 1 else ""),
            f"{len(r['dead'])} of {r['runs']}",
            f"{r['active']:.1%}",
        )
        for r in results("dead_units")["runs"]
    ]
    return markdown(("tables", "dead", "of the bottom's outputs above zero, all runs"), *rows)


def int8_training() -> str:
    """Test log loss of rows trained in 8 bits against that of rows rounded once, in percent."""
    runs = {(r["times"], r["kind"]): r for r in results("int8_training")["rows"]}
    names = {"at random": "each step, up or down at random", "to nearest": "each step, to the nearest"}
    sizes = sorted({times for times, _ in runs})
    rows = [(name, *(percent(runs[times, kind]) for times in sizes)) for kind, name in names.items()]
    return markdown(("rounded to 8 bits", *(f"{t}x" for t in sizes)), *rows)


def plan_row_dtypes() -> str:
    """Test log loss of plans trained in bfloat16 and in 8 bits at equal bytes: against full tables, and by seed."""
    runs = {(r["network"], r["setting"], r["times"]): r for r in results("plan_row_dtypes")["rows"]}
    sizes, rows = PLAN_SIZES[:4], []
    for network in ("dlrm", "dcn"):
        for dtype in ("bfloat16", "int8"):
            cells = [runs[network, f"plan in {dtype}", times] for times in sizes]
            rows.append((NAMES[network], dtype, *map(percent, cells)))
        differences = []
        for times in sizes:
            half, eight = (runs[network, f"plan in {dtype}", times]["losses"] for dtype in ("bfloat16", "int8"))
            percents = [100 * (b / a - 1) for a, b in zip(half, eight, strict=True)]
            error = statistics.stdev(percents) / len(percents) ** 0.5
            differences.append(f"{statistics.mean(percents):+.2f} ± {error:.2f}")
        rows.append((NAMES[network], "int8 against bfloat16, by seed", *differences))
    return markdown(("", "rows in training", *(f"{times}x" for times in sizes)), *rows)


def int8_step() -> str:
    """Time of a step with rows of 8 bits, as a multiple of that with rows in float32, on one CPU thread."""
    names = {"tables": "tables alone", "network": "whole step of DLRM"}
    rows = [
        (f"{names[r['part']]}, batch {r['batch']}", f"{r['ratio_to_float32']:.1f}x")
        for r in results("int8_step")["rows"]
        if r["provider"] == "int8"
    ]
    return markdown(("step", "int8 against float32"), *rows)


def plan_times() -> str:
    """CPU seconds of plans for many tables, from ``plan.json``."""
    rows = [("frequencies", "optimizer", "budget", "CPU seconds")]
    for row in results("plan")["rows"]:
        ids = f"of {row['ids_counted'] / 1e6:.0f} million ids" if row["ids_counted"] else "none"
        rows.append((ids, str(row["optimizer"]), row["budget"], f"{row['cpu_seconds']:.1f}"))
    return markdown(*rows)


def other_logs() -> str:
    """Change of the test log loss against full tables on logs of other shapes, at equal bytes."""
    rows = []
    for name, about in OTHER_LOGS.items():
        found = {(r["times"], r["setting"]): r for r in results(f"other_logs/{name}")["rows"]}
        for times in (4, 16, 60):
            cells = [found.get((times, setting)) for setting in ("hash", "QR", "plan", "plan, int4")]
            texts = [percent(r) if r else "" for r in cells]
            times_of_qr = found[1, "full"]["bytes"] / cells[1]["bytes"] if cells[1] else times
            texts[1] += f" at {times_of_qr:.0f}x" if times_of_qr < 0.98 * times else ""
            rows.append((about if times == 4 else "", f"{times}x", *texts))
    return markdown(("log", "", "hashing", "`QR`", "**the plan**", "served in 4 bits"), *rows)

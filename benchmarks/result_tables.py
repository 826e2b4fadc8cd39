"""Tables of the documents that are worked out from the files in ``benchmarks/results``.

Each stands between ``<!-- name -->`` and ``<!-- /name -->``: ``show_results.py`` writes it, and a test compares.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from quorem.data.shape import CARDINALITIES
from quorem.dense.limits import LARGEST_BATCH
from quorem.experiments.bench import report

RESULTS = Path(__file__).parent / "results"
EAGER = [(16, "zipf"), (64, "zipf"), (128, "zipf"), (16, "uniform")]  # width and ids of the eager steps at B = 2048


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(*rows: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def bench_targets() -> str:
    """What was aimed for on an H200, and what ``h200.csv``, ``h200_path.csv`` (if present) and ``eager.json`` hold."""
    paths = RESULTS / "h200_path.csv"
    rows, of_paths = (
        {(r.mode, r.scheme, r.batch, r.dim): r for r in report.read(file) if _in_graph(r)}
        for file in (RESULTS / "h200.csv", paths if paths.exists() else RESULTS / "h200.csv")
    )

    def row(mode: str, batch: int, dim: int = 16, *, scheme: str = "QR(4)") -> report.Row:
        return rows[mode, scheme, batch, dim]

    def times(over: report.Row, under: report.Row) -> float:
        return over.median_us / under.median_us

    found: list[tuple[str, float, float | None, float, str]] = []  # what, must, aim, measured, unit
    for mode, batch, dim, must, aim in (
        ("forward", 65536, 16, 55, 40),
        ("forward", 65536, 64, 160, 125),
        ("step", 65536, 16, 450, 250),
        ("step", 65536, 64, 1300, 700),
        ("step", 128, 16, 25, 15),
        ("step", 2048, 16, 35, 22),
    ):
        found.append((f"{mode}, B = {batch}, D = {dim}", must, aim, row(mode, batch, dim).median_us, " us"))
    for mode in ("forward", "step"):
        for batch in (2048, 65536):
            three = [row(mode, batch, scheme=scheme) for scheme in ("GeneralizedQR(3)", "ChineseRemainder(3)")]
            slower = max(times(each, row(mode, batch)) for each in three)
            found.append((f"{mode}, B = {batch}: slower of the two with k = 3 against `QR(4)`", 1.5, 1.25, slower, "x"))
    amsgrad = times(row("step_amsgrad", 2048), row("step", 2048))
    found.append(("step, B = 2048: AMSGrad, equal to the dense one, against Adagrad", 2, 1.3, amsgrad, "x"))
    for mode in ("forward", "step"):
        path = times(*(of_paths[mode, scheme, 2048, 16] for scheme in ("Path(4, (64,))", "QR(4)")))
        found.append((f"{mode}, B = 2048: `Path(4, (64,))` against `QR(4)`", 4, None, path, "x"))
    for batch in (2048, 16384, 65536):
        step = row("step", batch)
        assert not isinstance(step.peak_extra_bytes, str)
        share, vectors = (100 * n / step.stored_bytes for n in (step.peak_extra_bytes, vector_bytes(batch, 16)))
        what = f"step, B = {batch}: extra memory, of the tables; {short(vectors)}% are the vectors that it returns"
        found.append((what, 25, None, share, "%"))
    lines = [(what, *_outcome(must, aim, got, unit)) for what, must, aim, got, unit in found]
    for dim, ids in EAGER:
        setting = f", D = {dim}" * (dim != 16) + f", {ids} ids" * (ids != "zipf")
        mine, theirs = (eager_rows(dim, ids, 2048, "engine")[provider]["median_us"] for provider in ("fused", "fbgemm"))
        name = f"eager step, B = 2048{setting}: times as fast as `fbgemm` (default setting) on the same tables"
        lines.append((name, *_outcome(4, 8, theirs / mine, "x", more=True)))
    return markdown(("in a CUDA graph, D = 16 and Zipf ids unless said", "must", "aim", "measured", "reached"), *lines)


def _in_graph(r: report.Row) -> bool:
    return bool(r.graph) and (r.provider, r.ids) == ("fused", "zipf")


def eager_rows(dim: int, ids: str, batch: int, thread: str) -> dict[str, dict[str, Any]]:
    """The rows of one setting in ``eager.json`` by provider; ``thread`` ran the backward pass."""
    setting = {"dim": dim, "ids": ids, "batch": batch, "thread": thread}
    return {row["provider"]: row for row in results("eager")["rows"] if row.items() >= setting.items()}


def eager() -> str:
    """The eager step with the backward pass on either thread; FBGEMM in each setting that was measured."""
    peers = [p for p in ("fbgemm", "fbgemm_fastest") if any(row["provider"] == p for row in results("eager")["rows"])]
    lines = []
    for thread, where in (("engine", "a thread of its own, the default"), ("caller", "the calling thread")):
        for dim, ids, batch in [(16, "zipf", 128), *((dim, ids, 2048) for dim, ids in EAGER)]:
            rows = eager_rows(dim, ids, batch, thread)
            us = {p: [short(row[key]) for key in ("median_us", "q20_us", "q80_us")] for p, row in rows.items()}
            cells = [f"{us[p][0]} ({us[p][1]} to {us[p][2]})" for p in (*peers, "fused", "fused_trust")]
            faster = [f"{rows[p]['median_us'] / rows['fused']['median_us']:.2f}x" for p in peers]
            lines.append((where, f"B = {batch}, D = {dim}, {ids} ids", *cells, *faster))
    words = {"fbgemm": "`fbgemm`, default", "fbgemm_fastest": "`fbgemm_fastest`"}
    times = [f"`fused` against {words[p]}" for p in peers]
    return markdown(("backward pass on", "", *(words[p] for p in peers), "`fused`", "`fused_trust`", *times), *lines)


def against_fbgemm() -> str:
    """How many times as fast ``fused`` with QR(4) is as FBGEMM on full tables, in each of its settings."""
    rows = medians("h200_fbgemm")
    lines = []
    for mode, dim, batch in product(("forward", "step"), (16, 64), (2048, 65536)):
        cells = []
        for graph, provider in product((0, 1), ("fbgemm_full", "fbgemm_full_fastest")):
            mine = rows[mode, dim, batch, "fused", "QR(4)", graph]
            theirs = rows[mode, dim, batch, provider, "Full()", graph]
            cells.append(f"{theirs / mine:.2f}x")
        lines.append((f"{mode}, B = {batch}, D = {dim}", *cells))
    settings = ("default", "fastest", "default, CUDA graph", "fastest, CUDA graph")
    return markdown(("times as fast as FBGEMM on full tables", *settings), *lines)


def frequency() -> str:
    """Tables with hot and cold ids, and rows of fewer bits, beside float32 QR(4)."""
    found: dict[tuple[str, str, int, int], dict[int, dict[str, Any]]] = {}
    for r in results("frequency")["rows"]:
        found.setdefault((r["mode"], r["tables"], r["dim"], r["batch"]), {})[r["graph"]] = r
    lines = []
    for (mode, tables, dim, batch), by_graph in found.items():
        cells = [f"{short(by_graph[graph]['median_us'])} ({by_graph[graph]['over_qr']:.2f}x)" for graph in (0, 1)]
        lines.append(
            (f"{mode}, B = {batch}, D = {dim}", tables, *cells, f"{by_graph[1]['stored_bytes'] / 1e6:,.0f} MB")
        )
    return markdown(("us (over `QR(4)`)", "tables", "eager", "CUDA graph", "rows"), *lines)


def against_before() -> str:
    """Times of two commits, in turns in one run."""
    found = results("against_h200")
    cells = {(r["mode"], r["batch"], r["graph"]): r for r in found["rows"]}
    lines = []
    for mode, batch in dict.fromkeys((r["mode"], r["batch"]) for r in found["rows"]):
        eager, graph = (cells[mode, batch, g] for g in (0, 1))
        texts = [f"{short(r['before_us'])}, {short(r['after_us'])} ({r['ratio']:.2f}x)" for r in (eager, graph)]
        lines.append((f"{mode}, B = {batch}", *texts))
    return markdown((f"us, {found['before'][:7]} and {found['after'][:7]}", "eager", "CUDA graph"), *lines)


def against_full() -> str:
    """The time of a lookup by ``fused`` with QR(4) over that with full tables."""
    rows = medians("h200_full")
    lines = []
    for dim, batch in product((16, 64), (128, 2048, 16384, 65536)):
        times = [
            [rows["forward", dim, batch, "fused", scheme, graph] for scheme in ("QR(4)", "Full()")] for graph in (0, 1)
        ]
        lines.append((f"forward, B = {batch}, D = {dim}", *(f"{composed / full:.2f}x" for composed, full in times)))
    return markdown(("`QR(4)` over full tables, both `fused`", "eager", "CUDA graph"), *lines)


def medians(name: str) -> dict[tuple[str, int, int, str, str, int], float]:
    """Medians of Zipf ids in a file by mode, width, batch, provider, scheme and graph."""
    return {
        (r.mode, r.dim, r.batch, r.provider, r.scheme, r.graph): r.median_us
        for r in report.read(RESULTS / f"{name}.csv")
        if r.ids == "zipf"
    }


def _outcome(must: float, aim: float | None, got: float, unit: str, *, more: bool = False) -> tuple[str, str, str, str]:
    """Must, aim, what was measured, and which of both it reaches; ``more`` where more is better."""

    def reaches(limit: float | None) -> bool:
        return limit is not None and (got >= limit if more else got <= limit)

    reached = "aim" if reaches(aim) else "must" if reaches(must) else "**no**"
    return f"{must:g}{unit}", "" if aim is None else f"{aim:g}{unit}", f"{short(got)}{unit}", reached


def vector_bytes(batch: int, dim: int) -> int:
    return batch * len(CARDINALITIES) * dim * 4


def train_cpu() -> str:
    head = ("step", "provider", "threads", "rows a second", "times the loop")
    rows = [
        (r["mode"], r["provider"], str(r["threads"]), f"{r['rows_per_second']:,}", f"{r['times_the_loop']}x")
        for r in results("train_cpu")["rows"]
    ]
    return markdown(head, *rows)


def criteo_sample() -> str:
    found = {(r["scheme"], r["optimizer"]): r for r in results("criteo_sample")["rows"]}
    rows = []
    for scheme in dict.fromkeys(scheme for scheme, _ in found):
        own = [found[scheme, optimizer] for optimizer in ("adagrad", "amsgrad")]
        losses = (f"{r['test_log_loss']:.4f} ± {r['deviation']:.4f}" for r in own)
        rows.append((scheme, f"{own[0]['embedding_parameters']:,}", *losses))
    return markdown(("tables", "parameters", "Adagrad", "AMSGrad"), *rows)


Setting = tuple[str, str, str, int]  # network, tables, optimizer, batch
NAMES = {"dlrm": "DLRM", "dcn": "DCN", "adagrad": "Adagrad", "amsgrad": "AMSGrad", "QR(4)": "`QR(4)`", "full": "full"}


def gpu_steps(name: str = "train_gpu") -> dict[Setting, dict[str, dict[str, Any]]]:
    """The measured steps by network, tables, optimizer and batch, then by fused or plain layers."""
    found: dict[Setting, dict[str, dict[str, Any]]] = {}
    for r in results(name)["time"]:
        found.setdefault((r["network"], r["scheme"], r["optimizer"], r["batch"]), {})[r["layers"]] = r
    return found


def trained(steps: dict[str, dict[str, Any]], batch: int) -> dict[str, Any] | None:
    """The step that training takes at a batch size."""
    return steps.get("fused" if batch <= LARGEST_BATCH else "plain")


def train_gpu() -> str:
    rows = []
    for (*names, batch), steps in gpu_steps().items():
        us = [f"{short(steps[layers]['step_us'])}" if layers in steps else "" for layers in ("fused", "plain")]
        taken = trained(steps, batch)
        rows.append((*(NAMES[name] for name in names), f"{batch}", *us, f"{taken['epoch_s']:.1f}" if taken else ""))
    head = ("network", "tables", "optimizer", "batch", "fused layers, us", "plain layers, us", "an epoch, s")
    return markdown(head, *rows)


def train_gpu_targets() -> str:
    rows = []
    for network, scheme, batch, must in (
        ("dlrm", "QR(4)", 128, 60),
        ("dlrm", "full", 128, 90),
        ("dcn", "QR(4)", 128, 60),
        ("dcn", "full", 128, 90),
        ("dlrm", "QR(4)", 16384, 6),
        ("dcn", "QR(4)", 16384, 6),
    ):
        setting = (network, scheme, "adagrad", batch)
        file = next(name for name in ("train_gpu", "train_gpu_first") if setting in gpu_steps(name))
        step = trained(gpu_steps(file)[setting], batch)
        assert step is not None
        reached = "yes" if step["epoch_s"] < must else "**no**"
        rows.append(
            (
                NAMES[network],
                NAMES[scheme],
                f"{batch}",
                f"{must} s",
                f"{step['epoch_s']:.1f} s",
                reached,
                f"`{file}.json`",
            )
        )
    return markdown(("network", "tables", "batch", "must", "an epoch", "reached", "file"), *rows)


def dense_steps() -> str:
    """Steps of batch 128, the graph alone, before and after the tiles were chosen."""
    rows = []
    now, first = gpu_steps(), gpu_steps("train_gpu_first")
    for network in ("dlrm", "dcn"):
        for optimizer in ("adagrad", "amsgrad"):
            both = [steps[network, "QR(4)", optimizer, 128] for steps in (first, now)]
            us = [short(steps[layers]["graph_us"]) for steps in both for layers in ("plain", "fused")]
            rows.append((NAMES[network], NAMES[optimizer], *us))
    head = ("network", "optimizer", "plain, before", "fused, before", "plain", "fused")
    return markdown(head, *rows)


def _launches(kernel: dict[str, Any] | None) -> str:
    return f"{kernel['launches']:.0f} x {short(kernel['us_each'])}" if kernel else ""


def dense_profile() -> str:
    """The launches of a fused step of batch 128 under Adagrad."""
    found = {
        r["network"]: r
        for r in results("train_gpu_first")["profile"]
        if (r["layers"], r["optimizer"]) == ("fused", "adagrad")
    }
    kernels = {n: {k["kernel"]: k for k in found[n]["kernels"]} for n in ("dlrm", "dcn")}
    rows = [
        (f"`{name}`" if name.endswith("_kernel") else "a fill", *(_launches(own.get(name)) for own in kernels.values()))
        for name in dict.fromkeys(name for own in kernels.values() for name in own)
    ]
    rows.append(("all", *(f"{found[n]['launches']:.0f} launches, {short(found[n]['busy_us'])} us" for n in kernels)))
    return markdown(("kernel", *(NAMES[n] for n in kernels)), *rows)


DAMAGED = {
    "raw ids": "any file of prepared data with raw ids, by `quorem inspect --verify` and training",
    "models": "saved models with hot and cold ids, a pool, raw ids, rows in 8 and 4 bits, by `quorem.load`",
    "prepared": "arrays of prepared data, by training",
    "meta": "`meta.json` of prepared data, by training",
    "verified": "any file of prepared data, by `quorem inspect --verify`",
    "checkpoint": "a checkpoint, by going on with the run",
    "stopped": "`run.json`, `metrics.jsonl` of a stopped run, by going on",
    "finished": "any file of a finished run",
    "sweep": "plans, results and metrics of a sweep, by `quorem report`",
    "figure": "the numbers of a figure, by `quorem report`",
    "config": "a configuration as JSON",
    "csv": "a CSV file, by `quorem prepare table`",
    "gzip": "the same, packed",
    "parquet": "the same, as Parquet",
    "criteo": "Criteo's text, by `quorem prepare criteo`",
}


def damaged_files() -> str:
    """What came of files that ``tests/hunt/damage.py`` damaged."""
    found = results("hunt/damage")
    kinds = ("told", "same", "changed")
    wrong = ("wrong", "unnamed", "traceback", "hang", "executed")
    rows = []
    for name, outcomes in [*found["by_target"].items(), ("all", found["outcomes"])]:
        counts = [outcomes.get(kind, 0) for kind in kinds] + [sum(outcomes.get(kind, 0) for kind in wrong)]
        rows.append((DAMAGED.get(name, "**all**"), f"{sum(counts):,}", *map(str, counts)))
    return markdown(("what is damaged, and who reads it", "files", "told", "same", "changed", "wrong"), *rows)


def kills() -> str:
    """What came of processes that ``tests/hunt/kills.py`` killed."""
    found = results("hunt/kills")
    rows = []
    for name, job in found["jobs"].items():
        bad = sum(text.startswith(f"{name}: ") for text in found["bad"])
        rows.append((f"`{name}`", f"{job['kills']}", f"{job['ends']}", f"{bad}"))
    rows.append(
        (
            "**all**",
            f"{found['kills']}",
            f"{sum(job['ends'] for job in found['jobs'].values())}",
            f"{len(found['bad'])}",
        )
    )
    return markdown(("command", "kills", "ends", "lost, or wrong"), *rows)


def foreign_models() -> str:
    """Models of other libraries before and after ``compress_``, from ``foreign_models.json``."""
    head = ("model", "loss at first", "before", "after", "MB before", "MB after")
    rows = []
    for row in results("foreign_models")["rows"]:
        losses = [f"{row[key]:.3f}" for key in ("first_loss", "loss_before", "loss_after")]
        rows.append((row["model"], *losses, *(f"{row[key] / 1e6:.1f}" for key in ("bytes_before", "bytes_after"))))
    return markdown(head, *rows)


def first_minutes() -> str:
    """Seconds of each step of a newcomer."""
    steps = results("first_minutes")["steps"]
    table = sum(steps[name]["seconds"] for name in ("prepare", "train", "predict"))
    demo = steps["demo"]
    rows = [
        ("`pip install`, packages within reach", f"{steps['install']['seconds']:.0f} s"),
        ("`quorem --help`", f"{steps['help']['seconds']:.1f} s"),
        ("first vectors and gradients, CPU kernels compiled", f"{steps['first vectors']['seconds']:.0f} s"),
        ("the same in the next process", f"{steps['first vectors, again']['seconds']:.0f} s"),
        ("`quorem demo`: first line, whole", f"{demo['first_line_s']:.0f} s, {demo['seconds']:.0f} s"),
        ("your own CSV of 10,000 rows: prepared, trained, scored", f"{table:.0f} s"),
    ]
    return markdown(("step", "wait"), *rows)


def cold_start() -> str:
    """Seconds of first calls on the CPU, from ``cold_start.json``."""
    rows = results("cold_start")["rows"]
    seconds = {(row["kernels"], row["fast_compile"], row["call"]): row["seconds"] for row in rows}
    calls = dict.fromkeys(row["call"] for row in rows)
    columns = (("compiled", True), ("compiled", False), ("kept", True))
    head = ("first", "kernels compiled", "the same, `QUOREM_FAST_COMPILE=0`", "kernels kept by an earlier process")
    return markdown(head, *[(call, *(f"{seconds[*column, call]:.1f} s" for column in columns)) for call in calls])


def cpu_loop() -> str:
    """How many times as fast fused lookups and steps are as one nn.EmbeddingBag a table, from ``cpu_loop.json``."""
    rows = results("cpu_loop")["rows"]
    times = {(row["mode"], row["beside"], row["batch"]): row["times_as_fast"] for row in rows}
    batches = sorted({row["batch"] for row in rows})
    names = {"forward": "lookup", "step": "step of Adagrad"}
    cells = [
        (f"{name}, beside {beside}", *(f"{times[mode, beside, batch]:.1f}x" for batch in batches))
        for mode, name in names.items()
        for beside in ("nothing", "a busy process")
    ]
    return markdown(("", *(f"B = {batch}" for batch in batches)), *cells)


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


def plan_quality() -> str:
    """Test log loss against full tables in percent, mean and standard error of the runs, at equal bytes."""
    found = {(r["network"], r["setting"], r["times"]): r for r in results("plan_quality")["rows"]}
    full = found["dlrm", "full", 1]["bytes"]
    rows = []
    for network, (setting, name) in product(("dlrm", "dcn"), PLAN_SETTINGS.items()):
        cells = [found.get((network, setting, times)) for times in PLAN_SIZES]
        texts = ["" if r is None else f"{r['percent']:+.2f} ± {r['percent_error']:.2f}" for r in cells]
        for k, (times, r) in enumerate(zip(PLAN_SIZES, cells, strict=True)):
            if r is not None and not setting.startswith("plan,") and r["bytes"] > 1.01 * full / times:
                texts[k] += f" at {full / r['bytes']:.0f}x, its least"
        rows.append((NAMES[network], name, *texts))
    return markdown(("", "", *(f"{times}x" for times in PLAN_SIZES)), *rows)


def dead_units() -> str:
    """DLRMs whose bottom network gives next to nothing after a few steps, by the tables that they train with."""
    found = results("dead_units")
    names = {"full": "full", "hash": "hashed", "plan": "a plan"}
    rows = [
        (
            names[r["setting"]] + (f", {r['times']}x" if r["times"] > 1 else ""),
            f"{len(r['dead'])} of {r['runs']}",
            f"{r['active']:.1%}",
        )
        for r in found["runs"]
    ]
    return markdown(("tables", "dead", "of the bottom's outputs above zero, all runs"), *rows)


def int8_training() -> str:
    """Test log loss of rows trained in 8 bits against that of rows rounded once, in percent."""
    found = {(r["times"], r["kind"]): r for r in results("int8_training")["rows"]}
    names = {"at random": "each step, up or down at random", "to nearest": "each step, to the nearest"}
    sizes = sorted({times for times, _ in found})
    rows = [
        (name, *(f"{found[t, kind]['percent']:+.2f} ± {found[t, kind]['percent_error']:.2f}" for t in sizes))
        for kind, name in names.items()
    ]
    return markdown(("rounded to 8 bits", *(f"{t}x" for t in sizes)), *rows)


def plan_targets() -> str:
    """What was aimed for, and what was reached, in percent of log loss against full tables."""
    found = {(r["network"], r["setting"], r["times"]): r["percent"] for r in results("plan_quality")["rows"]}
    aims = {"training": (0.1, 0.4, 1.0, 1.8, None), "serving": (0.1, 0.1, 0.4, 1.2, 2.5)}
    rows = []
    for bytes_, network in product(aims, ("dlrm", "dcn")):
        cells = []
        for times, aim in zip(PLAN_SIZES, aims[bytes_], strict=True):
            served = "plan, float32" if times == 4 else "plan, int4"  # what the planner chooses
            change = found[network, "plan" if bytes_ == "training" else served, times]
            cells.append(f"{change:+.2f}" + ("" if aim is None else f" ({'<=' if change <= aim else 'above'} {aim})"))
        rows.append((f"{bytes_} bytes", NAMES[network], *cells))
    return markdown(("", "", *(f"{times}x" for times in PLAN_SIZES)), *rows)


def plan_synthetic() -> str:
    """Test log loss on the synthetic log at full cardinalities, and the difference from QR(4) of the same seeds."""
    numbered, rows = {"log": "as in the log", "frequency": "by count"}, []
    found = {(r["ids"], r["optimizer"], r["setting"]): r for r in results("plan_synthetic")["rows"]}
    for ids, optimizer in product(numbered, ("adagrad", "amsgrad")):
        for setting, name in {"full": "full", "QR(4)": "`QR(4)`, 4x", **SYNTHETIC_PLANS}.items():
            r = found.get((ids, optimizer, setting))
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
        found = {(r["setting"], r["times"]): r for r in results(file)["rows"] if r["network"] == "dlrm"}
        keys = [("full", 1), ("hash", 4), ("hash", 16), ("QR", 4), ("QR", 16)]
        rows.append((name, *(f"{found[key]['test']:.4f} ± {found[key]['error']:.4f}" for key in keys)))
    return markdown(("ids by", "full", "hashing, 4x", "hashing, 16x", "`QR`, 4x", "`QR`, 16x"), *rows)


def drawn_lookups() -> str:
    """What came of the lookups that ``tests/hunt/lookups.py`` drew."""
    found = results("hunt/lookups")
    kinds: dict[str, list[int]] = {}
    for name, count in found["lookups_by_kind"].items():
        kinds.setdefault(name.split()[0], []).append(count)
    bad = [sum(text.startswith(name + "(") for text in found["bad"]) for name in kinds]
    rows = [(f"`{name}`", f"{sum(counts):,}", f"{b}") for (name, counts), b in zip(kinds.items(), bad, strict=True)]
    rows.append(("**all**", f"{found['lookups']:,} in {found['modules']:,} modules", f"{len(found['bad'])}"))
    return markdown(("module", "lookups", "wrong"), *rows)


def drawn_steps() -> str:
    """What came of the steps that ``tests/hunt/steps.py`` drew."""
    found = results("hunt/steps")
    rows = [
        (name, f"{count:,}", f"{sum(text.startswith(name) for text in found['bad'])}")
        for name, count in found["by_rule"].items()
    ]
    rows.append(("**all**", f"{found['steps']:,}", f"{len(found['bad'])}"))
    return markdown(("optimizer", "steps", "wrong"), *rows)


def fine_tune() -> str:
    """Test log loss of a trained model that is compressed, and of one that is compressed first."""
    rows = {row["scheme"]: row for row in results("fine_tune")["rows"]}
    full = rows.pop("full")
    head = ("tables", "times smaller", "fitted at 90%", "then the last 10%", "from scratch: first 10%", "all rows")
    keys = ("fitted at 90%", "fitted at 100%", "scratch at 10%", "scratch at 100%")

    def loss(entry: dict[str, float]) -> str:
        return f"{entry['mean']:.4f} ± {entry['deviation']:.4f}"

    shown = [("full", "1", loss(full["at 90%"]), loss(full["at 100%"]), "", "")]
    for name, row in rows.items():
        shown.append((name, f"{row['times smaller']['mean']:.1f}", *(loss(row[key]) for key in keys)))
    return markdown(head, *shown)


def plan_times() -> str:
    """CPU seconds of plans for many tables, from ``plan.json``."""
    found = results("plan")
    rows = [("frequencies", "optimizer", "budget", "CPU seconds")]
    for row in found["rows"]:
        ids = f"of {row['ids_counted'] / 1e6:.0f} million ids" if row["ids_counted"] else "none"
        rows.append((ids, str(row["optimizer"]), row["budget"], f"{row['cpu_seconds']:.1f}"))
    return markdown(*rows)


def fits() -> str:
    """Time and memory of fits, from ``fit.json``."""
    head = ("scheme", "frequencies", "seconds", "CPU seconds", "MB beside the tables")
    rows = []
    for row in results("fit")["rows"]:
        numbers = (f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", f"{row['extra_mb']}")
        rows.append((f"`{row['scheme']}`", "yes" if row["frequencies"] else "no", *numbers))
    return markdown(head, *rows)


def serve_load() -> str:
    """Latencies of ``examples/serve.py`` on loopback."""
    rows = [("rows of a request", "clients", "p50", "p99", "rows a second", "p50 without HTTP")]
    for case in results("serve")["cases"]:
        own = case["in_process"]
        times = [f"{short(ms)} ms" for ms in (case["p50_ms"], case["p99_ms"], own["p50_ms"])]
        rows.append((str(case["rows"]), str(case["clients"]), *times[:2], f"{case['rows_per_second']:,}", times[2]))
    return markdown(*rows)


def serve_onnx() -> str:
    """Exported lookups against the same written by hand."""
    rows = [("bits", "B", "exported", "by hand", "ratio")]
    for case in results("serving")["onnx"]:
        times = [f"{short(case[name])} us" for name in ("exported_us", "by_hand_us")]
        rows.append((str(case["bits"]), str(case["batch"]), *times, f"{case['ratio']:.2f}"))
    return markdown(*rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    function.__name__: (document, function)
    for document, function in (
        ("README.md", first_minutes),
        ("docs/appendix/benchmark_aims.md", bench_targets),
        ("docs/kernels.md", cold_start),
        ("docs/kernels.md", cpu_loop),
        ("docs/appendix/benchmark_aims.md", eager),
        ("docs/benchmarks.md", against_fbgemm),
        ("docs/benchmarks.md", against_full),
        ("docs/appendix/benchmark_aims.md", frequency),
        ("docs/appendix/benchmark_aims.md", against_before),
        ("docs/appendix/training_speed.md", train_cpu),
        ("docs/training.md", criteo_sample),
        ("docs/appendix/training_speed.md", train_gpu),
        ("docs/training.md", train_gpu_targets),
        ("docs/appendix/dense_layers.md", dense_steps),
        ("docs/appendix/dense_layers.md", dense_profile),
        ("docs/serve.md", serve_load),
        ("docs/serve.md", serve_onnx),
        ("docs/reliability.md", damaged_files),
        ("docs/reliability.md", kills),
        ("docs/compress.md", foreign_models),
        ("docs/compress.md", fine_tune),
        ("docs/appendix/fit.md", fits),
        ("docs/budget.md", plan_times),
        ("docs/choosing.md", plan_quality),
        ("docs/appendix/plan_quality.md", dead_units),
        ("docs/choosing.md", int8_training),
        ("docs/appendix/plan_quality.md", plan_targets),
        ("docs/appendix/plan_quality.md", plan_synthetic),
        ("docs/data.md", id_orders),
        ("docs/reliability.md", drawn_lookups),
        ("docs/reliability.md", drawn_steps),
    )
}

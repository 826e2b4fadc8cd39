"""Times of lookups and steps: on an H200 beside FBGEMM, and on a CPU."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import report

from .files import RESULTS, machine, markdown, results, short

EAGER = [(16, "zipf"), (64, "zipf"), (128, "zipf"), (16, "uniform")]  # width and ids of the eager steps at B = 2048


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

    targets: list[tuple[str, float, float | None, float, str]] = []  # setting, must, aim, measured, unit
    for mode, batch, dim, must, aim in (
        ("forward", 65536, 16, 55, 40),
        ("forward", 65536, 64, 160, 125),
        ("step", 65536, 16, 450, 250),
        ("step", 65536, 64, 1300, 700),
        ("step", 128, 16, 25, 15),
        ("step", 2048, 16, 35, 22),
    ):
        targets.append((f"{mode}, B = {batch}, D = {dim}", must, aim, row(mode, batch, dim).median_us, " us"))
    for mode in ("forward", "step"):
        for batch in (2048, 65536):
            three = [row(mode, batch, scheme=scheme) for scheme in ("GeneralizedQR(3)", "ChineseRemainder(3)")]
            slower = max(times(each, row(mode, batch)) for each in three)
            targets.append(
                (f"{mode}, B = {batch}: slower of the two with k = 3 against `QR(4)`", 1.5, 1.25, slower, "x")
            )
    amsgrad = times(row("step_amsgrad", 2048), row("step", 2048))
    targets.append(("step, B = 2048: AMSGrad, equal to the dense one, against Adagrad", 2, 1.3, amsgrad, "x"))
    for mode in ("forward", "step"):
        path = times(*(of_paths[mode, scheme, 2048, 16] for scheme in ("Path(4, (64,))", "QR(4)")))
        targets.append((f"{mode}, B = 2048: `Path(4, (64,))` against `QR(4)`", 4, None, path, "x"))
    for batch in (2048, 16384, 65536):
        step = row("step", batch)
        assert not isinstance(step.peak_extra_bytes, str)
        share, vectors = (100 * n / step.stored_bytes for n in (step.peak_extra_bytes, vector_bytes(batch, 16)))
        setting = f"step, B = {batch}: extra memory, of the tables; {short(vectors)}% are the vectors that it returns"
        targets.append((setting, 25, None, share, "%"))
    lines = [(setting, *_outcome(*target)) for setting, *target in targets]
    for dim, ids in EAGER:
        setting = f", D = {dim}" * (dim != 16) + f", {ids} ids" * (ids != "zipf")
        fused, fbgemm = (eager_rows(dim, ids, 2048, "engine")[name]["median_us"] for name in ("fused", "fbgemm"))
        name = f"eager step, B = 2048{setting}: times as fast as `fbgemm` (default setting) on the same tables"
        lines.append((name, *_outcome(4, 8, fbgemm / fused, "x", more_is_better=True)))
    return markdown(("in a CUDA graph, D = 16 and Zipf ids unless said", "must", "aim", "measured", "reached"), *lines)


def _in_graph(r: report.Row) -> bool:
    return bool(r.graph) and (r.provider, r.ids) == ("fused", "zipf")


def _outcome(
    must: float, aim: float | None, measured: float, unit: str, *, more_is_better: bool = False
) -> tuple[str, str, str, str]:
    """Must, aim, measurement, and which of must and aim it reaches."""

    def reaches(limit: float | None) -> bool:
        return limit is not None and (measured >= limit if more_is_better else measured <= limit)

    reached = "aim" if reaches(aim) else "must" if reaches(must) else "**no**"
    return f"{must:g}{unit}", "" if aim is None else f"{aim:g}{unit}", f"{short(measured)}{unit}", reached


def vector_bytes(batch: int, dim: int) -> int:
    return batch * len(CARDINALITIES) * dim * 4


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


def against_before() -> str:
    """Times of two commits, in turns in one run."""
    file = results("against_h200")
    cells = {(r["mode"], r["batch"], r["graph"]): r for r in file["rows"]}
    lines = []
    for mode, batch in dict.fromkeys((r["mode"], r["batch"]) for r in file["rows"]):
        eager, graph = (cells[mode, batch, g] for g in (0, 1))
        texts = [f"{short(r['before_us'])}, {short(r['after_us'])} ({r['ratio']:.2f}x)" for r in (eager, graph)]
        lines.append((f"{mode}, B = {batch}", *texts))
    return markdown((f"us, {file['before'][:7]} and {file['after'][:7]}", "eager", "CUDA graph"), *lines)


def frequency() -> str:
    """Tables with hot and cold ids, and rows of fewer bits, beside float32 QR(4)."""
    settings: dict[tuple[str, str, int, int], dict[int, dict[str, Any]]] = {}
    for r in results("frequency")["rows"]:
        settings.setdefault((r["mode"], r["tables"], r["dim"], r["batch"]), {})[r["graph"]] = r
    lines = []
    for (mode, tables, dim, batch), by_graph in settings.items():
        cells = [f"{short(by_graph[graph]['median_us'])} ({by_graph[graph]['over_qr']:.2f}x)" for graph in (0, 1)]
        floor = f"{short(by_graph[1]['floor_us'])} ({by_graph[1]['floor_over_qr']:.2f}x)"
        lines.append((f"{mode}, B = {batch}, D = {dim}", tables, *cells, floor))
    return markdown(("us (over `QR(4)`)", "tables", "eager", "CUDA graph", "floor"), *lines)


def cold_start() -> str:
    """Seconds of first calls on the CPU, from ``cold_start.json``."""
    result = results("cold_start")
    rows = result["rows"]
    seconds = {(row["kernels"], row["fast_compile"], row["call"]): row["seconds"] for row in rows}
    calls = dict.fromkeys(row["call"] for row in rows)
    columns = (("compiled", True), ("compiled", False), ("kept", True))
    head = ("first", "kernels compiled", "the same, `QUOREM_FAST_COMPILE=0`", "kernels kept by an earlier process")
    lines = [(call, *(f"{seconds[*column, call]:.1f} s" for column in columns)) for call in calls]
    return machine(result) + markdown(head, *lines)


def cpu_loop() -> str:
    """How many times as fast fused lookups and steps are as one nn.EmbeddingBag a table, from ``cpu_loop.json``."""
    rows = results("cpu_loop")["rows"]
    times = {(row["mode"], row["beside"], row["batch"]): row["times_as_fast"] for row in rows}
    batches = sorted({row["batch"] for row in rows})
    names = {"forward": "lookup", "step": "step of Adagrad"}
    settings = [(mode, beside) for mode in names for beside in ("nothing", "a busy process")]
    cells = [
        (f"{names[mode]}, beside {beside}", *(f"{times[mode, beside, batch]:.1f}x" for batch in batches))
        for mode, beside in settings
    ]
    gains = {
        (row["mode"], row["beside"], row["batch"]): row["fused_on_one_thread_us"] / row["fused_us"]
        for row in rows
        if "fused_on_one_thread_us" in row
    }
    cells += [
        (f"gain by threads: {names[mode]}, beside {beside}", *(f"{gains[mode, beside, b]:.2f}x" for b in batches))
        for mode, beside in settings
        if gains
    ]
    return markdown(("", *(f"B = {batch}" for batch in batches)), *cells)


def cpu_lookups() -> str:
    """Ratios of times on one CPU thread, from ``cpu_lookups.json``: few bits, and hot and cold ids over one pool."""
    return _cpu_ratios(
        (2048, 65536),
        ("8 bits against float32, lookup", "1.2", "bits", "8 bits", "float32", "p50_us", "lookup"),
        ("4 bits against float32, lookup", "", "bits", "4 bits", "float32", "p50_us", "lookup"),
        ("one pool against `QR(4)`, lookup", "1.3", "pool", "pool", "qr", "p50_us", "lookup"),
        ("one pool against `QR(4)`, step of Adagrad", "1.3", "pool", "pool", "qr", "p50_us", "step"),
        ("the same with lists of hot ids, lookup", "1.3", "pool", "lists", "qr", "p50_us", "lookup"),
        ("the same with lists of hot ids, step", "1.3", "pool", "lists", "qr", "p50_us", "step"),
        ("distinct rows that a batch reads, one pool against `QR(4)`", "", "pool", "pool", "qr", "distinct_rows", None),
        ("cache lines that a lookup moves at least, likewise", "", "pool", "pool", "qr", "lookup_lines", None),
        ("cache lines that a step moves at least, likewise", "", "pool", "pool", "qr", "step_lines", None),
    )


def cpu_latency() -> str:
    """Ratios of p50 and p99 of small lookups on one CPU thread, from ``cpu_lookups.json``."""
    bags, bits = "`QR(4)` against one full `nn.EmbeddingBag` a feature", "8 bits against float32"
    return _cpu_ratios(
        (1, 32, 1024),
        (f"{bags}, p50", "1", "latency", "float32", "bags", "p50_us", "lookup"),
        (f"{bags}, p99", "1", "latency", "float32", "bags", "p99_us", "lookup"),
        (f"{bits}, p50", "1.2", "latency", "8 bits", "float32", "p50_us", "lookup"),
        (f"{bits}, p99", "1.2", "latency", "8 bits", "float32", "p99_us", "lookup"),
    )


def _cpu_ratios(batches: Sequence[int], *wanted: tuple[str, str, str, str, str, str, str | None]) -> str:
    """Ratios of two providers: for each line its label, aim, part, both providers, the figure compared, and mode."""
    settings, lines = list(product(("small", "full"), batches)), []
    for label, aim, part, provider, base, key, mode in wanted:
        values = {
            (row["provider"], row["tables"], row["batch"]): row[key]
            for row in results("cpu_lookups")["rows"]
            if row["part"] == part and row.get("mode") == mode and key in row
        }
        ratios = [values[provider, *setting] / values[base, *setting] for setting in settings]
        lines.append((label, aim, *(f"{ratio:.2f}" for ratio in ratios)))
    head = [f"{'in cache' if size == 'small' else 'full'}, B = {batch}" for size, batch in settings]
    return markdown(("ratio", "aim", *head), *lines)

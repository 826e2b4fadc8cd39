"""Figures of the documents are those of the files in benchmarks/results."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from quorem.experiments.bench import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# Not by sys.path: other files of benchmarks/ have the names of folders of tests/.
spec = importlib.util.spec_from_file_location("result_tables", ROOT / "benchmarks" / "result_tables" / "__init__.py")
result_tables = sys.modules["result_tables"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(result_tables)
TABLES, speed, training = result_tables.TABLES, result_tables.speed, result_tables.training
results = speed.results


def table_in_document(name: str) -> str:
    text = (ROOT / TABLES[name][0]).read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->\n")[0]


@pytest.mark.parametrize("name", TABLES)
def test_the_document_shows_the_results(name: str) -> None:
    """If not: python benchmarks/show_results.py"""
    assert table_in_document(name) == TABLES[name][1]()


def test_targets_are_held_against_the_file() -> None:
    """Some rows of the table, worked out anew."""
    with (RESULTS / "h200.csv").open(newline="", encoding="utf-8") as file:
        keys = ("mode", "provider", "scheme", "ids", "batch", "dim", "graph")
        rows = {" ".join(row[key] for key in keys): row for row in csv.DictReader(file)}
    us = {key: float(row["median_us"]) for key, row in rows.items()}
    step = rows["step fused QR(4) zipf 65536 16 1"]
    eager = {
        row["provider"]: row["median_us"]
        for row in json.loads((RESULTS / "eager.json").read_text(encoding="utf-8"))["rows"]
        if (row["dim"], row["ids"], row["batch"], row["thread"]) == (64, "zipf", 2048, "engine")
    }
    share = 100 * int(step["peak_extra_bytes"]) / int(step["stored_bytes"])
    lines = [line.split("|") for line in table_in_document("bench_targets").splitlines()]
    cells = {line[1].strip(): line[4].strip() for line in lines}
    (memory,) = (cell for what, cell in cells.items() if what.startswith("step, B = 65536: extra memory"))
    assert float(memory.strip("%")) == pytest.approx(share, rel=5e-3)
    for what, expected in {
        "forward, B = 65536, D = 16": us["forward fused QR(4) zipf 65536 16 1"],
        "step, B = 128, D = 16": us["step fused QR(4) zipf 128 16 1"],
        "eager step, B = 2048, D = 64: times as fast as `fbgemm` (default setting) on the same tables": eager["fbgemm"]
        / eager["fused"],
    }.items():
        assert float(cells[what].strip(" usx")) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("must", "aim", "measured", "more_is_better", "reached"),
    [
        (55, 40, 40, False, "aim"),
        (55, 40, 55, False, "must"),
        (55, None, 54, False, "must"),
        (55, 40, 55.01, False, "**no**"),
        (4, 8, 8, True, "aim"),
        (4, 8, 4, True, "must"),
        (4, 8, 3.999, True, "**no**"),
    ],
)
def test_an_outcome_is_the_best_that_is_reached(must, aim, measured, more_is_better, reached) -> None:
    assert speed._outcome(must, aim, measured, " us", more_is_better=more_is_better)[-1] == reached


def prose() -> list[tuple[str, str]]:
    """Document, and words with figures that it must hold."""
    steps, first_steps = training.gpu_steps(), training.gpu_steps("train_gpu_first")
    rows = {
        (r.mode, r.ids, r.batch, r.dim, r.graph): r
        for r in report.read(RESULTS / "h200.csv")
        if (r.provider, r.scheme) == ("fused", "QR(4)")
    }
    floor = {
        (mode, dim): rows[mode, "zipf", 65536, dim, 1].ratio_to_floor
        for mode in ("forward", "step")
        for dim in (16, 64, 128)
    }

    def epoch(network: str, scheme: str, batch: int) -> float:
        return training.trained(steps[network, scheme, "adagrad", batch], batch)["epoch_s"]

    first, last = (file["dlrm", "QR(4)", "adagrad", 128]["fused"] for file in (first_steps, steps))
    layers = {name: steps[name, "QR(4)", "adagrad", 128] for name in ("dlrm", "dcn")}
    us = {(name, kind): f"{by[kind]['graph_us']:.0f}" for name, by in layers.items() for kind in ("fused", "plain")}
    added = [f"{each['step_us'] - each['graph_us']:.1f} us" for each in (first, last)]
    lookup, step = ([floor[mode, dim] for dim in (16, 64, 128)] for mode in ("forward", "step"))
    eager = {
        (r.provider, r.dim): r.median_us
        for r in report.read(RESULTS / "h200.csv")
        if (r.mode, r.scheme, r.ids, r.batch, r.graph) == ("step", "QR(4)", "zipf", 2048, 0)
    }
    graphs = [r for r in report.read(RESULTS / "h200.csv") if speed._in_graph(r)]
    lookups = {r.scheme: r.median_us for r in graphs if (r.mode, r.batch, r.dim) == ("forward", 2048, 16)}
    paths = lookups["Path(4, (64,))"] / lookups["QR(4)"]
    rates = results("serving")["predict"]["rows_per_second"]
    medians = speed.medians("h200_full")
    composed = [
        us / medians[mode, dim, batch, provider, "Full()", graph]
        for (mode, dim, batch, provider, scheme, graph), us in medians.items()
        if (mode, provider, scheme) == ("forward", "fused", "QR(4)")
    ]
    full, tuned, *_ = results("fine_tune")["rows"]
    guarded = [case["ratio"] for case in results("serving")["onnx"]]
    faster = [eager["fbgemm", dim] / eager["fused", dim] for dim in (16, 64, 128)]
    return [
        ("README.md", f"{epoch('dlrm', 'QR(4)', 128):.0f} s for DLRM with `QR(4)`"),
        ("README.md", f"{epoch('dlrm', 'full', 128):.0f} s with full tables"),
        ("README.md", f"{epoch('dcn', 'QR(4)', 128):.0f} s for DCN"),
        ("README.md", f"{epoch('dlrm', 'QR(4)', 16384):.1f} s for DLRM at batch 16384"),
        (
            "docs/appendix/dense_layers.md",
            f"DLRM takes {us['dlrm', 'fused']} us on an H200 in place of {us['dlrm', 'plain']} ",
        ),
        ("docs/appendix/dense_layers.md", f"one of DCN {us['dcn', 'fused']} in place of {us['dcn', 'plain']}."),
        ("docs/appendix/training_speed.md", f"they added {added[0]} to DLRM's step of {first['graph_us']:.1f}"),
        ("docs/appendix/training_speed.md", f"with ten {added[1]} to {last['graph_us']:.1f}."),
        (
            "docs/appendix/benchmark_aims.md",
            f"the same step takes {rows['step', 'zipf', 2048, 16, 1].median_us:.1f} us",
        ),
        ("docs/appendix/benchmark_aims.md", f"{rows['step', 'zipf', 2048, 16, 0].median_us:.0f} us with Zipf ids"),
        (
            "docs/appendix/benchmark_aims.md",
            f"{rows['step', 'uniform', 2048, 16, 0].median_us:.0f} us with uniform ones",
        ),
        (
            "docs/appendix/benchmark_aims.md",
            f"within {lookup[1]:.2f} (D = 64) and {lookup[0]:.2f} times (D = 16) the floor",
        ),
        (
            "docs/appendix/benchmark_aims.md",
            f"{faster[0]:.2f} times as fast as `fbgemm` at D = 16, {faster[1]:.2f} at D = 64",
        ),
        ("docs/appendix/benchmark_aims.md", f"(in `h200.csv` its lookup is {paths:.2f}x)"),
        ("docs/appendix/benchmark_aims.md", f"{faster[2]:.2f} at D = 128: two of the four below the must"),
        (
            "docs/appendix/benchmark_aims.md",
            f"commit {results('eager')['facts']['commit']}",
        ),
        ("docs/kernels.md", f"{min(lookup):.1f} (D = 64) and {max(lookup):.1f} times the floor (D = 16)"),
        ("docs/kernels.md", f"{min(step):.1f} (D = 128) and {max(step):.1f} (D = 16)"),
        ("docs/appendix/serving_speed.md", f"DLRM with int8 tables scores {rates['predict int8']:,} rows a second"),
        ("docs/appendix/serving_speed.md", f"The floor is {rates['floor']:,}"),
        (
            "docs/appendix/serving_speed.md",
            f"{rates['lookup int8'] / 1e6:.1f} million rows a second, encoding at {rates['encode']:,}.",
        ),
        ("docs/benchmarks.md", f"take {min(composed):.2f} to {max(composed):.2f} times as long"),
        ("docs/benchmarks.md", f"missed in {sum(x >= 1.105 for x in composed)} of {len(composed)} settings"),
        ("docs/compress.md", f"{tuned['fitted at 100%']['mean']:.4f} against {tuned['scratch at 100%']['mean']:.4f}"),
        ("docs/compress.md", f"full tables {full['at 100%']['mean']:.4f}"),
        ("docs/serve.md", f"scores {rates['predict int8']:,} rows a second"),
        ("docs/serve.md", f"would allow {rates['floor']:,}."),
        ("docs/serve.md", f"takes {min(guarded):.1f} to {max(guarded):.1f} times as long"),
        ("docs/reliability.md", f"{results('hunt/damage')['files']:,} damaged files"),
        ("docs/reliability.md", f"{results('hunt/kills')['kills']} processes killed"),
        ("docs/reliability.md", f"{results('hunt/steps')['steps']:,} steps of drawn optimizers"),
        ("docs/kernels.md", f"four in {rows['step', 'zipf', 128, 16, 1].median_us:.1f} us"),
    ]


@pytest.mark.parametrize(("document", "words"), prose())
def test_prose_has_the_figures_of_the_files(document: str, words: str) -> None:
    assert words in " ".join((ROOT / document).read_text(encoding="utf-8").split())

"""The benchmark: its providers compute the same, its numbers are what they say, and it is silent on wrong kernels."""

import dataclasses
import importlib.util
import math
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from quorem.cli import app
from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import check, command, measure, report, run
from quorem.experiments.bench.grid import (
    FBGEMM,
    FULL,
    MODES,
    PRESETS,
    PROVIDERS,
    SCHEMES,
    Grid,
    draw_ids,
    groups,
    scheme_of,
)
from quorem.experiments.bench.providers import Skipped

ROOT = Path(__file__).parents[2]
SIZES = (50, 4, 1000, 7)
CPU = torch.device("cpu")
TINY = ["bench", "--quick", "--quick-check", "--device", "cpu", "--scheme", "qr", "--ids", "zipf", "--batch", "3"]
TINY += ["--dim", "4", "--provider", "loop", "--provider", "fused"]


def contender(provider: str, scheme: str, rule: str | None):
    if provider == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler: g++")
    try:
        return run.build(provider, scheme, rule, SIZES, 8, CPU)
    except Skipped as skipped:
        pytest.skip(str(skipped))


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with the mean of a row's squared gradient instead of each square, on dense gradients."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.sums = [torch.zeros(len(p), 1) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for p, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            total += p.grad.square().mean(1, keepdim=True)
            p -= self.defaults["lr"] * p.grad / (total.sqrt() + 1e-10)


def row(**changes: object) -> report.Row:
    values = {name: "" for name in report.CSV_COLUMNS}
    values |= {
        "mode": "step",
        "provider": "fused",
        "scheme": "QR(4)",
        "ids": "zipf",
        "batch": 128,
        "dim": 16,
        "graph": 0,
    }
    values |= {"median_us": 10.0, "q20_us": 9.0, "q80_us": 12.0, "samples": 5, "stored_bytes": 1000, "copy_gbps": 20.0}
    return report.Row(**values | changes)


def test_a_small_run_writes_rows_a_plot_and_tables(tmp_path):
    done = CliRunner().invoke(app, [*TINY, "--mode", "forward", "--mode", "step", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = report.read(tmp_path / "cpu.csv")
    assert [(r.mode, r.provider) for r in rows] == [(m, p) for m in ("forward", "step") for p in ("loop", "fused")]
    for r in rows:
        assert (r.scheme, r.ids, r.batch, r.dim, r.graph) == ("QR(4)", "zipf", 3, 4, 0)
        assert 0 < r.q20_us <= r.median_us <= r.q80_us
        assert r.gbps == pytest.approx(r.bytes / r.median_us / 1e3, abs=1e-3)
        assert r.ratio_to_floor == pytest.approx(r.median_us / r.floor_us, rel=2e-3, abs=1e-2)
        assert r.torch == torch.__version__ and r.device and r.commit and r.date and r.command
    assert {r.optimizer for r in rows if r.mode == "step"} == {"Adagrad", "torch Adagrad, sparse gradients"}
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    assert report.tables(rows) in done.output


def test_the_dlrm_and_amsgrad_modes_run(tmp_path):
    options = ["--mode", "dlrm", "--mode", "step_amsgrad", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*TINY, *options])
    assert done.exit_code == 0, done.output
    rows = report.read(tmp_path / "cpu.csv")
    assert [(r.mode, r.provider) for r in rows] == [("dlrm", "loop"), ("dlrm", "fused"), ("step_amsgrad", "fused")]
    assert [r.bytes == "" for r in rows] == [True, True, False]
    assert "skipped: loop in step_amsgrad, QR(4), D = 4: torch.optim has no sparse AMSGrad" in done.stderr


def test_wrong_kernels_give_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "kernels_are_wrong", lambda *_: "a test failed")
    done = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path / "new")])
    assert done.exit_code == 1
    assert (done.stdout, "a test failed" in done.stderr, (tmp_path / "new").exists()) == ("", True, False)


def kernel_tests(folder: Path, **passing: bool) -> None:
    """A checkout with a test for the kernels of each device, and one of nothing that is timed."""
    (folder / "tests" / "ops").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = kernels(device)\n")
    for name, passes in passing.items():
        mark = "" if name == "other" else f"import pytest\npytestmark = pytest.mark.kernels(device={name!r})\n"
        test = f"{mark}def test_{name}():\n    assert {passes}\n"
        (folder / "tests" / "ops" / f"test_{name}.py").write_text(test)


@pytest.mark.parametrize("passes", [True, False])
def test_the_kernel_tests_of_the_device_decide(tmp_path, monkeypatch, passes):
    kernel_tests(tmp_path, cpu=passes, gpu=not passes, other=False)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "differences", lambda device: "not asked for")
    wrong = check.kernels_are_wrong(CPU, quick=False)
    assert wrong is None if passes else "test_cpu" in wrong
    wrong = check.kernels_are_wrong(torch.device("cuda"), quick=False)
    assert wrong is None if not passes else "test_gpu" in wrong


@pytest.mark.parametrize("passing", [{"gpu": False}, {"other": False}, {}])
def test_without_kernel_tests_lookup_and_step_are_compared(tmp_path, monkeypatch, passing):
    kernel_tests(tmp_path, **passing)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "differences", lambda device: "compared")
    assert check.kernels_are_wrong(CPU, quick=False) == "compared"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_kernels_of_every_mode_have_tests(device):
    """``--mode dlrm`` times the dense layers and their optimizer too, which are Triton's."""
    files = [path for path in ROOT.glob("tests/**/test_*.py") if check.MARKER in path.read_text(encoding="utf-8")]
    text = "".join(
        p.read_text(encoding="utf-8") for p in files if f'kernels(device="{device}")' in p.read_text("utf-8")
    )
    names = {"cpu": ["ops.cpu"], "gpu": ["ops.gpu", "FusedStep", "foreach"]}
    assert all(name in text for name in names[device])


def test_the_quick_check_compares_lookup_and_step(monkeypatch):
    assert check.differences(CPU) is None
    lookup, update = check.lookup.lookup, check.rules.lookup_update_
    monkeypatch.setattr(check.lookup, "lookup", lambda *args: lookup(*args) + 1)
    assert check.differences(CPU).startswith("QR(4), lookup")
    monkeypatch.undo()
    twice = lambda grad, ids, stored, lr, *rest, **options: update(grad, ids, stored, 2 * lr, *rest, **options)  # noqa: E731
    monkeypatch.setattr(check.rules, "lookup_update_", twice)
    assert check.differences(CPU).startswith("QR(4), step")


@pytest.mark.parametrize("option", ["out", "plot"])
def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_measured(option, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "kernels_are_wrong", lambda *_: pytest.fail("it was too late"))
    (tmp_path / "file").touch()
    value = tmp_path / "file" / "x.png" if option == "plot" else tmp_path / "file"
    done = CliRunner().invoke(app, [*TINY, f"--{option}", str(value)])
    folder = tmp_path / "file"
    assert (done.exit_code, done.stderr) == (
        1,
        f"quorem: {option} ({folder}) must be a folder, and {folder} is a file\n",
    )
    monkeypatch.setattr(command.os, "access", lambda *_: False)  # as on a disk that is mounted read-only
    value = tmp_path / "new" / "x.png" if option == "plot" else tmp_path / "new"
    done = CliRunner().invoke(app, [*TINY, f"--{option}", str(value)])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert f"{option} ({tmp_path / 'new'}) must be a folder that can be written, and {tmp_path} cannot" in done.stderr


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    def measured(*_, **__):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measured", measured)
    done = CliRunner().invoke(app, [*TINY, "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert [r.provider for r in report.read(tmp_path / "cpu.csv")] == ["fused"]
    assert (tmp_path / "cpu.png").exists()


@pytest.mark.parametrize(
    ("provider", "scheme"),
    [
        (provider, scheme)
        for provider in PROVIDERS
        for scheme in ("QR(4)", "GeneralizedQR(3)", "ChineseRemainder(3)")
        if scheme == "QR(4)" or provider not in FULL  # which have the same full tables with each
    ],
)
def test_every_provider_gives_the_vectors_of_the_same_tables(provider, scheme):
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, scheme, None)
    tables = run.collection(scheme_of(provider, scheme), SIZES, 8, CPU).to_dense().values()
    expected = torch.stack([table[ids[:, f]] for f, table in enumerate(tables)], 1)
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), expected[:, made.order or list(range(4))])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_takes_the_same_step(provider):
    """Adagrad's on the dense gradient of the tables, as ``torch.optim`` takes it, or with one sum a row."""
    ids = draw_ids("zipf", SIZES, 33, seed=3)
    made = contender(provider, "QR(4)", "adagrad")
    oracle = run.collection(scheme_of(provider, "QR(4)"), SIZES, 8, CPU)
    rule = RowWiseAdagrad if "row-wise" in made.optimizer else torch.optim.Adagrad
    optimizer = rule(oracle.parameters(), lr=0.01)
    order = made.order or list(range(4))
    grad = torch.randn(33, 4, 8, generator=torch.Generator().manual_seed(33)) / 33  # as the benchmark draws it
    for _ in range(2):
        run.operation("step", made, ids)()
        oracle(ids)[:, order].backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(made.module(ids), oracle(ids)[:, order])


def test_a_provider_of_other_vectors_is_refused(monkeypatch):
    def wrong(source, rule):
        source.stored.data.mul_(2)
        return run.Contender(source)

    monkeypatch.setitem(run.BUILD, "loop", wrong)
    with pytest.raises(Skipped, match="its vectors differ"):
        run.build("loop", "QR(4)", None, SIZES, 8, CPU)


def test_quantiles_are_those_of_the_samples():
    call = measure.Call("x", lambda: None, seconds=[5e-6, 1e-6, 4e-6, 2e-6, 3e-6, 9e-6])
    assert call.quantiles() == pytest.approx(tuple(np.quantile([5, 1, 4, 2, 3, 9], [0.2, 0.5, 0.8])))


def test_calls_take_turns():
    order = []
    calls = [measure.Call(name, lambda name=name: order.append(name)) for name in "ab"]
    measure.time_in_turns(calls, CPU, measure.Effort(sample=0.0, total=0.0, least=3, most=3))
    assert "".join(order).endswith("ababab")
    assert [len(call.seconds) for call in calls] == [3, 3]


@pytest.mark.parametrize(("mode", "passes"), [("forward", 0), ("step", 1), ("step_amsgrad", 3)])
def test_bytes_count_ids_distinct_rows_vectors_and_state(mode, passes):
    ids = draw_ids("zipf", SIZES, 40, seed=0)
    specs = [SCHEMES["QR(4)"].spec(n, 8) for n in SIZES]
    rows = {
        (f, k, int(p(torch.tensor(i))))
        for f, spec in enumerate(specs)
        for i in ids[:, f].tolist()
        for k, p in enumerate(spec.partitions)
    }
    pass_ = 40 * 4 * 8 + len(rows) * 8 * 4 + 40 * 4 * 8 * 4
    expected = pass_ if not passes else 2 * pass_ + len(rows) * 8 * 4 * (1 + 2 * passes)
    assert measure.bytes_to_move(specs, [ids], mode) == expected
    assert measure.bytes_to_move(specs, [ids], "dlrm") is None


@pytest.mark.parametrize("how", ["zipf", "uniform"])
def test_ids_follow_their_distribution(how):
    ids = draw_ids(how, (99, 3), 20_000, seed=0)
    assert ids.min() == 0 and ids.amax(0).tolist() == [98, 2]
    p = math.log(2) / math.log(100) if how == "zipf" else 1 / 99
    deviation = math.sqrt(p * (1 - p) / 20_000)
    assert abs((ids[:, 0] == 0).double().mean() - p) < 4 * deviation


def test_presets_measure_nothing_twice_and_what_the_targets_ask():
    for preset, grids in PRESETS.items():
        cells = [
            (group.mode, scheme_of(p, group.scheme), group.dim, p, how, batch)
            for group in groups(grids)
            for how, batch, providers in group.cells
            for p in providers
        ]
        assert len(cells) == len(set(cells)), preset
        batches = (128, 2048, 16384) if preset == "fbgemm" else (1, 128, 2048, 16384)
        wanted = {("step", "QR(4)", 16, p, "zipf", b) for p in ("fbgemm", "fused") for b in batches}
        assert wanted <= set(cells)
    assert {group.mode for group in groups(PRESETS["h200"])} == set(MODES)


@pytest.mark.parametrize("preset", ["cpu", "h200", "fbgemm"])
def test_fbgemm_is_measured_in_both_settings_wherever_it_is(preset):
    for group in groups(PRESETS[preset]):
        for *_, providers in group.cells:
            assert ("fbgemm" in providers) == ("fbgemm_fastest" in providers)
            assert ("fbgemm_full" in providers) == ("fbgemm_full_fastest" in providers)


@pytest.mark.parametrize("provider", FBGEMM)
def test_fbgemm_runs_in_a_graph_where_fused_does(provider):
    made = contender(provider, "QR(4)", "adagrad")
    assert set(made.captures) >= {"forward", "step", "dlrm"}
    assert made.setting == ("fastest" if provider.endswith("fastest") else "default")
    bounds = made.module.lookup.bounds_check_mode_int
    assert (bounds == 3) == (made.setting == "fastest")  # BoundsCheckMode.NONE


def test_limits_confine_a_provider():
    grid = Grid(
        modes=("step",), providers=("loop", "fused"), schemes=("QR(4)",), ids=("zipf",), batches=(1, 2), dims=(4,)
    )
    (group,) = groups([dataclasses.replace(grid, limits=(("loop", "step", (2,)),))])
    assert group.cells == (("zipf", 1, ("fused",)), ("zipf", 2, ("loop", "fused")))


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--provider", "magic", "providers ('magic') must be of dense"),
        ("--mode", "sideways", "modes ('sideways') must be of forward"),
        ("--ids", "normal", "ids ('normal') must be of zipf"),
        ("--scheme", "x", "scheme ('x') must be the start of one of QR(4)"),
        ("--preset", "tpu", "preset ('tpu') must be one of full"),
    ],
)
def test_unknown_values_are_a_usage_error(option, value, match):
    done = CliRunner().invoke(app, ["bench", option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert match in done.output


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("--mode", "sideways", "mode ('sideways') must be one that was measured: step"),
        ("--batch", "7", "batch (7) must be one that was measured: 128, 2048"),
    ],
)
def test_values_that_a_file_lacks_are_a_usage_error(option, value, match, tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(batch=2048)])
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert match in done.output


def test_a_provider_that_was_not_measured_is_named(tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(provider="loop")])
    options = ["--provider", "fbgemm_fastest", "--provider", "fused"]
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), *options])
    assert done.exit_code == 0, done.output
    assert "Not measured: `fbgemm_fastest`." in done.output
    assert "`fused`" in done.output and "`loop`" not in done.output
    unknown = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), "--provider", "magic"])
    assert unknown.exit_code == 2


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path):
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv")], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "does not exist" in done.output


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"dims \(\(0,\)\) must be at least 1"):
        Grid(dims=(0,))


def test_a_file_of_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"columns of x\.csv \(\['a', 'b'\]\) must be"):
        report.read(tmp_path / "x.csv")


def test_no_rows_make_no_table():
    assert report.tables([]) == "Nothing was measured.\n"


def test_rows_come_back_from_a_file(tmp_path):
    rows = [row(), row(provider="dense", scheme="Full()", bytes=10, gbps=1.5, floor_us=0.5, ratio_to_floor=20.0)]
    report.append(tmp_path / "x.csv", rows[:1])
    report.append(tmp_path / "x.csv", rows[1:])
    assert report.read(tmp_path / "x.csv") == rows


def test_tables_compare_with_fused_on_the_same_tables():
    rows = [row(provider="dense", scheme="Full()", median_us=30.0), row(provider="loop", median_us=50.0), row()]
    rows += [row(provider="loop", scheme="ChineseRemainder(3)", median_us=70.0), row(batch=2048, median_us=1234.5)]
    lines = report.tables(rows).splitlines()[4:]
    assert lines == [
        "| step, D = 16, zipf ids | tables | B = 128 | B = 2048 |",
        "|---|---|---|---|",
        "| `dense` | `Full()` | 30.0 (3.00x) |  |",
        "| `loop` | `QR(4)` | 50.0 (5.00x) |  |",
        "| `fused` | `QR(4)` | 10.0 | 1,234 |",
        "| `loop` | `ChineseRemainder(3)` | 70.0 |  |",
    ]


def test_tables_and_plots_name_the_setting_of_fbgemm():
    rows = [
        row(provider="fbgemm", setting="default", optimizer="FBGEMM exact Adagrad", graph=1),
        row(provider="fbgemm_fastest", setting="fastest", optimizer="FBGEMM row-wise Adagrad"),
        row(),
    ]
    names = [line.split("|")[1].strip() for line in report.tables(rows).splitlines()[6:]]
    assert names == [
        "`fbgemm`, default setting, CUDA graph, FBGEMM exact Adagrad",
        "`fbgemm_fastest`, FBGEMM row-wise Adagrad",
        "`fused`",
    ]
    (legend,) = report.figure(rows).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:3] == ["fbgemm, default", "fbgemm_fastest", "fused"]


def test_a_table_is_drawn_from_its_file(tmp_path):
    report.append(tmp_path / "x.csv", [row(), row(batch=2048)])
    done = CliRunner().invoke(app, ["bench", "--table", str(tmp_path / "x.csv"), "--plot", str(tmp_path / "x.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_panels_share_a_legend_colours_and_the_sizes_that_were_measured():
    rows = [row(mode=mode, batch=batch) for mode in ("step", "forward") for batch in (2048, 1, 128)]
    rows += [row(provider="loop", median_us=10.0), row(provider="loop", mode="forward", graph=1, batch=1)]
    rows += [row(ids="uniform", batch=7), row(scheme="ChineseRemainder(3)", batch=9), row(scheme="Full()", batch=8)]
    figure = report.figure(rows)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["loop", "fused", "eager", "CUDA graph"]
    assert [axis.get_title() for axis in figure.axes] == ["step, D = 16", "forward, D = 16"]
    for axis in figure.axes:
        assert axis.get_legend() is None
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "128", "2048"]
        lines = {drawn.get_label(): drawn.lines[0] for drawn in axis.containers}
        shown = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.get_lines(), strict=True)}
        assert {name: line.get_color() for name, line in lines.items()} == {n: shown[n].get_color() for n in lines}
        assert lines["fused"].get_zorder() > lines["loop"].get_zorder()
        assert lines["fused"].get_linewidth() > lines["loop"].get_linewidth()
        assert (lines["fused"].get_linestyle(), lines["fused"].get_xdata().tolist()) == ("--", [1, 128, 2048])


def shown_tables() -> list[tuple[str, str, str]]:
    """Document, command and text of every table that a document shows."""
    found = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        text = path.read_text(encoding="utf-8")
        pattern = r"<!-- (quorem (?:bench|report) [^\n]*--table [^\n]*) -->\n(.*?)<!-- end -->\n"
        found += [(path.name, *match) for match in re.findall(pattern, text, re.DOTALL)]
    return found


@pytest.mark.parametrize(("document", "line", "text"), shown_tables())
def test_documents_show_what_the_result_files_hold(document, line, text, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(app, shlex.split(line)[1:]).output == text


def test_documents_show_results():
    assert {"README.md", "benchmarks.md"} <= {document for document, *_ in shown_tables()}


def test_results_tell_where_they_come_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        for r in report.read(path):
            assert r.device and r.torch and r.quorem and r.date and r.commit not in ("", "unknown")
            assert r.command.startswith("quorem bench") and str(Path.home()) not in r.command


def test_bench_measures_the_features_of_the_paper():
    assert len(CARDINALITIES) == 26 and run.CARDINALITIES == CARDINALITIES


def test_an_eager_step_is_measured_on_either_thread():
    """``benchmarks/eager.py`` sets autograd's switch for a step, and leaves it as it was."""
    spec = importlib.util.spec_from_file_location("eager", ROOT / "benchmarks" / "eager.py")
    eager = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(eager)
    seen = []
    for multithreaded in eager.THREADS.values():
        eager.on_thread(lambda: seen.append(torch._C._is_multithreading_enabled()), multithreaded)()
    assert seen == [True, False] and torch._C._is_multithreading_enabled()

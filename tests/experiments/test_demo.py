"""The demo: small, on data of its own and on prepared data."""

import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

import torch
from typer.testing import CliRunner

from quorem.cli import app
from quorem.cli.terminal import program
from quorem.data.prepared import Prepared
from quorem.experiments import demo
from quorem.experiments.figures import Figure
from quorem.modules.collection import EmbeddingCollection
from quorem.ops.cpu import word_bytes
from quorem.training.model import build_model
from quorem.training.tables import tables_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(demo, "SCALE", 0.00002)
    monkeypatch.setattr(sys, "argv", ["quorem", "demo"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*arguments: object):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.mark.filterwarnings("ignore:.*tables stay full")
def test_demo_prints_a_table_a_headline_and_commands_and_writes_the_page(tmp_path):
    out = tmp_path / "out"
    done = run("--out", out, "--rows", 3000, "--device", "cpu")
    assert done.exit_code == 0, done.output
    cardinalities = demo.scaled_cardinalities(0.00002)
    sizes = {
        name: EmbeddingCollection(tables_of(cardinalities, scheme), device="meta").num_parameters * 4
        for name, scheme in demo.SCHEMES.items()
    }
    figure = Figure.read(out / "results.json")
    log = Prepared(out / "log")
    planned, (*_, config) = demo.plan_of(log), demo.configs_of(log, 0)  # the last is the plan's
    sizes[demo.PLAN] = planned.bytes - planned.shared_bytes - planned.index_bytes
    assert sizes[demo.PLAN] <= 1.1 * sizes["mult, 60 collisions"]
    sizes[demo.PLAN] += word_bytes(build_model(config, log).embeddings.layout)  # the plan has their most
    assert {point.series: point.embedding_bytes for point in figure.points} == sizes
    full = figure.points[0]
    rows = [line for line in done.output.splitlines() if re.search(r" 0\.\d{4} ", line) and "kB" in line]
    assert [line.split("  ")[0].strip() for line in rows] == sorted(sizes, key=sizes.get, reverse=True)
    for line, point in zip(rows[1:], figure.points[1:], strict=True):
        assert f" {sizes['full'] / point.embedding_bytes:.1f} " in line  # times smaller
        assert f" {point.test_mean / full.test_mean - 1:+.1%} " in line and "rows/s" not in line
    assert demo.headline(figure.points) in done.output
    assert "The hidden model that drew the clicks has a log loss of" in done.output
    page = (out / "index.html").read_text(encoding="utf-8")
    assert f'<p class="headline">{demo.headline(figure.points)}</p>' in page and "What a byte buys" in page
    assert f"trained on {len(Prepared(out / 'log').split('train')):,} rows, 1 epoch, batch 128" in page
    assert "<img" not in page[: page.index("<script>")]


@pytest.mark.filterwarnings("ignore:.*tables stay full")
def test_the_commands_to_try_next_work_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--out", "out", "--rows", 1500, "--device", "cpu")
    lines = [line.strip() for line in done.output[done.output.index("Try next:") :].splitlines()[1:]]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)
        program = next(k for k, word in enumerate(words) if Path(word).name == "quorem")
        pasted = CliRunner().invoke(app, words[program + 1 :])
        assert pasted.exit_code == 0, (line, pasted.output)
    assert Path("out/mult/report.html").exists() and Path("out/figure4/report.html").exists()


def test_the_program_is_named_so_that_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script = tmp_path / ".venv" / "bin" / "quorem"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/quorem"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "quorem"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "__main__.py")])
    assert program().endswith(" -m quorem")


def test_demo_on_prepared_data(tmp_path):
    demo.make_log(tmp_path / "log", seed=3, num_rows=4000)
    done = run("--data", tmp_path / "log", "--out", tmp_path / "out", "--rows", 1280, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "one epoch over 1,280 rows" in done.output and not (tmp_path / "out" / "log").exists()


def test_curves_reach_from_the_first_rows_to_the_last(tmp_path):
    demo.make_log(tmp_path / "log", seed=0, num_rows=1000)
    prepared = demo.make_log(tmp_path / "log", seed=0, num_rows=3000)  # replaces the log of an earlier demo
    figure = demo.train_all(demo.configs_of(prepared, seed=0), prepared, tmp_path)
    steps = -(-len(prepared.split("train")) // 128)
    for point in figure.points:
        assert 2 <= len(point.curve) <= demo.POINTS + 1
        assert point.curve[-1] == (steps, point.validation_mean, None)


def test_data_that_are_not_there_are_one_line(tmp_path):
    done = run("--data", tmp_path / "absent", "--out", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "is not a folder of prepared data" in done.stderr

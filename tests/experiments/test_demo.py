"""The demo: what it prints and writes, and the commands that it names."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from commands import invoke

from quorem.data.prepared import Prepared
from quorem.experiments import demo
from quorem.experiments.figures import Figure
from quorem.ops.declare import word_bytes
from quorem.training.model import build_model

pytestmark = pytest.mark.filterwarnings("ignore:.*tables stay full")


def test_demo_prints_a_table_and_commands_and_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SCALE", 0.00002)
    monkeypatch.chdir(tmp_path)
    demo.make_log(Path("out/log"), seed=0, num_rows=1000)  # of an earlier demo: it is replaced
    done = invoke("demo", "--out", "out", "--rows", 3000, "--device", "cpu")
    figure, log = Figure.read(Path("out/results/demo.json")), Prepared("out/log")
    planned = demo.planned(log)
    sizes = {point.series: point.embedding_bytes for point in planned.points}
    (config,) = planned.runs(planned.points[-1])
    assert demo.plan_of(log).bytes <= 1.1 * sizes["mult, 60 collisions"]
    sizes[demo.PLAN] += word_bytes(build_model(config, log).embeddings.layout)  # the plan has their most
    points = sorted(figure.points, key=lambda point: -point.embedding_bytes)
    assert {point.series: point.embedding_bytes for point in points} == sizes
    full, *others = points
    rows = [line for line in done.output.splitlines() if re.search(r" 0\.\d{4} ", line) and "kB" in line]
    assert [line.split("  ")[0].strip() for line in rows] == [point.series for point in points]
    for line, point in zip(rows[1:], others, strict=True):
        assert f" {sizes['full'] / point.embedding_bytes:.1f} " in line  # times smaller
        assert f" {point.test_mean / full.test_mean - 1:+.1%} " in line
    assert "The hidden model that drew the clicks has a log loss of" in done.output
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert "What a byte buys" in page and "Validation loss while training" in page
    assert f"trained on {len(log.split('train')):,} rows, 1 epoch, batch 128" in page
    steps = -(-len(log.split("train")) // 128)
    for point in points:
        assert 2 <= len(point.curve) <= demo.POINTS + 1
        assert point.curve[-1] == (steps, point.validation_mean, None)

    following = done.output[done.output.index("Try next:") :].splitlines()[1:]
    assert len(following) == 3
    for line in following:
        words = shlex.split(line)
        invoke(*words[words.index("quorem") + 1 :])
    assert Path("out/mult/report.html").exists() and Path("out/figure4/report.html").exists()

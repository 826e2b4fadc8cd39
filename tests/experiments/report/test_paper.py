"""Drawings for paper (PNG and PDF), and tables as Markdown."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason='needs Plotly: pip install "quorem[report]"')

import matplotlib.image
from made_up_results import figure, result, sweep

from quorem.experiments import words
from quorem.experiments.report import draw
from quorem.experiments.report.document import html
from quorem.experiments.report.paper import drawing
from quorem.experiments.report.styles import FIXED
from quorem.experiments.report.tables import hidden_layers
from quorem.experiments.reproduce import publish
from quorem.experiments.table1 import LOSSES

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from made_up_results import sweep
from matplotlib.figure import Figure
from quorem.experiments.reproduce import publish

save = Figure.savefig

def killed(self, file, *, format, **options):
    if format == {format!r}:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, file, format=format, **options)

Figure.savefig = killed
publish([sweep()], Path({out!r}))
"""


def test_drawings_are_written_and_the_same_each_time(tmp_path):
    for folder in ("a", "b"):
        draw(sweep(), tmp_path / folder / "figure6.v1")
    names = ["figure6.v1.pdf", "figure6.v1.png"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    height, width, _ = matplotlib.image.imread(tmp_path / "a" / "figure6.v1.png").shape
    assert width > height > 300 and (tmp_path / "a" / "figure6.v1.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_that_is_stopped_leaves_the_pictures_of_the_one_before(tmp_path, monkeypatch):
    draw(sweep(), tmp_path / "figure6")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    savefig = matplotlib.figure.Figure.savefig
    for kind in ("png", "pdf"):

        def stop(canvas, file, kind=kind, **options):
            savefig(canvas, file, **options)
            if options["format"] == kind:
                raise KeyboardInterrupt

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", stop)
        with pytest.raises(KeyboardInterrupt):
            draw(sweep(series=("hash", "mult")), tmp_path / "figure6")
        assert sorted(before) == sorted(path.name for path in tmp_path.iterdir())
        assert (tmp_path / f"figure6.{kind}").read_bytes() == before[f"figure6.{kind}"]


def test_fonts_of_the_pdf_are_truetype(tmp_path):
    draw(sweep(), tmp_path / "figure6")
    data = (tmp_path / "figure6.pdf").read_bytes()
    assert b"/Type3" not in data and (b"/TrueType" in data or b"/CIDFontType2" in data)


@pytest.mark.parametrize("format", ["png", "pdf"])
def test_a_report_that_is_killed_leaves_nothing_half_written(tmp_path, format):
    program = KILLED.format(tests=str(Path(__file__).parents[2]), format=format, out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / f"figure6.{format}").exists() and list(tmp_path.glob("*.tmp"))
    publish([sweep()], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"figure6.{e}" for e in ("csv", "json", "pdf", "png")]
    assert (tmp_path / "figure6.png").read_bytes().startswith(b"\x89PNG")


def test_a_drawing_has_a_panel_a_network_and_a_line_a_series():
    shown = sweep(series=("hash", "feature", "mult"))
    left, right = drawing(shown).axes
    assert (left.get_title(), right.get_title()) == ("DCN", "DLRM")
    for panel in (left, right):
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "linear")
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("threshold", "test log loss")
        assert len(panel.containers) == 3  # error bars: hash, feature, mult
        level = next(line for line in panel.lines if line.get_linestyle() == "--")
        assert list(level.get_ydata()) == [0.44, 0.44] and level.get_color() == FIXED["full"].light
    (legend,) = left.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full", "hash", "feature", "mult"]


def test_a_drawing_of_curves_has_bands_and_keeps_a_dollar_sign():
    curve = [[10, 0.5, 0.01], [20, 0.4, 0.02]]
    (panel,) = drawing(figure([result("$x$", curve=curve, network="mine")], x="step")).axes
    assert panel.get_title() == "mine" and len(panel.collections) == 1
    assert panel.figure.legends[0].get_texts()[0].get_text() == r"\$x\$"


def test_table_1_is_a_table_too(tmp_path):
    points = [
        result("path", hidden, loss=loss, sd=0.00002, network=network)
        for network, values in LOSSES.items()
        for hidden, loss in values.items()
    ]
    shown = figure(points, name="table1", title="Table 1", x_label="hidden layer", x_log=True)
    head, *rows = hidden_layers(shown)
    assert head == ["network", "hidden layer", "16", "32", "64", "128"] and len(rows) == 6
    assert rows[1][4] == "**0.45252 ± 0.00002**" and rows[2][4] == "**0.45252**" and rows[1][2] == "0.45263 ± 0.00002"
    assert rows[1][3] == "**0.45254 ± 0.00002**" and rows[2][3] == "0.45254"  # a tie, which needs deviations
    draw(shown, tmp_path / "table1")
    assert (tmp_path / "table1.md").read_text(encoding="utf-8") == "\n".join(words.table([head, *rows])) + "\n"
    assert "<strong>0.45306 ± 0.00002</strong>" in html([shown])


def test_markdown_keeps_a_bar_in_its_cell():
    assert words.table([["a|b", "c"], ["1", "2"]]) == ["| a\\|b | c |", "|---|---|", "| 1 | 2 |"]

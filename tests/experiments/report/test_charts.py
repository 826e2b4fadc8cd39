"""Charts: as files, and as SVG of the page, against the numbers that were put into them."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

import matplotlib.image
from made_up_results import figure, result, sweep

from quorem.experiments.report.charts import FIXED, draw, drawing, figure_svgs, styles
from quorem.experiments.report.lines import coinciding, panels
from quorem.experiments.report.page import html
from quorem.experiments.reproduce import publish

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
    pdf = (tmp_path / "a" / "figure6.v1.pdf").read_bytes()
    assert width > height > 300 and pdf.startswith(b"%PDF")
    assert b"/Type3" not in pdf and (b"/TrueType" in pdf or b"/CIDFontType2" in pdf)  # as publishers require


@pytest.mark.parametrize("format", ["png", "pdf"])
def test_a_report_that_is_killed_leaves_nothing_half_written(tmp_path, format):
    program = KILLED.format(tests=str(Path(__file__).parents[2]), format=format, out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / f"figure6.{format}").exists() and list(tmp_path.glob("*.tmp"))
    publish([sweep()], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"figure6.{e}" for e in ("json", "pdf", "png")]
    assert (tmp_path / "figure6.png").read_bytes().startswith(b"\x89PNG")


def test_a_drawing_has_a_panel_a_network_and_a_line_a_series_with_its_numbers():
    names = ("full", "hash", "feature", "mult")
    shown = sweep(series=names[1:])
    left, right = drawing(shown).axes
    assert (left.get_title(), right.get_title()) == ("DCN", "DLRM")
    for panel, network in ((left, "dcn"), (right, "dlrm")):
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "linear")
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("threshold", "test log loss")
        assert len(panel.collections) == 3  # error bars: hash, feature, mult
        level = next(line for line in panel.lines if line.get_linestyle() == "--")
        assert list(level.get_ydata()) == [0.44, 0.44] and level.get_color() == FIXED["full"].light
        lines = {line.get_gid(): line for line in panel.lines}
        for series in names[1:]:
            points, line = [p for p in shown.points if (p.network, p.series) == (network, series)], names.index(series)
            assert list(lines[f"points:{line}"].get_xdata()) == [p.x for p in points]
            assert list(lines[f"points:{line}"].get_ydata()) == [p.test_mean for p in points]
        assert list(panel.get_xticks()) == [1, 20, 200]
    (legend,) = left.figure.legends
    assert tuple(text.get_text() for text in legend.get_texts()) == names


def abouts(svg):
    return [element.get("data-about") for element in ET.fromstring(svg).iter() if element.get("data-about")]


def test_every_point_has_its_own_text_and_every_colour_is_a_variable():
    shown = sweep(series=("hash", "mult"))
    svg = figure_svgs(shown, styles(["full", "hash", "mult"]))["dcn"]
    points = [p for p in shown.points if p.network == "dcn" and p.x is not None]
    said = abouts(svg)
    assert len(said) == len(points)
    for point, text in zip(points, said, strict=True):
        assert text.startswith(f"{point.series} · DCN") and f"threshold {point.x:g}" in text
        assert f"test log loss {point.test_mean:.5f}" in text
    assert not re.search(r"(stroke|fill): #", svg) and f"var(--c{FIXED['mult'].light[1:]})" in svg


def test_curves_show_their_end_first_and_a_text_for_each_step():
    curve = [[k, 0.8 if k < 25 else 0.46 - k / 1e4, None] for k in range(5, 105, 5)]
    shown = figure([result(curve=curve), result("hash", curve=[])], x="step", y="validation", y_label="loss")
    low, high = panels(shown)["dcn"].end
    assert low < 0.45 and 0.4575 <= high < 0.47  # 0.8, at the beginning, is outside
    (panel,) = drawing(shown).axes
    assert panel.get_ylim() == pytest.approx((low, high))
    looks = styles(["mult", "hash"])
    said, whole = (abouts(figure_svgs(shown, looks, whole=whole)["dcn"]) for whole in (False, True))
    assert len(said) == 16 and "step 25, loss 0.45750" in said[0] and "step 100, loss 0.45000" in said[-1]
    assert len(whole) == 20 and "step 5, loss 0.80000" in whole[0]
    assert "Show all of training" in html([shown]) and "1 of 2 points have nothing to draw" in html([shown])
    assert panels(sweep())["dcn"].end is None and "Show all of training" not in html([sweep()])


def test_series_that_coincide_are_told():
    same = [result(series, x, loss=0.45 + x / 100) for series in ("add", "mult") for x in (1, 2)]
    near = [result("hash", x, loss=0.45001 + x / 100) for x in (1, 2)]
    apart = [result("concat", x, loss=0.455 + x / 100) for x in (1, 2)]
    shown = figure([*near, *same, *apart])
    assert coinciding(panels(shown)["dcn"].lines) == ["hash ≈ add ≈ mult"]
    assert "Drawn on top of each other: hash ≈ add ≈ mult (DCN)." in html([shown])
    assert "on top of each other" not in html([sweep()])


def test_a_point_at_zero_has_no_place_on_a_logarithmic_axis():
    shown = figure([result(x=0), result(x=10)], x_log=True)
    assert [line.x for line in panels(shown)["dcn"].lines] == [[10.0]]
    assert "1 of 2 points have nothing to draw" in html([shown])
    assert [line.x for line in panels(figure(shown.points))["dcn"].lines] == [[0.0, 10.0]]
    low, high = panels(sweep())["dcn"].x_range
    assert low < 1 < 200 < high

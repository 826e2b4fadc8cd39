"""The page and the drawings of figures with numbers made up, against what was put into them."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason='needs Plotly: pip install "quorem[report]"')

import matplotlib.image
from made_up_results import DATA, figure, result, sweep

from quorem.experiments.report import draw, page
from quorem.experiments.report.document import html, sections
from quorem.experiments.report.lines import coinciding, end_of, panels, span, ticks
from quorem.experiments.report.paper import drawing
from quorem.experiments.report.styles import FIXED, OTHERS, styles
from quorem.experiments.report.tables import hidden_layers, markdown
from quorem.experiments.report.tradeoff import distinct, front, winners
from quorem.experiments.reproduce import publish
from quorem.experiments.table1 import LOSSES
from quorem.schemes import Full

EVIL = "</script><script>alert('<b>&amp;\"')</script>"


class Reader(HTMLParser):
    """Tags with their attributes, the text outside of scripts, and the scripts by id."""

    VOID = frozenset({"meta", "input", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.scripts = "", {}
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[self.tags[-1][1].get("id") or str(len(self.scripts))] = data
        elif self.open[-1:] != ["style"]:
            self.text += data

    def having(self, **wanted):
        return [a for _, a in self.tags if all(w in (a.get(k.rstrip("_")) or "").split() for k, w in wanted.items())]


def plots_of(text):
    return json.loads(Reader(text).scripts["plots"])


def traces_of(plot, role="line"):
    return [trace for trace in plot["data"] if trace["meta"]["role"] == role]


def test_the_page_is_one_file_that_asks_nothing_of_a_network(tmp_path):
    page([sweep()], tmp_path / "deep" / "page.html")
    read = Reader((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    assert not [a for tag, a in read.tags if tag in ("link", "img", "iframe") or a.get("src")]
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src" not in policy and "http" not in policy
    assert sum("plotly.js v" in script for script in read.scripts.values()) == 1


def test_no_figures_is_an_error_and_no_points_is_said(tmp_path):
    with pytest.raises(ValueError, match="at least one figure"):
        page([], tmp_path / "page.html")
    text = Reader(html([figure([])])).text
    assert "No point of any figure is trained yet." in text and "No point of this figure is trained yet." in text
    with pytest.raises(ValueError, match=r"'figure6'.* must have points"):
        draw(figure([]), tmp_path / "figure6")


def test_every_point_of_every_figure_has_a_row_with_command_and_configuration():
    figures = [sweep(), sweep(name="mine", title="Mine", x="embedding_bytes")]
    read = Reader(html(figures))
    assert len(read.having(class_="point")) == sum(len(f.points) for f in figures) == 28
    assert sum(tag == "details" for tag, _ in read.tags) == 28
    for point in figures[0].points:
        assert point.command in read.text and json.dumps(point.config, indent=1, sort_keys=True) in read.text
    assert {a["data-figure"] for a in read.having(class_="point")} == {"Figure 6", "Mine"}


def test_headings_of_the_points_are_buttons_that_tell_their_order():
    text = html([sweep()])
    table = text[text.index('<table id="points"') :]
    head = Reader(table[table.index("<thead>") : table.index("</thead>") + 8])
    headings = [a for tag, a in head.tags if tag == "th"]
    assert all(a["aria-sort"] == "none" and a["scope"] == "col" for a in headings)
    assert sum(tag == "button" for tag, _ in head.tags) == len(headings)


def test_claim_numbers_and_makers_are_on_the_page():
    text = Reader(html([sweep(paper="What they <say>.")])).text
    for part in ("What they <say>.", "quorem reproduce all", "a machine", "torch 2.13.0", "abc1234", "2026-01-02"):
        assert part in text
    assert "mult at threshold 1, test 0.45500 ± 0.00100, 3.41% above full tables" in text  # 0.455 / 0.44


def test_what_comes_from_files_is_text_and_never_markup():
    point = result(EVIL, 1, command=EVIL, optimizer=EVIL, network=EVIL)
    text = html([figure([point], {"name": EVIL, EVIL: EVIL}, name="evil", title=EVIL, x_label=EVIL, paper=EVIL)])
    read = Reader(text)
    assert EVIL not in text
    assert sum(tag == "script" for tag, _ in read.tags) == 4
    assert read.text.count(EVIL) > 8
    (plot,) = {json.dumps(p["layout"]["xaxis"]["title"]["text"]) for p in plots_of(text).values()} - {
        '"embedding tables"'
    }
    assert json.loads(plot) == escape(EVIL)
    hover = plots_of(text)["d0f0p0"]["data"][0]["hovertext"][0]
    assert f"<b>{escape(EVIL)}</b>" in hover and "<script" not in hover


def test_a_plot_has_every_series_and_number_of_its_network():
    shown = sweep(series=("hash", "feature", "mult"))
    plots = plots_of(html([shown]))
    assert sorted(plots) == ["d0f0p0", "d0f0p1", "d0tp0", "d0tp1"]
    for plot, network in ((plots["d0f0p0"], "dcn"), (plots["d0f0p1"], "dlrm")):
        traces = {trace["meta"]["series"]: trace for trace in traces_of(plot)}
        assert list(traces) == ["full", "hash", "feature", "mult"]
        for series in ("hash", "feature", "mult"):
            points = [p for p in shown.points if p.network == network and p.series == series]
            assert traces[series]["x"] == [p.x for p in points]
            assert traces[series]["y"] == [p.test_mean for p in points]
            assert traces[series]["error_y"]["array"] == [p.test_sd for p in points]
        assert set(traces["full"]["y"]) == {0.44} and traces["full"]["line"]["dash"] == "dash"
        (band,) = traces_of(plot, "band")
        assert (min(band["y"]), max(band["y"])) == pytest.approx((0.439, 0.441))
        assert plot["layout"]["xaxis"]["type"] == "log" and plot["layout"]["xaxis"]["tickvals"] == [1, 20, 200]


def test_hover_gives_configuration_mean_deviation_trials_and_size():
    text = html([figure([result("mult", 4, size=540_000_000, trials=5, missing=1, optimizer="amsgrad")])])
    hover = plots_of(text)["d0f0p0"]["data"][0]["hovertext"][0]
    assert hover.split("<br>") == [
        "<b>mult</b> · DCN",
        "scheme QR(num_collisions=4)",
        "threshold 0",
        "optimizer AMSGrad",
        "threshold 4",  # x
        "test log loss 0.45000 ± 0.00100",
        "validation log loss 0.45000 ± 0.00100",
        "trials 5, 1 missing",
        "model 135 M parameters, 540 MB",
        "tables 135 M parameters, 540 MB",
    ]


def test_curves_have_a_band_of_one_deviation():
    curve = [[10, 0.5, 0.01], [20, 0.4, 0.02]]
    label = "validation log loss"
    shown = figure([result(curve=curve), result("hash", curve=[])], x="step", y="validation", y_label=label)
    text = html([shown])
    plot = plots_of(text)["d0f0p0"]
    (line,), (band,) = traces_of(plot), traces_of(plot, "band")
    assert (line["x"], line["y"]) == ([10, 20], [0.5, 0.4])
    assert "step 20, validation log loss 0.40000 ± 0.02000" in line["hovertext"][1]
    assert band["y"] == pytest.approx([0.51, 0.42, 0.38, 0.49])
    assert "1 of 2 points have nothing to draw" in text


def test_curves_show_their_end_first(tmp_path):
    curve = [[k, 0.8 if k < 25 else 0.46 - k / 1e4, None] for k in range(5, 105, 5)]
    shown = figure([result(curve=curve)], x="step", y="validation")
    low, high = end_of(panels(shown)["dcn"])
    assert low < 0.45 and 0.4575 <= high < 0.47  # 0.8, at the beginning, is outside
    text = html([shown])
    assert plots_of(text)["d0f0p0"]["layout"]["yaxis"]["range"] == [low, high]
    assert "Show all of training" in Reader(text).text
    (panel,) = drawing(shown).axes
    assert panel.get_ylim() == pytest.approx((low, high))
    assert end_of(panels(sweep())["dcn"]) is None and "Show all of training" not in html([sweep()])


def test_series_that_coincide_are_told():
    same = [result(series, x, loss=0.45 + x / 100) for series in ("add", "mult") for x in (1, 2)]
    near = [result("hash", x, loss=0.45001 + x / 100) for x in (1, 2)]
    apart = [result("concat", x, loss=0.455 + x / 100) for x in (1, 2)]
    shown = figure([*near, *same, *apart])
    assert coinciding(panels(shown)["dcn"]) == ["hash ≈ add = mult"]
    assert "Drawn on top of each other: hash ≈ add = mult (DCN)." in Reader(html([shown])).text
    assert [text.get_text() for text in drawing(shown).axes[0].texts] == ["hash ≈ add = mult"]
    assert "on top of each other" not in html([sweep()])


def test_marks_of_an_axis_have_one_unit():
    points = [result("mult", x, size=400 * 1000 * x) for x in (1, 4, 16)]
    plot = plots_of(html([figure(points, x="parameters", x_log=True)]))["d0f0p0"]
    texts = plot["layout"]["xaxis"]["ticktext"]
    assert len(texts) > 2 and {text.split()[1] for text in texts} == {"M"}
    linear = plots_of(html([figure(points, x="parameters", y="parameters")]))["d0f0p0"]["layout"]
    for axis in ("xaxis", "yaxis"):
        assert {text.split()[-1] for text in linear[axis]["ticktext"]} <= {"M", "0"}


def test_a_point_at_zero_has_no_place_on_a_logarithmic_axis():
    shown = figure([result(x=0), result(x=10)], x_log=True)
    assert [line.x for line in panels(shown)["dcn"]] == [[10.0]]
    assert "1 of 2 points have nothing to draw" in html([shown])
    assert [line.x for line in panels(figure(shown.points))["dcn"]] == [[0.0, 10.0]]


def test_points_without_training_show_their_parameters_only():
    nothing = dict.fromkeys(("validation_mean", "validation_sd", "auc_mean", "auc_sd"))
    counted = result(loss=None, sd=None, trials=0, optimizer="", size=4000, **nothing)
    text = html([figure([counted], y="parameters")])
    (plot,) = plots_of(text).values()
    assert plot["data"][0]["y"] == [1100] and "not trained" in plot["data"][0]["hovertext"][0]
    assert "\N{EN DASH}" in Reader(text).text and "nan" not in text[: text.index("<script>")].lower()


def test_one_run_without_a_curve_has_no_empty_axes_and_is_compared_with_nothing():
    text = html([figure([result(curve=[])], x="step")])
    said = Reader(text).text
    assert plots_of(text) == {} and "1 of 1 points have nothing to draw, since they trained" in said
    assert "What a byte buys" not in said and "One figure, 1 point;" in said


def test_missing_and_failed_trials_are_said():
    others = {"adagrad": {"trials": 4}, "amsgrad": {"trials": 5}}
    text = Reader(html([figure([result(trials=4, missing=1, failed=1, others=others), result("hash")])])).text
    assert "1 of 15 trials are missing, 1 of them failed." in text and "4 (1 missing, 1 failed)" in text
    assert "missing" not in Reader(html([sweep()])).text


def test_figures_stand_by_their_data():
    other = {**DATA, "identity": "2"}
    figures = [sweep(), sweep(data=other), sweep(data={**DATA, "path": "elsewhere"}), sweep(data=None)]
    assert {name: [figures.index(f) for f in found] for name, found in sections(figures).items()} == {
        "made-up": [0, 2],
        "made-up (2)": [1],
        "data": [3],
    }
    plots = plots_of(html(figures))
    assert sum(key.startswith("d1") for key in plots) == 4  # two networks of its figure, and of its trade-off


def test_the_front_is_what_nothing_beats():
    numbers = [(100, 0.50), (100, 0.49), (200, 0.49), (300, 0.47), (400, 0.48), (500, 0.46)]
    points = [result(x=k, size=size, loss=loss) for k, (size, loss) in enumerate(numbers)]
    expected = [
        p
        for p in points
        if not any(
            (q.embedding_bytes, q.test_mean) != (p.embedding_bytes, p.test_mean)
            and q.embedding_bytes <= p.embedding_bytes
            and q.test_mean <= p.test_mean
            for q in points
        )
    ]
    assert front(points) == expected and [p.embedding_bytes for p in expected] == [100, 300, 500]
    (drawn,) = traces_of(plots_of(html([figure(points)]))["d0tp0"], "front")
    assert drawn["x"][:-1] == [100, 300, 500] and drawn["y"] == [0.49, 0.47, 0.46, 0.46]


def test_the_trade_off_counts_a_setting_of_two_figures_once():
    again = sweep(name="figure5")
    followed = [dataclasses.replace(p, config={**p.config, "validate_every": 7}) for p in again.points]
    figures = [sweep(), dataclasses.replace(again, points=followed)]
    assert len(distinct(figures)) == len(sweep().points)
    untrained = result(loss=None)
    assert distinct([figure([untrained, result(loss=math.nan)])]) == []


def test_winners_at_each_size():
    points = [
        result("full", None, loss=0.440, size=64_000, scheme=Full()),
        result("hash", 4, loss=0.460, size=16_000),
        result("mult", 4, loss=0.450, size=16_300),
        result("mult", 5, loss=0.451, size=13_000),  # 64 / 13 is nearest to 4 as well
        result("hash", 60, loss=0.4705, size=1_000, sd=0.0002),
        result("add", 60, loss=0.4700, size=1_050, sd=0.0004),
    ]
    wins = winners(points)
    assert [(w.power, w.low, w.high, w.best.series) for w in wins] == [
        (0, 64_000, 64_000, "full"),
        (-2, 13_000, 16_300, "mult"),
        (-6, 1_000, 1_050, "add"),
    ]
    assert [w.second and w.second.series for w in wins] == [None, "hash", "hash"]
    assert wins[1].difference == pytest.approx(0.010) and wins[1].clear is True
    assert wins[2].clear is False  # 0.0005 apart, deviations of 0.0006 together
    read = Reader(html([figure(points)]))
    assert len(read.having(class_="win")) == 3 and "0.45000 ± 0.00100" in read.text and "no, a tie" in read.text


def test_one_trial_has_no_deviation_to_compare_with():
    points = [result("hash", loss=0.46, trials=1, sd=0.0), result("mult", loss=0.45, trials=1, sd=0.0)]
    (win,) = winners(points)
    assert win.clear is None and "not known: one trial" in Reader(html([figure(points)])).text


def test_series_look_the_same_everywhere_and_different_from_each_other():
    names = ["mine", "mult", "full", *(f"other {k}" for k in range(len(OTHERS) - 1))]
    found = styles(names)
    assert found["mult"] == FIXED["mult"] and list(found)[:2] == ["full", "mult"]
    assert len({s.light for s in found.values()}) == len({s.symbol for s in found.values()}) == len(names)


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_colours_have_a_contrast_of_three_to_one(ground):
    """By the definition of WCAG 2, on the ground of the cards."""

    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    card = luminance({"light": "#ffffff", "dark": "#181d24"}[ground])
    assert re.search(r"--card: #ffffff.*--card: #181d24", html([sweep()]), re.DOTALL)
    for style in (*FIXED.values(), *OTHERS):
        low, high = sorted([luminance(getattr(style, ground)), card])
        assert (high + 0.05) / (low + 0.05) >= 3, style


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


@pytest.mark.parametrize("format", ["png", "pdf"])
def test_a_report_that_is_killed_leaves_nothing_half_written(tmp_path, format):
    program = KILLED.format(tests=str(Path(__file__).parents[1]), format=format, out=str(tmp_path))
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
    assert (tmp_path / "table1.md").read_text(encoding="utf-8") == markdown([head, *rows])
    assert "<strong>0.45306 ± 0.00002</strong>" in html([shown])


def test_markdown_keeps_a_bar_in_its_cell():
    assert markdown([["a|b", "c"], ["1", "2"]]) == "| a\\|b | c |\n|---|---|\n| 1 | 2 |\n"


def test_axes_reach_around_their_points():
    lines = panels(sweep())["dcn"]
    low, high = span(lines, log=True)
    assert low < 1 < 200 < high
    assert ticks(lines, [low, high], log=True, at_points=True) == [1, 20, 200]
    many = panels(figure([result(x=x, size=4 * 10**x) for x in range(1, 9)], x="embedding_bytes"))["dcn"]
    reach = span(many, log=True)
    assert ticks(many, reach, log=True, at_points=False) == [10.0**k for k in range(2, 9)]
    assert ticks(lines, [0.0, 1.0], log=False, at_points=False) is None

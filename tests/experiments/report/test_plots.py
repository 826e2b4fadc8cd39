"""The plots of the page, against the numbers that were put into them."""

import pytest

pytest.importorskip("plotly", reason='needs Plotly: pip install "quorem[report]"')

from made_up_results import figure, result, sweep
from report_pages import Reader, plots_of, traces_of

from quorem.experiments.report.document import html
from quorem.experiments.report.lines import coinciding, end_of, panels, span, ticks
from quorem.experiments.report.paper import drawing
from quorem.experiments.report.styles import FIXED, OTHERS, styles


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


def test_series_look_the_same_everywhere_and_different_from_each_other():
    names = ["mine", "mult", "full", *(f"other {k}" for k in range(len(OTHERS) - 1))]
    looks = styles(names)
    assert looks["mult"] == FIXED["mult"] and list(looks)[:2] == ["full", "mult"]
    assert len({s.light for s in looks.values()}) == len({s.symbol for s in looks.values()}) == len(names)


def test_axes_reach_around_their_points():
    lines = panels(sweep())["dcn"]
    low, high = span(lines, log=True)
    assert low < 1 < 200 < high
    assert ticks(lines, [low, high], log=True, at_points=True) == [1, 20, 200]
    many = panels(figure([result(x=x, size=4 * 10**x) for x in range(1, 9)], x="embedding_bytes"))["dcn"]
    reach = span(many, log=True)
    assert ticks(many, reach, log=True, at_points=False) == [10.0**k for k in range(2, 9)]
    assert ticks(lines, [0.0, 1.0], log=False, at_points=False) is None

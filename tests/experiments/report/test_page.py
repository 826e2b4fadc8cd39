"""The HTML page: one file with every point and number; no text becomes markup, and unlike runs are never ranked."""

import dataclasses
import json
import re

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from made_up_results import DATA, figure, result, sweep
from report_pages import Reader

from quorem.experiments.figures import Conditions, Figure
from quorem.experiments.report.charts import FIXED, OTHERS
from quorem.experiments.report.page import html, page, sections
from quorem.experiments.report.tradeoff import is_clear

EVIL = "</script><script>alert('<b>&amp;\"')</script>"


def test_the_page_is_one_file_that_asks_nothing_of_a_network(tmp_path):
    page([sweep()], tmp_path / "deep" / "page.html")
    read = Reader((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    assert not [a for tag, a in read.tags if tag in ("link", "img", "iframe") or a.get("src")]
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src" not in policy and "http" not in policy
    assert len(read.of_class("plot")) == 4 == sum(tag == "svg" for tag, _ in read.tags)


def test_no_points_is_said():
    text = Reader(html([figure([])])).text
    assert "No point of any figure is trained yet." in text and "No point of this figure is trained yet." in text


def test_every_point_of_every_figure_has_a_row_with_command_and_configuration():
    figures = [sweep(), sweep(name="mine", title="Mine", x="embedding_bytes")]
    read = Reader(html(figures))
    assert len(read.of_class("point")) == sum(len(f.points) for f in figures) == 28
    assert sum(tag == "details" for tag, _ in read.tags) == 28
    for point in figures[0].points:
        assert point.command in read.text and json.dumps(point.config, indent=1, sort_keys=True) in read.text
    assert {json.loads(a["data-keys"])[0] for a in read.of_class("point")} == {"Figure 6", "Mine"}


def test_claim_numbers_and_makers_are_on_the_page():
    text = Reader(html([sweep(paper="What they <say>.")])).text
    for part in ("What they <say>.", "quorem reproduce all", "a machine", "torch 2.13.0", "abc1234", "2026-01-02"):
        assert part in text
    assert "mult at threshold 1, test 0.45500 ± 0.00100, 3.41% above full tables" in text  # 0.455 / 0.44


def test_what_comes_from_files_is_text_and_never_markup():
    point = result(EVIL, 1, command=EVIL, optimizer=EVIL, network=EVIL)
    data, axes = dataclasses.replace(DATA, name=EVIL), dict.fromkeys(("title", "x_label", "paper"), EVIL)
    text = html([figure([point], data, name="evil", **axes)])
    read = Reader(text)
    assert EVIL not in text
    assert sum(tag == "script" for tag, _ in read.tags) == 1
    assert read.text.count(EVIL) > 8
    assert any(EVIL in (a.get("data-about") or "") for _, a in read.tags)


def test_one_run_without_a_curve_has_no_empty_axes_and_is_compared_with_nothing():
    text = html([figure([result(curve=[])], x="step")])
    said = Reader(text).text
    assert "<svg" not in text and "1 of 1 points have nothing to draw, since they trained" in said
    assert "What a byte buys" not in said and "One figure, 1 point;" in said


def test_missing_and_failed_trials_are_said():
    others = {"adagrad": {"trials": 4}, "amsgrad": {"trials": 5}}
    text = Reader(html([figure([result(trials=4, missing=1, failed=1, others=others), result("hash")])])).text
    assert "1 of 15 trials are missing, 1 of them failed." in text and "4 (1 missing, 1 failed)" in text
    assert "missing" not in Reader(html([sweep()])).text


def test_figures_stand_by_their_data():
    changes = [{}, {"identity": "2"}, {"path": "elsewhere"}, {"name": "data", "identity": "3"}]
    figures = [sweep(data=dataclasses.replace(DATA, **change)) for change in changes]
    found = {name: [figures.index(f) for f in members] for name, members in sections(figures).items()}
    assert found == {"made-up (1)": [0, 2], "made-up (2)": [1], "data": [3]}
    second = html(figures).split('<section id="d')[2]
    assert second.count("<svg") == 4  # two networks of its figure, and of its trade-off


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


LIMITS = {"max_rows": 300, "epochs": 2, "batch_size": 64}


def changed(shown: Figure, **options: object) -> Figure:
    """The figure with options of every configuration changed."""
    points = [dataclasses.replace(p, config={**p.config, **options}) for p in shown.points]
    return dataclasses.replace(shown, points=points)


def test_conditions_are_those_of_the_configuration_and_the_data():
    assert sweep().conditions() == [Conditions(1200, 1, 128)]
    (part,) = changed(sweep(), **LIMITS).conditions()
    assert part == Conditions(300, 2, 64) and str(part) == "300 rows, 2 epochs, batch 64"
    assert changed(sweep(), max_rows=5000).conditions() == [Conditions(1200, 1, 128)]  # there are no more


def test_a_figure_of_unlike_runs_says_so_and_names_no_best():
    points = [result(series, x, loss=0.5 - x / 1e4) for series in ("hash", "mult") for x in (100, 200)]
    points = [dataclasses.replace(p, config={**p.config, "max_rows": int(p.x)}) for p in points]
    text = html([figure(points, name="rows", x_label="rows")])
    assert "Best of these runs" not in text and "What a byte buys" not in text
    assert "trained on 100 rows, 1 epoch, batch 128; 200 rows, 1 epoch, batch 128" in text


def test_sections_of_the_page_keep_unlike_runs_apart():
    short = changed(sweep(name="figure5"), max_rows=300)
    groups = sections([sweep(), short])
    assert list(groups) == ["made-up: 1,200 rows, 1 epoch, batch 128", "made-up: 300 rows, 1 epoch, batch 128"]
    assert list(sections([sweep(), sweep(name="figure5")])) == ["made-up"]
    text = html([sweep(), short])
    assert text.count("<h3>What a byte buys</h3>") == 2
    assert "trained on 300 rows, 1 epoch, batch 128" in text and "trained on 1,200 rows" in text
    assert 'data-label="rows">300</td>' in text  # a column of the table, since rows differ
    assert 'data-label="rows">' not in html([sweep()])


def test_a_figure_without_points_stands_with_its_data():
    assert [len(members) for members in sections([sweep(), figure([])]).values()] == [2]


def test_the_best_carries_the_tie_rule_of_the_winners():
    def best(*points):
        text = html([figure(list(points))])
        return text[text.index("<h4>Best of these runs") : text.index('<div class="drawn">')]

    near = (result("add", 1, loss=0.4500, sd=0.001), result("mult", 1, loss=0.4515, sd=0.001))
    assert is_clear(*near) is False and "add at threshold 1, test 0.45000 ± 0.00100; ties with mult" in best(*near)
    far = (near[0], result("mult", 1, loss=0.4525, sd=0.001))
    assert is_clear(*far) is True and "ties" not in best(*far)
    single = [dataclasses.replace(p, trials=1, test_sd=None) for p in far]
    assert "one trial, so whether it is a tie is not known" in best(*single)

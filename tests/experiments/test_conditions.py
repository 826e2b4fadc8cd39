"""Runs of unlike data, rows, epochs or batch are never ranked."""

import dataclasses

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from made_up_results import figure, result, sweep

from quorem.experiments.figures import Conditions, Figure
from quorem.experiments.report.page import html, sections
from quorem.experiments.report.tradeoff import is_clear

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

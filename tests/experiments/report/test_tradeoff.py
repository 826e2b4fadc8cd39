"""What a byte buys: the front, and the best at each size."""

import dataclasses
import math

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from made_up_results import figure, result, sweep
from report_pages import Reader

from quorem.experiments.report.page import html
from quorem.experiments.report.tradeoff import distinct, front, is_clear, winners
from quorem.paper.schemes import Full


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
    expected = [(0, 64_000, 64_000, "full"), (-2, 13_000, 16_300, "mult"), (-6, 1_000, 1_050, "add")]
    assert [(w.power, w.low, w.high, w.best.series) for w in wins] == expected
    assert [w.second and w.second.series for w in wins] == [None, "hash", "hash"]
    assert is_clear(wins[1].best, wins[1].second) is True
    assert is_clear(wins[2].best, wins[2].second) is False  # 0.0005 apart, deviations of 0.0006 together
    read = Reader(html([figure(points)]))
    assert len(read.of_class("win")) == 3 and "0.45000 ± 0.00100" in read.text and "no, a tie" in read.text

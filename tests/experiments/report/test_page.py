"""The HTML page: one file with every point and number; no text becomes markup, and unlike runs are never ranked."""

import dataclasses
import json
import math
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from made_up_results import DATA, figure, result, sweep

from quorem.experiments.figures import Figure
from quorem.experiments.report.page import html, page, sections
from quorem.experiments.report.tradeoff import distinct, front, is_clear, winners
from quorem.paper.schemes import Full

EVIL = "</script><script>alert('<b>&amp;\"')</script>"


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside of scripts."""

    VOID = frozenset({"meta", "input", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]


def test_the_page_is_one_file_that_asks_nothing_of_a_network(tmp_path):
    page([sweep()], tmp_path / "deep" / "page.html")
    read = Reader((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]
    assert not [a for tag, a in read.tags if tag in ("link", "img", "iframe") or a.get("src")]
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src" not in policy and "http" not in policy
    assert len(read.of_class("plot")) == 4 == sum(tag == "svg" for tag, _ in read.tags)


def test_every_point_of_every_figure_has_a_row_with_command_and_configuration():
    figures = [sweep(), sweep(name="mine", title="Mine", x="embedding_bytes")]
    read = Reader(html(figures))
    assert len(read.of_class("point")) == sum(len(f.points) for f in figures) == 28
    assert sum(tag == "details" for tag, _ in read.tags) == 28
    for point in figures[0].points:
        assert point.command in read.text and json.dumps(point.config, indent=1, sort_keys=True) in read.text
    assert {json.loads(a["data-keys"])[0] for a in read.of_class("point")} == {"Figure 6", "Mine"}


def test_what_comes_from_files_is_text_and_never_markup():
    point = result(EVIL, 1, command=EVIL, optimizer=EVIL, network=EVIL)
    data, axes = dataclasses.replace(DATA, name=EVIL), dict.fromkeys(("title", "x_label", "paper"), EVIL)
    text = html([figure([point], data, name="evil", **axes)])
    read = Reader(text)
    assert EVIL not in text
    assert sum(tag == "script" for tag, _ in read.tags) == 1
    assert read.text.count(EVIL) > 8
    assert any(EVIL in (a.get("data-about") or "") for _, a in read.tags)


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


def changed(shown: Figure, **options: object) -> Figure:
    """The figure with options of every configuration changed."""
    points = [dataclasses.replace(p, config={**p.config, **options}) for p in shown.points]
    return dataclasses.replace(shown, points=points)


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

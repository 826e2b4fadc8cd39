"""Each figure asks for what the paper describes, and runs that figures share are the same runs."""

import math
from functools import partial

import pytest
import torch
from made_up_results import result
from refusals import refused

from quorem import EmbeddingCollection, models
from quorem.data.shape import CARDINALITIES
from quorem.experiments.figures import Axes, Dataset, Figure, Made, Point
from quorem.experiments.paper_figures import FIGURES, Study
from quorem.paper.schemes import QR, Full, Hash, Path
from quorem.training.config import RunConfig
from quorem.training.model import tables_of

STUDY = Study(cardinalities=CARDINALITIES, num_rows=39_291_958)
LOG = Dataset(name="log", identity="log", rows={"train": 9})
MADE = Made(command="x", data=LOG)
OPERATIONS = {"hash", "feature", "concat", "add", "mult"}


def of(points: list[Point], network: str) -> dict[str, list[float | None]]:
    """Places on each line."""
    lines: dict[str, list[float | None]] = {}
    for point in points:
        if point.options["network"] == network:
            lines.setdefault(point.series, []).append(point.x)
    return lines


@pytest.mark.parametrize("network", ["dcn", "dlrm"])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("figure4", {name: [None] for name in ("full", "hash", "mult")}),
        ("figure5", {"full": [None], **{name: [2, 3, 4, 5, 6, 7, 60] for name in OPERATIONS}}),
        ("figure6", {"full": [None], **{name: [1, 20, 200, 2000, 20000] for name in OPERATIONS}}),
        ("figure7", {"full": [None], **{name: [1, 20, 200, 2000, 20000] for name in OPERATIONS}}),
        ("table1", {"path": [16, 32, 64, 128]}),
    ],
)
def test_lines_and_points_of_the_paper(name, lines, network):
    assert of(FIGURES[name].points(STUDY), network) == lines


def test_settings_are_the_papers():
    by_place = {(p.series, p.x): p.options for p in FIGURES["figure5"].points(STUDY) if p.options["network"] == "dlrm"}
    assert by_place["full", None]["scheme"] == Full()
    assert by_place["hash", 60]["scheme"] == Hash(60, force=True)
    assert by_place["add", 3]["scheme"] == QR(3, operation="add", force=True)
    thresholds = {p.x: p.options.get("threshold", 0) for p in FIGURES["figure6"].points(STUDY) if p.series == "concat"}
    assert thresholds == {1: 0, 20: 20, 200: 200, 2000: 2000, 20000: 20000}  # no table has a single id
    path = {p.x: p.options for p in FIGURES["table1"].points(STUDY) if p.options["network"] == "dcn"}
    assert path[32]["scheme"] == Path(4, hidden=(32,), force=True) and path[32]["preset"] == "table1"
    assert FIGURES["figure7"].points(STUDY) == FIGURES["figure6"].points(STUDY)
    config = RunConfig(data="log", **by_place["full", None])
    assert (config.batch_size, config.embedding_dim, config.epochs, config.lr) == (128, 16, 1, None)


def test_figures_share_runs():
    def runs(figure):
        return {RunConfig(data="log", **point.options) for point in FIGURES[figure].points(STUDY)}

    assert runs("figure4") <= runs("figure5")
    at_four = {RunConfig(data="log", **p.options) for p in FIGURES["figure5"].points(STUDY) if p.x in (None, 4)}
    assert at_four <= runs("figure6")
    assert all(run.validate_every == 15349 for run in runs("figure4"))  # 20 times in 306,969 steps


def test_figures_survive_their_files(tmp_path):
    figure = Figure(axes=FIGURES["figure5"].axes, made=MADE, points=[result(), result(x=None, loss=None)])
    figure.write(tmp_path / "f.json")
    assert Figure.read(tmp_path / "f.json") == figure


@pytest.mark.parametrize("text", ["", "[]", '{"axes": {}, "made": {}, "points": []}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x.json does not hold a figure"):
        Figure.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("config", "match"),
    [({"data": "?"}, "point 'mult' must have runs on the data"), ({"data": "log", "epochs": 0}, "figure4: config")],
)
def test_a_figure_whose_points_could_not_be_trained_is_refused(config, match):
    with pytest.raises(ValueError, match=match):
        Figure(axes=FIGURES["figure4"].axes, made=MADE, points=[]).runs(result(config=config))


point, axes = partial(Point, series="mult"), partial(Axes, title="t", x_label="x")
test_points_and_axes_are_checked = refused(
    (lambda: point(x="four", options={}), ValueError, r"x \('four'\) of point 'mult' must be a finite number, or None"),
    (lambda: point(x=math.nan, options={}), ValueError, r"x \(nan\) of point 'mult' must be a finite number"),
    (lambda: point(x=4, options=None), ValueError, r"options \(None\) of point 'mult' must be a mapping"),
    (lambda: axes(name="a/b"), ValueError, r"name \('a/b'\) must be letters"),
    (lambda: axes(name="a", x="foo"), ValueError, r"x \('foo'\) must be one of 'x', 'parameters', 'embedding_bytes'"),
    (lambda: axes(name="a", y="loss"), ValueError, r"y \('loss'\) must be one of 'test', 'validation', 'parameters'"),
)


PRINTED = {  # in the paper
    "dcn": {16: 135_464_410, 32: 135_519_322, 64: 135_629_146, 128: 135_848_794},
    "dlrm": {16: 135_581_537, 32: 135_636_449, 64: 135_746_273, 128: 135_965_921},
}


def test_all_eight_parameter_counts():
    """Of table 1."""
    counts: dict[str, dict[int, int]] = {"dcn": {}, "dlrm": {}}
    for point in FIGURES["table1"].points(STUDY):
        run = RunConfig(data="criteo", **point.options)
        tables = EmbeddingCollection(tables_of(CARDINALITIES, run.scheme), device="meta")
        model = models.build(run.network, tables, preset=run.preset, device=torch.device("meta"))
        counts[run.network][point.x] = sum(p.numel() for p in model.parameters())
    assert counts == PRINTED

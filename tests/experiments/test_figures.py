"""Each figure asks for what the paper describes, and runs that figures share are the same runs."""

import json
from dataclasses import asdict

import pytest
import torch

from quorem import EmbeddingCollection, Table, quantize_
from quorem.data.shape import CARDINALITIES
from quorem.experiments.figures import Axes, Dataset, Figure, FigurePlan, Made, PlannedPoint, Point, Result
from quorem.experiments.paper_figures import (
    FIGURES,
    SHARES,
    Study,
    budgets_points,
    plans_points,
    rows_of,
    schemes_of_share,
)
from quorem.files.atomic import write_json
from quorem.paper.schemes import QR, Full, Hash, Path
from quorem.training.config import RunConfig

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


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("figure4", ("step", "iterations", False), ("validation", "validation log loss")),
        ("figure5", ("parameters", "parameters", True), ("test", "test log loss")),
        ("figure6", ("x", "threshold", True), ("test", "test log loss")),
        ("figure7", ("x", "threshold", True), ("parameters", "parameters")),
        ("table1", ("x", "hidden layer", True), ("test", "test log loss")),
    ],
)
def test_axes_of_the_paper(name, x, y):
    axes = FIGURES[name].axes
    assert (axes.x, axes.x_label, axes.x_log) == x and (axes.y, axes.y_label) == y
    assert axes.paper and axes.name == name and name in axes.title.lower().replace(" ", "")


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


def test_the_papers_batch_and_width_are_the_defaults():
    config = RunConfig(data="log", **FIGURES["figure5"].points(STUDY)[0].options)
    assert (config.batch_size, config.embedding_dim, config.epochs, config.lr) == (128, 16, 1, None)


def test_figures_share_runs():
    def runs(figure):
        return {RunConfig(data="log", **point.options) for point in FIGURES[figure].points(STUDY)}

    assert runs("figure4") <= runs("figure5")
    at_four = {RunConfig(data="log", **p.options) for p in FIGURES["figure5"].points(STUDY) if p.x in (None, 4)}
    assert at_four <= runs("figure6")
    assert all(run.validate_every == 15349 for run in runs("figure4"))  # 20 times in 306,969 steps


def test_equal_budgets_are_equal_until_the_ids_are_not_covered():
    for share in SHARES:
        for series, scheme in schemes_of_share(share).items():
            for n, rows in zip(CARDINALITIES, rows_of(scheme, CARDINALITIES), strict=True):
                budget = -(-n // share)
                if series == "hash":
                    assert sum(rows) == min(n, budget)
                elif series == "mult":
                    assert sum(rows) in (budget + -(-n // budget), n)
                else:
                    k = int(series[-1])
                    least = k * n ** (1 / k)
                    assert sum(rows) <= max(budget, 1.5 * least + k * k) or rows == (n,)
                    assert max(rows) - min(rows) <= max(3 * k * k, 0.1 * max(rows)) or rows == (n,)


def test_more_tables_go_below_the_floor_of_two():
    shares = {p.x for p in budgets_points(STUDY) if p.series == "generalized, k=4"}
    rows = {k: sum(map(sum, rows_of(schemes_of_share(1000)[f"chinese, k={k}"], CARDINALITIES))) for k in (2, 3, 4)}
    assert max(shares) == 1000 and rows[3] <= rows[2] and rows[4] <= rows[2]
    assert sum(CARDINALITIES) / rows[3] > 900


def test_a_share_that_changes_nothing_is_not_repeated():
    small = Study(cardinalities=(500, 90), num_rows=1000, networks=("dcn",))
    assert of(budgets_points(small), "dcn")["generalized, k=2"] == [4, 16]


def result(**changes) -> Result:
    values = {name: 0.5 for name in ("test_mean", "test_sd", "validation_mean", "validation_sd", "auc_mean", "auc_sd")}
    values |= {"parameters": 10, "bytes": 40, "embedding_parameters": 8, "embedding_bytes": 32, "rows_per_second": 1.0}
    values |= {"network": "dcn", "series": "mult", "x": 4, "optimizer": "adagrad", "trials": 2, "others": {}}
    return Result(**values | {"config": {"scheme": {}}, "runs": ["a"], "command": "quorem train"} | changes)


def test_figures_and_plans_survive_their_files(tmp_path):
    figure = Figure(axes=FIGURES["figure5"].axes, made=MADE, points=[result(), result(x=None, test_mean=None)])
    figure.write(tmp_path / "f.json")
    assert Figure.read(tmp_path / "f.json") == figure
    run = RunConfig(data="log")
    plan = FigurePlan(axes=FIGURES["figure4"].axes, made=MADE, points=[PlannedPoint("a", 1, [run])])
    plan.write(tmp_path / "p.json")
    assert FigurePlan.read(tmp_path / "p.json") == plan


@pytest.mark.parametrize("text", ["", "[]", '{"axes": {}, "made": {}, "points": []}'])
@pytest.mark.parametrize(("kind", "name"), [(Figure, "figure"), (FigurePlan, "plan")])
def test_other_files_are_refused(tmp_path, kind, name, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=rf"x.json does not hold a {name}"):
        kind.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"x": "four"}, r"x \('four'\) of point 'mult' must be a finite number, or None"),
        ({"x": float("nan")}, r"x \(nan\) of point 'mult' must be a finite number"),
        ({"options": None}, r"options \(None\) of point 'mult' must be a mapping"),
    ],
)
def test_points_are_checked(fields, match):
    with pytest.raises(ValueError, match=match):
        Point(**{"series": "mult", "x": 4, "options": {}, **fields})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "a/b"}, r"name \('a/b'\) must be letters"),
        ({"x": "foo"}, r"x \('foo'\) must be one of 'x', 'parameters', 'embedding_bytes', 'step'"),
        ({"y": "loss"}, r"y \('loss'\) must be one of 'test', 'validation', 'parameters'"),
    ],
)
def test_axes_are_checked(options, match):
    with pytest.raises(ValueError, match=match):
        Axes(**{"name": "a", "title": "t", "x_label": "x"} | options)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"test_mean": "0.5"}, r"points\[0\].test_mean \('0.5'\) must be a number"),
        ({"curve": [[1, 0.5]]}, r"points\[0\].curve\[0\] \(\[1, 0.5\]\) must have 3 values"),
    ],
)
def test_fields_of_the_wrong_type_are_refused(tmp_path, change, match):
    path = tmp_path / "f.json"
    Figure(axes=FIGURES["figure5"].axes, made=MADE, points=[result()]).write(path)
    values = json.loads(path.read_text())
    values["points"][0] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"f.json does not hold a figure: {match}"):
        Figure.read(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, r"format \('other'\) must be 'quorem-plan-2'"),
        ({"made": {"data": asdict(LOG)}}, "made.command is missing"),
        ({"made": {**asdict(MADE), "data": 3}}, r"made.data \(3\) must be an object"),
        ({"made": {"command": "x", "data": {**asdict(LOG), "identity": "?"}}}, "point 'a' must have runs on the data"),
        ({"points": [{"series": "a", "x": 1, "runs": []}]}, "point 'a' must have runs on the data of the figure"),
    ],
)
def test_plans_that_could_not_be_drawn_are_refused(tmp_path, change, match):
    point = {"series": "a", "x": 1, "runs": [json.loads(RunConfig(data="log").to_json())]}
    axes = asdict(FIGURES["figure4"].axes)
    values = {"format": "quorem-plan-2", "axes": axes, "made": asdict(MADE), "points": [point]}
    path = tmp_path / "p.json"
    write_json(path, values)
    FigurePlan.read(path)
    write_json(path, values | change)
    with pytest.raises(ValueError, match=rf"p.json does not hold a plan: {match}"):
        FigurePlan.read(path)


def test_plans_take_the_bytes_of_their_share():
    counts = (1e6 / (1 + torch.arange(20_000))).long()
    study = Study(cardinalities=(20_000,), num_rows=1000, networks=("dcn",), frequencies={"C1": counts})
    points = [point for point in plans_points(study) if point.series.startswith("plan")]
    assert {point.series for point in points} == {"plan", "plan, 8 bits", "plan, 4 bits"}
    for point in points:
        module = EmbeddingCollection([Table("C1", 20_000, 16, point.options["plan"]["C1"])])
        if point.options["bits"]:
            quantize_(module, point.options["bits"])
        assert module.stored.nbytes <= 64 * 20_000 / point.x
    with pytest.raises(ValueError, match="frequencies must be those of the data's training rows"):
        plans_points(STUDY)

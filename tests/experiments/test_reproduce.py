"""The commands: a tiny reproduction of the whole paper, a grid of one's own, and the page about both."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "quorem[report]"')

from commands import invoke
from runs_of_training import small_log

from quorem.experiments import reproduce
from quorem.experiments.figures import Figure

ROOT = Path(__file__).parents[2]
OPTIONS = ("--trials", 1, "--optimizers", "adagrad", "--rows", 256, "--device", "cpu")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return small_log(tmp_path_factory.mktemp("reproduce") / "log", 1000).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, log):
    """``reproduce all`` with few rows."""
    out = tmp_path_factory.mktemp("whole") / "runs"
    done = invoke("reproduce", "all", "--data", log, *OPTIONS, "--out", out)
    return out, done


def test_all_figures_from_one_command(whole):
    out, done = whole
    assert re.search(r"runs: 100%, (\d+) of \1 done\n", done.output) and "failed" not in done.output
    points = {"figure4": 6, "figure5": 72, "figure6": 52, "figure7": 52, "table1": 8}
    for name, count in points.items():
        for ending in ("json", "png", "pdf"):
            assert (out / "results" / f"{name}.{ending}").stat().st_size > 0
        figure = Figure.read(out / "results" / f"{name}.json")
        assert len(figure.points) == count
        assert {point.trials for point in figure.points} == {1} and not any(point.missing for point in figure.points)
    curves = [point.curve for point in Figure.read(out / "results" / "figure4.json").points]
    assert all([step for step, *_ in curve] == [1, 2] for curve in curves)  # 256 rows are two steps
    invoke("report", out / "results", "--out", out / "copied.html")  # from the figures as JSON
    for page in ((out / name).read_text(encoding="utf-8") for name in ("report.html", "copied.html")):
        assert all(f"Figure {number}" in page for number in (4, 5, 6, 7)) and "Table 1" in page


def test_runs_are_shared_and_not_trained_again(whole, log):
    out, _ = whole
    runs = {path.name: (path / "result.json").stat().st_mtime_ns for path in (out / "runs").iterdir()}
    plans = [Figure.read(path) for path in (out / "plans").iterdir()]
    assert set(runs) == {config.key() for plan in plans for point in plan.points for config in plan.runs(point)}
    invoke("reproduce", "figure5", "--data", log, *OPTIONS, "--out", out)
    again = {path.name: (path / "result.json").stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert again == runs


def test_a_figure_shows_what_was_asked_for_last(log, tmp_path):
    out = tmp_path / "runs"
    options = ("--trials", 1, "--optimizers", "adagrad", "--networks", "dcn", "--device", "cpu", "--out", out)
    for rows in (256, 128):  # runs on other rows are never pooled
        invoke("reproduce", "figure4", "--data", log, "--rows", rows, *options)
    (figure,) = reproduce.figures_in(out)
    assert [(p.series, p.config["max_rows"]) for p in figure.points] == [(s, 128) for s in ("full", "hash", "mult")]
    assert len(list((out / "runs").iterdir())) == 6


def test_failures_are_told_and_end_with_an_error(log, tmp_path):
    points = "Point(series='a', x=1, options={'lr': 1e30}), Point(series='b', x=1, options={})"
    (tmp_path / "grid.py").write_text(f"from quorem.experiments.figures import Point\nPOINTS = [{points}]\n")
    options = ("--trials", 1, "--optimizers", "adagrad", "--device", "cpu", "--out", tmp_path / "runs")
    done = invoke("sweep", tmp_path / "grid.py", "--data", log, *options, code=1)
    assert "1 runs failed" in done.stderr
    assert "runs: 100%, 1 of 2 done, 1 failed" in done.output
    assert "FloatingPointError: the" in done.output and "Traceback" not in done.output
    assert [point.series for point in reproduce.figures_in(tmp_path / "runs")[0].points] == ["b"]


def test_parameters_against_thresholds_need_no_training(log, tmp_path):
    invoke("reproduce", "figure7", "--data", log, "--out", tmp_path / "runs", "--device", "cpu")
    figure = Figure.read(tmp_path / "runs" / "results" / "figure7.json")
    assert len(figure.points) == 52 and not (tmp_path / "runs" / "runs").exists()
    by_place = {(p.network, p.series, p.x): p.embedding_parameters for p in figure.points}
    assert by_place["dlrm", "full", None] == 16 * (400 + 90 + 7 + 2)
    assert by_place["dlrm", "hash", 1] == 16 * (100 + 23 + 2 + 1)
    assert by_place["dlrm", "hash", 20] == 16 * (100 + 23 + 7 + 2)
    assert by_place["dcn", "concat", 200] == 16 * (100 + 4) + 32 * (90 + 7 + 2)


def test_a_grid_of_ones_own(log, tmp_path):
    out = tmp_path / "runs"
    file = ROOT / "examples" / "my_sweep.py"
    text = file.read_text(encoding="utf-8").replace('"network": "dlrm"', '"network": "dlrm", "max_rows": 128')
    (tmp_path / "grid.py").write_text(text)
    options = ("--trials", 1, "--optimizers", "adagrad", "--device", "cpu", "--out", out)
    invoke("sweep", tmp_path / "grid.py", "--data", log, *options)
    (figure,) = reproduce.figures_in(out)
    assert {point.series for point in figure.points} == {"full", "mult", "add", "chinese, k=3"}
    assert (out / "report.html").exists()


POINT = "from quorem.experiments.figures import Axes, Point\nPOINTS = [Point(series='a', x=1, options={%s})]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must define POINTS"),
        ("POINTS = []", "must define POINTS"),
        ("POINTS = [3]", "must define POINTS"),
        ("POINTS = [", "grid.py: SyntaxError"),
        ("POINTS = nope", "grid.py: NameError: name 'nope' is not defined"),
        (POINT % "'nope': 1", "options of point 'a' at 1:"),
        (POINT % "'seed': 1", "options of point 'a' at 1:"),
        (POINT % "'epochs': '3'", "options of point 'a' at 1: epochs ('3') must be an int"),
        (POINT % "" + "AXES = 'x'", "AXES of"),
        (POINT % "" + "AXES = Axes(name='a/b', title='t', x_label='x')", "name ('a/b') must be letters"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_in_a_line(log, tmp_path, text, message):
    (tmp_path / "grid.py").write_text(text)
    done = invoke("sweep", tmp_path / "grid.py", "--data", log, "--out", tmp_path / "runs", "--device", "cpu", code=1)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_wrong_arguments_are_told(log, tmp_path):
    assert "Missing option '--data'" in invoke("reproduce", "figure5", code=2).stderr
    for arguments, message in (
        (["--networks", "mlp"], "network ('mlp') must be one of"),
        (["--optimizers", "rmsprop"], "optimizers ('rmsprop') must be of"),
        (["--collisions", "4,x"], "collisions ('4,x') must be whole numbers with commas"),
    ):
        assert message in invoke("reproduce", "figure4", "--data", log, "--out", tmp_path, *arguments, code=1).stderr
    assert "has neither finished runs nor figures as JSON" in invoke("report", tmp_path, code=1).stderr


def test_committed_results_are_figures_with_their_origin():
    for path in (ROOT / "docs" / "results").rglob("*.json"):
        figure = Figure.read(path)
        assert figure.made.command.startswith("quorem reproduce") and figure.made.commit
        assert figure.points and all(json.dumps(point.config) for point in figure.points)

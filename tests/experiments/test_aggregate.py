"""Means and deviations by hand, the optimizer by validation loss, and what is missing."""

import json
import math
import shlex

import pytest
from commands import invoke
from runs_of_training import CARDINALITIES, small_log, small_run

from quorem import models
from quorem.experiments.aggregate import aggregate, command_of, figures_of_runs, without_seed
from quorem.experiments.figures import Dataset, Figure, Made, Point, Result
from quorem.experiments.paper_figures import FIGURE4, FIGURE7
from quorem.experiments.report.tradeoff import distinct
from quorem.experiments.reproduce import planned_figure
from quorem.files.atomic import sealed, write_json
from quorem.modules.collection import EmbeddingCollection
from quorem.paper.schemes import QR
from quorem.training.config import RunConfig
from quorem.training.model import tables_of
from quorem.training.run import RESULT_FORMAT

DATA = Dataset(name="log", identity="abc", rows={"train": 9})
SIZES = {"parameters": 7, "bytes": 28, "embedding_parameters": 5, "embedding_bytes": 20}


def planned(optimizers=("adagrad", "amsgrad"), trials=2) -> Figure:
    config = without_seed(RunConfig(data="abc", optimizer=optimizers[0]))
    point = Result(network="dlrm", series="mult", x=4, config=config, command="quorem train", **SIZES)
    made = Made(command="quorem reproduce figure4", data=DATA, trials=trials, optimizers=list(optimizers))
    return Figure(axes=FIGURE4, made=made, points=[point])


def runs_of(figure: Figure) -> list[RunConfig]:
    return figure.runs(figure.points[0])


def finish(
    folder, config: RunConfig, validation: float, test: float, curve: dict[int, float] | None = None, **more: object
) -> None:
    out = folder / "runs" / config.key()
    out.mkdir(parents=True)
    result = {"validation": {"log_loss": validation}, "test": {"log_loss": test, "auc": test + 0.25}}
    result |= {**SIZES, "rows_per_second": 9.0, "seconds": 2.0}
    result |= {"device": "cpu", "versions": {"torch": "2"}, "commit": "c0ffee", **more}
    (out / "run.json").write_text(config.to_json())
    write_json(out / "result.json", {"format": RESULT_FORMAT, **result})
    lines = [{"step": step, "validation": {"log_loss": loss}} for step, loss in (curve or {}).items()]
    lines = [{"step": 1, "loss": 0.7}, *lines, {"step": 10**6, "test": result["test"]}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(sealed(line)) + "\n" for line in lines))


def test_the_optimizer_with_the_lower_validation_loss_is_shown_with_its_final_test_loss(tmp_path):
    made = planned()
    losses = {("adagrad", 0): (0.50, 0.40), ("adagrad", 1): (0.52, 0.44)}
    losses |= {("amsgrad", 0): (0.49, 0.60), ("amsgrad", 1): (0.51, 0.68)}
    for config in runs_of(made):
        finish(tmp_path, config, *losses[config.optimizer, config.seed])
    (point,) = aggregate(made, tmp_path).points
    assert (point.optimizer, point.trials, point.missing, point.failed) == ("amsgrad", 2, 0, 0)
    assert (point.test_mean, point.validation_mean) == (pytest.approx(0.64), pytest.approx(0.50))
    assert point.test_sd == pytest.approx(0.08 / math.sqrt(2))
    assert point.validation_sd == pytest.approx(0.02 / math.sqrt(2))
    assert (point.auc_mean, point.auc_sd) == (pytest.approx(0.89), pytest.approx(0.08 / math.sqrt(2)))
    expected = {"validation": pytest.approx(0.51), "test": pytest.approx(0.42), "trials": 2}
    assert point.others["adagrad"] == expected
    assert point.runs == [config.key() for config in runs_of(made)[2:]]
    assert point.test_losses == [0.60, 0.68]
    assert "seed" not in point.config and point.config["optimizer"] == "amsgrad"


def test_curves_are_averaged_where_every_trial_has_a_value(tmp_path):
    made = planned(optimizers=("adagrad",))
    finish(tmp_path, runs_of(made)[0], 0.3, 0.3, {10: 0.6, 20: 0.5, 30: 0.3})
    finish(tmp_path, runs_of(made)[1], 0.5, 0.5, {10: 0.8, 30: 0.5})
    (point,) = aggregate(made, tmp_path).points
    deviation = pytest.approx(0.2 / math.sqrt(2))
    assert point.curve == [(10, pytest.approx(0.7), deviation), (30, pytest.approx(0.4), deviation)]


def test_a_loss_that_is_no_number_is_not_chosen(tmp_path):
    made = planned(trials=1)
    finish(tmp_path, runs_of(made)[0], math.nan, math.nan)
    finish(tmp_path, runs_of(made)[1], 0.9, 0.8)
    (point,) = aggregate(made, tmp_path).points
    assert (point.optimizer, point.test_mean) == ("amsgrad", 0.8)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3"])
def test_a_damaged_result_is_named(tmp_path, text):
    made = planned()
    finish(tmp_path, runs_of(made)[0], 0.5, 0.4)
    path = tmp_path / "runs" / runs_of(made)[0].key() / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{runs_of(made)[0].key()}.*result.json is damaged: .*; remove it"):
        aggregate(made, tmp_path)


def test_missing_and_failed_trials_are_counted(tmp_path):
    made = planned()
    finish(tmp_path, runs_of(made)[0], 0.5, 0.4)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / f"{runs_of(made)[3].key()}.json").write_text("{}")
    figure = aggregate(made, tmp_path)
    (point,) = figure.points
    assert (point.trials, point.missing, point.failed, point.test_sd) == (1, 3, 1, None)
    assert figure.made.commit == "c0ffee" and figure.made.command == made.made.command


def test_only_runs_that_differ_by_their_seed_are_trials_of_one_point(tmp_path):
    """Not those of several processes, a repetition, or other dtypes, which are a series of their own."""
    runs = [("a", 0, 1, "float32"), ("b", 1, 1, "float32"), ("c", 1, 1, "float32"), ("d", 0, 2, "float32")]
    for k, (name, seed, processes, dtype) in enumerate([*runs, ("e", 0, 1, "bfloat16")]):
        config = RunConfig(data="abc", seed=seed, row_dtype=dtype)
        finish(tmp_path / name, config, 0.5, 0.5 + k / 10, rows=9, processes=processes)
    (figure,) = figures_of_runs(tmp_path)
    assert {point.series: point.test_losses for point in figure.points} == {
        "mult": [0.5, 0.6], "mult, 2 processes": [0.8], "mult, bfloat16": [0.9]
    }  # fmt: skip
    assert len(figure.points[0].runs) == 3 and len(distinct([figure])) == 3


def test_a_point_without_runs_is_left_out_unless_parameters_are_counted(tmp_path):
    log = small_log(tmp_path / "log", 500)
    points = [Point(series="mult", x=4, options={"scheme": QR()})]
    options = {"trials": 2, "optimizers": ["adagrad"], "command": "x"}
    made = planned_figure(FIGURE4, points, log, **options)
    assert [config.seed for config in runs_of(made)] == [0, 1] and made.made.data.num_dense == 3
    assert made.made.data.cardinalities == list(CARDINALITIES)
    assert aggregate(made, tmp_path).points == []
    (point,) = aggregate(planned_figure(FIGURE7, points, log, **options), tmp_path).points
    model = models.build("dlrm", EmbeddingCollection(tables_of(CARDINALITIES, QR())), num_dense=3)
    assert point.parameters == sum(p.numel() for p in model.parameters())
    assert (point.trials, point.test_mean, point.embedding_parameters) == (0, None, model.embeddings.num_parameters)


def test_the_command_of_a_run_trains_that_run(tmp_path, monkeypatch):
    log = small_log(tmp_path / "log", 500)
    scheme = QR(6, operation="concat", force=True)
    options = {"network": "dcn", "threshold": 20, "embedding_dim": 8, "optimizer": "amsgrad", "seed": 3}
    options |= {"shuffle": True, "validate_every": 7, "max_rows": 99, "hidden": (8, 4)}
    config = small_run(log, scheme=scheme, **options)
    trained = []
    monkeypatch.setattr("quorem.cli.training.run", lambda config, *_, **__: trained.append(config))
    invoke(*shlex.split(command_of(config, str(log.path)))[1:])
    assert trained == [config]

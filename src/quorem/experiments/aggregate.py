"""Aggregate finished runs to a figure's numbers: mean and deviation over trials, optimizer chosen by validation."""

import csv
import dataclasses
import io
import json
import shlex
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from .. import models
from ..files.atomic import write
from ..paper.schemes import to_json
from ..training.config import RunConfig
from ..training.model import collection_of
from ..training.run import read_config, read_metrics, read_result
from ..training.tables import tables_of_run
from . import words
from .figures import Axes, CurvePoint, Dataset, Figure, FigurePlan, Made, PlannedPoint, Result, grouped


def aggregate(plan: FigurePlan, folder: Path) -> Figure:
    """The figure of a plan, from the runs in a sweep's folder that are finished.

    A point without a finished run is left out, unless the figure only counts parameters.
    """
    points, made = [], plan.made
    for point in plan.points:
        runs = [(config, folder / "runs" / config.key()) for config in point.runs]
        finished = [run for config, path in runs if (run := finished_run(config, path))]
        if finished:
            made = dataclasses.replace(made, **facts_of(finished[0]))
            trained = result_of(point.series, point.x, finished, made.data.path)
            if plan.axes.y != "parameters":
                failed = sum((folder / "errors" / f"{config.key()}.json").exists() for config in point.runs)
                trained = dataclasses.replace(trained, missing=len(runs) - len(finished), failed=failed)
            points.append(trained)
        elif plan.axes.y == "parameters":
            points.append(counted(point, made.data))
    return Figure(axes=plan.axes, made=made, points=points)


class FinishedRun(NamedTuple):
    """A finished run: its configuration, its result, and its folder, which has the metrics of the training."""

    config: RunConfig
    result: dict[str, Any]
    folder: Path


def finished_run(config: RunConfig, folder: Path) -> FinishedRun | None:
    """The run in a folder, if it is finished.

    Raises:
        ValueError: if its result is damaged.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        return FinishedRun(config, read_result(path), folder)
    except ValueError as error:
        raise ValueError(f"{error}; remove it, and the next command trains the run again") from None


def facts_of(run: FinishedRun) -> dict[str, Any]:
    """Device, versions and commit of a run, for ``Made``."""
    return {name: run.result[name] for name in ("device", "versions", "commit")}


def result_of(series: str, x: float | None, runs: Sequence[FinishedRun], data: str) -> Result:
    """The numbers of a point: those of its finished runs with the optimizer that has the lower mean validation loss.

    Args:
        series: name of the point's line.
        x: the point's x coordinate on the line.
        runs: finished runs, with any optimizer and seed.
        data: folder of the data, for the command.
    """
    by_optimizer: dict[str, list[FinishedRun]] = grouped(runs, lambda run: run.config.optimizer)
    others: dict[str, dict[str, float]] = {
        name: {split: mean(run.result[split]["log_loss"] for run in trials) for split in ("validation", "test")}
        | {"trials": len(trials)}
        for name, trials in by_optimizer.items()
    }
    best = min(others, key=lambda name: (not isfinite(others[name]["validation"]), others[name]["validation"]))
    chosen = by_optimizer[best]
    first = chosen[0]
    metrics = {"test": ("test", "log_loss"), "validation": ("validation", "log_loss"), "auc": ("test", "auc")}
    moments: dict[str, Any] = {}
    for name, (split, metric) in metrics.items():
        values = [run.result[split][metric] for run in chosen]
        moments[f"{name}_mean"], moments[f"{name}_sd"] = mean_and_deviation(values)
    sizes = {name: first.result[name] for name in ("parameters", "bytes", "embedding_parameters", "embedding_bytes")}
    return Result(
        network=first.config.network,
        series=series,
        x=x,
        optimizer=best,
        trials=len(chosen),
        others=others,
        rows_per_second=mean(run.result["rows_per_second"] for run in chosen),
        seconds=mean(run.result["seconds"] for run in chosen),
        config=without_seed(first.config),
        runs=[run.config.key() for run in chosen],
        command=command_of(first.config, data),
        test_losses=[run.result["test"]["log_loss"] for run in chosen],
        curve=curve([run.folder / "metrics.jsonl" for run in chosen]),
        **sizes,
        **moments,
    )


def counted(point: PlannedPoint, data: Dataset) -> Result:
    """A point without trained runs, for which only the parameters are counted."""
    config = point.runs[0]
    embeddings = collection_of(tables_of_run(config, data.cardinalities), config.row_dtype, "meta")
    model = models.build(
        config.network, embeddings, preset=config.preset, num_dense=data.num_dense, device=torch.device("meta")
    )
    return Result(
        network=config.network,
        series=point.series,
        x=point.x,
        parameters=sum(p.numel() for p in model.parameters()),
        bytes=sum(p.nbytes for p in model.parameters()),
        embedding_parameters=embeddings.num_parameters,
        embedding_bytes=sum(p.nbytes for p in embeddings.parameters()),
        config=without_seed(config),
        command=command_of(config, data.path),
    )


def figure_of_run(folder: Path) -> Figure:
    """The figure of one run of ``quorem train``: its losses during training.

    Raises:
        ValueError: if the run is not finished, or a file of it is damaged.
    """
    config = read_config(folder / "run.json")
    run = finished_run(config, folder)
    if run is None:
        raise ValueError(f"{folder} holds a run that is not finished: the command that started it resumes it")
    point = result_of(words.scheme(without_seed(config)), None, [run], "DATA")
    y_label = "validation log loss"
    if not point.curve:  # the run was not validated during training
        metrics = read_metrics(folder / "metrics.jsonl").lines
        losses: list[CurvePoint] = [(line["step"], line["loss"], None) for line in metrics if "loss" in line]
        point, y_label = dataclasses.replace(point, curve=losses), "training log loss, mean of 100 steps"
    made = Made(command=point.command, data=_dataset(run, folder.absolute().name), **facts_of(run))
    axes = Axes(name="run", title="One run", x="step", x_label="iterations", y="validation", y_label=y_label)
    return Figure(axes=axes, made=made, points=[point])


def figures_of_runs(folder: Path) -> list[Figure]:
    """For each data, a comparison of the finished runs below a folder by the bytes of their tables.

    Runs that differ by their seed alone are trials of one point. A series is a method of the paper, or ``plan``.

    Raises:
        ValueError: if a file of a run is damaged.
    """
    paths = sorted(path.parent for path in folder.rglob("run.json"))
    every = [run for path in paths if (run := finished_run(read_config(path / "run.json"), path))]
    label = "bytes of the embedding tables"
    axes = Axes(name="runs", title="Finished runs", x="embedding_bytes", x_label=label, x_log=True)
    figures = []
    for runs in grouped(every, lambda run: run.config.data).values():
        points = []
        for members in grouped(runs, lambda run: dataclasses.replace(run.config, seed=0)).values():
            point = result_of(words.method(without_seed(members[0].config)), None, members, "DATA")
            points.append(dataclasses.replace(point, runs=[str(run.folder.relative_to(folder)) for run in members]))
        data = _dataset(runs[0], runs[0].result.get("data", runs[0].config.data[:8]))
        made = Made(command=f"quorem report {folder}", data=data, **facts_of(runs[0]))
        figures.append(Figure(axes=axes, made=made, points=points))
    return figures


def _dataset(run: FinishedRun, name: str) -> Dataset:
    """The data of a run, of which its folder knows the training rows of an epoch only."""
    epochs = run.result.get("epochs", run.config.epochs)  # fewer than those of the configuration if it ended early
    return Dataset(name=name, identity=run.config.data, rows={"train": int(run.result["rows"]) // epochs})


def without_seed(config: RunConfig) -> dict[str, Any]:
    """The configuration that the trials of a point share."""
    return {name: value for name, value in json.loads(config.to_json()).items() if name != "seed"}


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1), which a single value does not have.

    >>> mean_and_deviation([1.0, 2.0, 4.0, 5.0]), mean_and_deviation([3.0])
    ((3.0, 1.8257418583505538), (3.0, None))
    """
    return mean(values), stdev(values) if len(values) > 1 else None


def curve(metrics: Sequence[Path]) -> list[CurvePoint]:
    """Step, mean and deviation of the validation loss at the steps where every trial has one."""
    trials = []
    for path in metrics:
        lines, damaged, is_final = read_metrics(path)
        if damaged or not is_final:
            raise ValueError(f"{path} is damaged: remove its folder, and the next command trains the run again")
        trials.append({line["step"]: line["validation"]["log_loss"] for line in lines if "validation" in line})
    steps = sorted(set.intersection(*map(set, trials)))
    if len(steps) < 2:  # the final validation alone does not make a curve
        return []
    return [(step, *mean_and_deviation([trial[step] for trial in trials])) for step in steps]


def command_of(config: RunConfig, data: str) -> str:
    """The command that trains one run by itself."""
    parts = ["quorem", "train", "--data", data, "--out", f"runs/{config.key()}"]
    if config.plan is None:
        parts += ["--scheme", to_json(config.scheme)]
    else:
        parts += ["--plan", json.dumps(json.loads(config.to_json())["plan"])]
    for field in dataclasses.fields(RunConfig):
        option = {"embedding_dim": "dim", "max_rows": "rows"}.get(field.name, field.name).replace("_", "-")
        value = getattr(config, field.name)
        if field.name in ("data", "scheme", "plan") or (value == field.default and field.name != "seed"):
            continue
        parts += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return shlex.join(parts)


CSV_COLUMNS = (
    *("figure", "network", "series", "x", "optimizer", "trials", "test_mean", "test_sd", "validation_mean"),
    *("validation_sd", "auc_mean", "auc_sd", "parameters", "bytes", "embedding_parameters", "embedding_bytes"),
    *("missing", "failed", "rows", "epochs", "batch_size", "scheme", "threshold", "command"),
)


def write_csv(figure: Figure, path: Path) -> None:
    """Write one line for each point; the deviation of a single trial is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for point in figure.points:
        scheme = {"scheme": json.dumps(point.config["scheme"]), "threshold": point.config["threshold"]}
        conditions = figure.conditions_of(point)._asdict()
        writer.writerow({"figure": figure.axes.name, **vars(point), **conditions, **scheme})
    write(path, text.getvalue())

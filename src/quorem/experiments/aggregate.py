"""Aggregate finished runs to a figure's numbers: mean and deviation over trials, optimizer chosen by validation."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from ..paper.schemes import to_json
from ..training.config import RunConfig
from ..training.run import read_config, read_metrics, read_result
from . import words
from .figures import Axes, CurvePoint, Dataset, Figure, Made, Result, grouped


def aggregate(planned: Figure, folder: Path) -> Figure:
    """A planned figure with the numbers of the runs in a sweep's folder that are finished.

    A point without a finished run is left out, unless the figure only counts parameters.
    """
    points, made = [], planned.made
    for point in planned.points:
        configs = planned.runs(point)
        runs = [run for config in configs if (run := finished_run(config, folder / "runs" / config.key()))]
        if runs:
            made = dataclasses.replace(made, **facts_of(runs[0]))
            point = result_of(point.series, point.x, runs, made.data.path)
            if planned.axes.y != "parameters":
                failed = sum((folder / "errors" / f"{config.key()}.json").exists() for config in configs)
                point = dataclasses.replace(point, missing=len(configs) - len(runs), failed=failed)
        if runs or planned.axes.y == "parameters":
            points.append(point)
    return Figure(axes=planned.axes, made=made, points=points)


class FinishedRun(NamedTuple):
    """A finished run: its configuration, its result, and its folder, which has the metrics of the training."""

    config: RunConfig
    result: dict[str, Any]
    folder: Path


def finished_run(config: RunConfig, folder: Path) -> FinishedRun | None:
    """The run in a folder, if it is finished."""
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

    ``data`` is the folder of the data, for the command.
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
    sizes = ("parameters", "bytes", "embedding_parameters", "embedding_bytes")
    numbers: dict[str, Any] = {name: first.result[name] for name in sizes}
    metrics = {"test": ("test", "log_loss"), "validation": ("validation", "log_loss"), "auc": ("test", "auc")}
    for name, (split, metric) in metrics.items():
        values = [run.result[split][metric] for run in chosen]
        numbers[f"{name}_mean"], numbers[f"{name}_sd"] = mean_and_deviation(values)
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
        **numbers,
    )


def figure_of_run(folder: Path) -> Figure:
    """The figure of one run of ``quorem train``: its losses during training."""
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

    Runs that differ by their seed alone are trials of one point. A series is a method (``words.method``).
    """
    paths = sorted(path.parent for path in folder.rglob("run.json"))
    every = [run for path in paths if (run := finished_run(read_config(path / "run.json"), path))]
    label = "bytes of the embedding tables"
    axes = Axes(name="runs", title="Finished runs", x="embedding_bytes", x_label=label, x_log=True)
    figures = []
    for runs in grouped(every, lambda run: run.config.data).values():
        points = []
        alike = grouped(runs, lambda run: (dataclasses.replace(run.config, seed=0), run.result.get("processes", 1)))
        for (config, processes), members in alike.items():
            series = words.method(without_seed(config)) + f", {processes} processes" * (processes > 1)
            trials = [repeated[0] for repeated in grouped(members, lambda run: run.config.seed).values()]
            point = result_of(series, None, trials, "DATA")
            names = [str(run.folder.relative_to(folder)) for run in members]
            points.append(dataclasses.replace(point, config=point.config | {"processes": processes}, runs=names))
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
    """Mean and standard deviation (n - 1), which a single value does not have."""
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
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        parts += [f"--{option}"] if value is True else [f"--{option}", text]
    return shlex.join(parts)

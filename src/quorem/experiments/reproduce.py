"""Reproduce figures: plan their runs, train what is missing, and write numbers, pictures and the page."""

import dataclasses
import datetime
import json
import runpy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import models
from ..data.prepared import Prepared
from ..training.config import DEFAULT_LRS, RunConfig
from ..training.model import data_identity
from . import budgets, paper_figures, plans, sweep
from .aggregate import aggregate, figure_of_run, figure_of_runs, write_csv
from .conditions import describe, file_names, split
from .figures import Axes, Dataset, Figure, FigurePlan, Made, PlannedPoint, Point
from .paper_figures import PaperFigure

FIGURES = paper_figures.FIGURES | {
    "budgets": PaperFigure(budgets.AXES, budgets.points),
    "plans": PaperFigure(plans.AXES, plans.points),
}


def plan(
    axes: Axes, points: Sequence[Point], data: Path | None, *, trials: int, optimizers: Sequence[str], command: str
) -> FigurePlan:
    """The runs of a figure: each point with each optimizer and seeds 0, 1, ..., ordered by optimizer, then by seed.

    Raises:
        ValueError: if there are no trials, an optimizer is unknown, or a point has no data.
    """
    if trials < 1:
        raise ValueError(f"trials ({trials}) must be at least 1")
    for name in optimizers:
        if name not in DEFAULT_LRS:
            raise ValueError(f"optimizers ({name!r}) must be of {', '.join(DEFAULT_LRS)}")
    every_trial: list[dict[str, Any]] = [{"optimizer": o, "seed": seed} for o in optimizers for seed in range(trials)]
    datasets: dict[Path, Dataset] = {}
    planned = []
    for point in points:
        if (folder := Path(point.data) if point.data else data) is None:
            raise ValueError(f"point {point.series!r} has no data: give --data, or data= of the point")
        if folder not in datasets:
            prepared = Prepared(folder)
            datasets[folder] = describe(prepared, data_identity(prepared))
        identity, options = datasets[folder].identity, dict(point.options)
        if isinstance(network := options.get("network"), str):
            options["network"] = models.pinned(network)  # with a digest of the user's file, if it names one
        try:
            runs = [RunConfig(data=identity, **trial, **options) for trial in every_trial]
        except TypeError as error:
            raise ValueError(f"options of point {point.series!r} at {point.x}: {error}") from None
        planned.append(PlannedPoint(point.series, point.x, runs))
    made = Made(
        command=command,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        data=next(iter(datasets.values())),
        datasets={dataset.identity: dataset for dataset in datasets.values()},
        trials=trials,
        optimizers=list(optimizers),
    )
    return FigurePlan(axes=axes, made=made, points=planned)


def from_file(path: Path, data: Path | None, *, trials: int, optimizers: Sequence[str], command: str) -> FigurePlan:
    """The plan in a Python file that defines ``POINTS`` and optionally ``AXES``.

    Raises:
        ValueError: if the file does not run, or has no points.
    """
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    points, axes = names.get("POINTS"), names.get("AXES")
    if not isinstance(points, list | tuple) or not points or not all(isinstance(point, Point) for point in points):
        raise ValueError(f"{path} must define POINTS, a list of quorem.experiments.figures.Point")
    if axes is None:
        axes = Axes(name=path.stem, title=path.stem, x_label="x")
    elif not isinstance(axes, Axes):
        raise ValueError(f"AXES of {path} must be a quorem.experiments.figures.Axes")
    return plan(axes, points, data, trials=trials, optimizers=optimizers, command=command)


def begin(plans: Sequence[FigurePlan], out: Path, device: str) -> sweep.Sweep:
    """Write the plans, and begin the sweep of their runs; figures that only count parameters need none.

    Raises:
        ValueError: if the folder has figures of the same name on other data.
    """
    files: dict[Path, FigurePlan] = {}
    for plan in plans:
        path = out / "plans" / f"{plan.axes.name}.json"
        earlier = None
        with suppress(FileNotFoundError, ValueError):  # an unreadable file is replaced
            earlier = FigurePlan.read(path)
        if earlier is not None and earlier.made.datasets.keys() != plan.made.datasets.keys():
            raise ValueError(f"{path} is on other data: take another folder for each data")
        files[path] = plan if earlier is None else joined(earlier, plan)
    (out / "plans").mkdir(parents=True, exist_ok=True)
    for path, plan in files.items():
        plan.write(path)
    runs = [point.runs for plan in plans if plan.axes.y != "parameters" for point in plan.points]
    data = {name: Path(about.path) for plan in plans for name, about in plan.made.datasets.items()}
    return sweep.new(out, in_turns(runs, device), data, device)


def failures(begun: sweep.Sweep) -> list[str]:
    """The error of each run of the sweep that failed."""
    failed = [begun.error(config) for group in begun.runs for config in group if begun.has_failed(config)]
    return [json.loads(path.read_text(encoding="utf-8"))["error"] for path in failed]


def joined(earlier: FigurePlan, new: FigurePlan) -> FigurePlan:
    """A plan with the points of both, so that a command keeps what earlier ones trained.

    A point that is in both has the runs of both. Points trained on different numbers of rows become separate figures
    (``conditions.split``).
    """

    def setting(point: PlannedPoint) -> RunConfig:
        return dataclasses.replace(point.runs[0], optimizer="adagrad", seed=0)

    points = {setting(point): point for point in new.points}
    for point in earlier.points:
        first = points.setdefault(setting(point), point)
        points[setting(point)] = dataclasses.replace(first, runs=list(dict.fromkeys((*first.runs, *point.runs))))
    return dataclasses.replace(new, points=list(points.values()))


def in_turns(runs: Sequence[Sequence[RunConfig]], device: str) -> list[list[RunConfig]]:
    """The order of training: on a GPU all runs of a point at once; on a CPU first every point's seed 0, then 1, ...

    So a sweep on a CPU that is stopped early has some runs of every point.
    """
    if device.startswith("cuda"):
        return [list(point) for point in runs]
    flat = [config for point in runs for config in point]
    return [[config] for config in sorted(flat, key=lambda config: config.seed)]


def figures_in(folder: Path) -> list[Figure]:
    """The figures of a sweep's folder, of one run, of a folder of finished runs, or of a folder of figures as JSON.

    A figure whose runs were trained under different conditions is split into several (``conditions.split``).

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file is not what it should be.
    """
    if (folder / "run.json").exists():
        return [figure_of_run(folder)]
    plans = sorted((folder / "plans").glob("*.json"))
    if plans:
        figures = [aggregate(FigurePlan.read(path), folder) for path in plans]
    elif compared := figure_of_runs(folder):
        figures = [compared]
    else:
        figures = [Figure.read(path) for path in sorted(folder.rglob("*.json"))]
    if not figures:
        raise FileNotFoundError(f"{folder} has neither finished runs nor figures as JSON")
    order = list(FIGURES)
    figures.sort(key=lambda f: order.index(f.axes.name) if f.axes.name in order else len(order))
    return [part for figure in figures for part in split(figure)]


def publish(figures: Sequence[Figure], out: Path) -> None:
    """Write each figure as JSON, CSV, PNG and PDF.

    If a figure was split into several of different conditions, the files of the unsplit figure are removed.
    """
    from .report import draw

    out.mkdir(parents=True, exist_ok=True)
    for name, figure in zip(file_names(figures), figures, strict=True):
        if name != figure.axes.name:
            for ending in ("json", "csv", "png", "pdf"):
                (out / f"{figure.axes.name}.{ending}").unlink(missing_ok=True)
        figure.write(out / f"{name}.json")
        write_csv(figure, out / f"{name}.csv")
        if figure.points:
            draw(figure, out / name)

"""Reproduce figures: plan their runs, train what is missing, and write numbers, pictures and the page."""

import datetime
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import models
from ..data.prepared import Prepared
from ..training.config import DEFAULT_LRS, RunConfig
from . import sweep
from .aggregate import aggregate, figure_of_run, figures_of_runs, write_csv
from .figures import Axes, Dataset, Figure, FigurePlan, Made, PlannedPoint, Point
from .paper_figures import FIGURES


def plan(
    axes: Axes, points: Sequence[Point], data: Prepared, *, trials: int, optimizers: Sequence[str], command: str
) -> FigurePlan:
    """The runs of a figure: each point with each optimizer and seeds 0, 1, ..., ordered by optimizer, then by seed.

    Raises:
        ValueError: if an optimizer is unknown, or the options of a point are wrong.
    """
    for name in optimizers:
        if name not in DEFAULT_LRS:
            raise ValueError(f"optimizers ({name!r}) must be of {', '.join(DEFAULT_LRS)}")
    dataset = Dataset.of(data)
    every_trial: list[dict[str, Any]] = [{"optimizer": o, "seed": seed} for o in optimizers for seed in range(trials)]
    planned = []
    for point in points:
        options = dict(point.options)
        if isinstance(network := options.get("network"), str):
            options["network"] = models.pinned(network)  # with a digest of the user's file, if it names one
        try:
            runs = [RunConfig(data=dataset.identity, **trial, **options) for trial in every_trial]
        except TypeError as error:
            raise ValueError(f"options of point {point.series!r} at {point.x}: {error}") from None
        planned.append(PlannedPoint(point.series, point.x, runs))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = Made(command=command, date=date, data=dataset, trials=trials, optimizers=list(optimizers))
    return FigurePlan(axes=axes, made=made, points=planned)


def from_file(path: Path, data: Prepared, *, trials: int, optimizers: Sequence[str], command: str) -> FigurePlan:
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

    An earlier plan of a figure is replaced: the figure shows what was asked for last. Runs stay in the folder.
    """
    (out / "plans").mkdir(parents=True, exist_ok=True)
    for plan in plans:
        plan.write(out / "plans" / f"{plan.axes.name}.json")
    runs = [point.runs for plan in plans if plan.axes.y != "parameters" for point in plan.points]
    return sweep.new(out, in_turns(runs, device), Path(plans[0].made.data.path), device)


def failures(begun: sweep.Sweep) -> list[str]:
    """The error of each run of the sweep that failed."""
    failed = [begun.error(config) for group in begun.runs for config in group if begun.has_failed(config)]
    return [json.loads(path.read_text(encoding="utf-8"))["error"] for path in failed]


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

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file is not what it should be.
    """
    if (folder / "run.json").exists():
        return [figure_of_run(folder)]
    if plans := sorted((folder / "plans").glob("*.json")):
        figures = [aggregate(FigurePlan.read(path), folder) for path in plans]
    else:
        figures = figures_of_runs(folder) or [Figure.read(path) for path in sorted(folder.rglob("*.json"))]
    if not figures:
        raise FileNotFoundError(f"{folder} has neither finished runs nor figures as JSON")
    order = list(FIGURES)
    return sorted(figures, key=lambda f: order.index(f.axes.name) if f.axes.name in order else len(order))


def publish(figures: Sequence[Figure], out: Path) -> None:
    """Write each figure as JSON, CSV, PNG and PDF."""
    from .report import draw

    out.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        name = figure.axes.name
        figure.write(out / f"{name}.json")
        write_csv(figure, out / f"{name}.csv")
        if figure.points:
            draw(figure, out / name)

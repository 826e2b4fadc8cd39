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
from ..training.model import build_model, sizes
from . import sweep
from .aggregate import aggregate, command_of, figure_of_run, figures_of_runs, without_seed
from .figures import Axes, Dataset, Figure, Made, Point, Result
from .paper_figures import FIGURES


def planned_figure(
    axes: Axes, points: Sequence[Point], data: Prepared, *, trials: int, optimizers: Sequence[str], command: str
) -> Figure:
    """A figure before training: settings and sizes of its points."""
    for name in optimizers:
        if name not in DEFAULT_LRS:
            raise ValueError(f"optimizers ({name!r}) must be of {', '.join(DEFAULT_LRS)}")
    dataset = Dataset.of(data)
    planned = []
    for point in points:
        options: dict[str, Any] = {"data": dataset.identity, "optimizer": optimizers[0], "seed": 0}
        if given := sorted(options.keys() & point.options.keys()):
            raise ValueError(f"options of point {point.series!r} at {point.x}: {given[0]} is given by the command")
        options |= point.options
        if isinstance(network := options.get("network"), str):
            options["network"] = models.pinned(network)  # with a digest of the user's file, if it names one
        try:
            config = RunConfig(**options)
        except TypeError as error:
            raise ValueError(f"options of point {point.series!r} at {point.x}: {error}") from None
        counted: dict[str, Any] = sizes(build_model(config, data, "meta"))  # where it takes no memory
        del counted["tables_kept_full"]
        about: dict[str, Any] = {"config": without_seed(config), "command": command_of(config, str(data.path))}
        planned.append(Result(network=config.network, series=point.series, x=point.x, **about, **counted))
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = Made(command=command, date=date, data=dataset, trials=trials, optimizers=list(optimizers))
    return Figure(axes=axes, made=made, points=planned)


def from_file(path: Path, data: Prepared, *, trials: int, optimizers: Sequence[str], command: str) -> Figure:
    """The figure of a Python file that defines ``POINTS`` and optionally ``AXES``, before training."""
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
    return planned_figure(axes, points, data, trials=trials, optimizers=optimizers, command=command)


def begin(planned: Sequence[Figure], out: Path, device: str) -> sweep.Sweep:
    """Write the figures, and begin the sweep of their runs; figures that only count parameters need none.

    An earlier figure of that name is replaced: what was asked for last is shown. Runs stay in the folder.
    """
    (out / "plans").mkdir(parents=True, exist_ok=True)
    for figure in planned:
        figure.write(out / "plans" / f"{figure.axes.name}.json")
    runs = [figure.runs(point) for figure in planned if figure.axes.y != "parameters" for point in figure.points]
    return sweep.new(out, in_turns(runs, device), Path(planned[0].made.data.path), device)


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
    """The figures of a sweep's folder, of one run, of a folder of finished runs, or of a folder of figures as JSON."""
    if (folder / "run.json").exists():
        return [figure_of_run(folder)]
    if plans := sorted((folder / "plans").glob("*.json")):
        figures = [aggregate(Figure.read(path), folder) for path in plans]
    else:
        figures = figures_of_runs(folder) or [Figure.read(path) for path in sorted(folder.rglob("*.json"))]
    if not figures:
        raise FileNotFoundError(f"{folder} has neither finished runs nor figures as JSON")
    order = list(FIGURES)
    return sorted(figures, key=lambda f: order.index(f.axes.name) if f.axes.name in order else len(order))


def publish(figures: Sequence[Figure], out: Path) -> None:
    """Write each figure as JSON, PNG and PDF."""
    from .report.charts import draw

    out.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.write(out / f"{figure.axes.name}.json")
        if figure.points:
            draw(figure, out / figure.axes.name)

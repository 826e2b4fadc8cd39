"""From figures to runs and back: plan them, train what is missing, and write numbers, pictures and the page."""

import datetime
import os
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data.batches import Prepared
from ..training.config import OPTIMIZERS, RunConfig
from ..training.model import data_identity
from . import budgets, figure4, figure5, figure6, figure7, sweep, table1
from .aggregate import aggregate, write_csv
from .figures import Axes, Figure, Plan, Point
from .progress import showing
from .settings import Study

PAPER = {module.AXES.name: module for module in (figure4, figure5, figure6, figure7, table1)}
FIGURES = PAPER | {"budgets": budgets}


def plans_of(names: Iterable[str], data: Path, study: Mapping[str, Any], how: Mapping[str, Any]) -> list[Plan]:
    """The plans of some figures.

    Args:
        names: of ``FIGURES``.
        data: prepared data.
        study: ``networks``, ``max_rows`` and ``collisions`` of ``Study``.
        how: ``trials``, ``optimizers`` and ``command`` of ``plan``.
    """
    prepared = Prepared(data)
    made = Study(cardinalities=prepared.cardinalities, num_rows=len(prepared.split("train")), **study)
    return [plan(FIGURES[name].AXES, FIGURES[name].points(made), data, **how) for name in names]


def plan(
    axes: Axes, points: Sequence[Point], data: Path | None, *, trials: int, optimizers: Sequence[str], command: str
) -> Plan:
    """A figure's runs: each point with each optimizer and seeds 0, 1, ..., by optimizer and then by seed.

    Raises:
        ValueError: if there are no trials, an optimizer is unknown, or a point has no data.
    """
    if trials < 1:
        raise ValueError(f"trials ({trials}) must be at least 1")
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizers ({name!r}) must be of {', '.join(OPTIMIZERS)}")
    identities: dict[Path, str] = {}
    runs = []
    for point in points:
        if (own := Path(point.data) if point.data else data) is None:
            raise ValueError(f"point {point.series!r} has no data: give --data, or data= of the point")
        if own not in identities:
            identities[own] = data_identity(Prepared(own))
        runs.append(
            [
                RunConfig(data=identities[own], optimizer=optimizer, seed=seed, **point.options)
                for optimizer in optimizers
                for seed in range(trials)
            ]
        )
    about = [describe(path, identity) for path, identity in identities.items()]
    made = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "data": about[0] if about else {},
        "datasets": {found["identity"]: found["path"] for found in about},
        "trials": trials,
        "optimizers": list(optimizers),
    }
    return Plan(axes=axes, made=made, points=points, runs=runs)


def describe(path: Path, identity: str) -> dict[str, Any]:
    """What the page says of prepared data."""
    prepared = Prepared(path)
    return {
        "name": path.absolute().name,
        "path": str(path),
        "identity": identity,
        "rows": {name: len(prepared.split(name)) for name in ("train", "validation", "test")},
        "num_dense": len(prepared.dense_names),
        "cardinalities": list(prepared.cardinalities),
    }


def from_file(path: Path, data: Path | None, *, trials: int, optimizers: Sequence[str], command: str) -> Plan:
    """The plan of a Python file: ``POINTS``, and ``AXES`` if more than a name is wanted.

    Raises:
        ValueError: if the file has no points.
    """
    found = runpy.run_path(str(path))
    points = list(found.get("POINTS", ()))
    if not points or not all(isinstance(point, Point) for point in points):
        raise ValueError(f"{path} must define POINTS, a list of quorem.experiments.figures.Point")
    axes = found.get("AXES") or Axes(name=path.stem, title=path.stem, x_label="x")
    return plan(axes, points, data, trials=trials, optimizers=optimizers, command=command)


def run(
    plans: Sequence[Plan],
    out: Path,
    *,
    device: str | None,
    workers: int | None,
    train_only: bool,
    console: Console,
) -> None:
    """Train, then write numbers, pictures and the page.

    Args:
        plans: what to train.
        out: folder of the runs.
        device: a GPU where None and there is one.
        workers: processes; by default one a core, or one for a GPU.
        train_only: leave the writing to ``quorem report``.
        console: for progress.
    """
    if not train_only:
        from .report import page  # before training: if it cannot be written, say so now
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    workers = workers or (1 if device.startswith("cuda") else os.cpu_count() or 1)
    try:
        train(plans, out, device=device, workers=workers, console=console)
    except KeyboardInterrupt:
        console.print(f"Interrupted; the same command goes on, and quorem report {out} shows what is finished")
        raise
    if train_only:
        return
    figures = figures_in(out)
    publish(figures, out / "results")
    page(figures, out / "report.html")
    console.print(f"Numbers and pictures: {out / 'results'}; page: {out / 'report.html'}", highlight=False)


def train(plans: Sequence[Plan], out: Path, *, device: str, workers: int, console: Console) -> None:
    """Train what the plans need and the folder does not have; figures that only count parameters need nothing.

    Raises:
        ValueError: if the folder holds figures of the same name on other data.
        KeyboardInterrupt: if interrupted; the same call goes on.
    """
    for own in plans:
        path = out / "plans" / f"{own.axes.name}.json"
        if path.exists() and (before := Plan.read(path).made["datasets"].keys()) != own.made["datasets"].keys():
            raise ValueError(
                f"{path} is on other data ({', '.join(before)}, not {', '.join(own.made['datasets'])}): take another"
                " folder for each data"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write(path)
    wanted = [runs for own in plans if own.axes.y != "parameters" for runs in own.runs]
    data = {identity: Path(path) for own in plans for identity, path in own.made["datasets"].items()}
    made = sweep.new(out, in_turns(wanted, device), data, device)
    if made.runs:
        with showing(console, made) as report:
            sweep.run(made, workers=workers, report=report)
    for group in made.runs:
        for config in group:
            if made.has_failed(config):
                console.print(f"failed: {made.error(config)}", highlight=False)


def in_turns(runs: Sequence[Sequence[RunConfig]], device: str) -> list[list[RunConfig]]:
    """The order of training: on a GPU the seeds of a point at once; on a CPU first every point's seed 0, then 1, ...

    A sweep that is stopped early has then something of every point.
    """
    if device.startswith("cuda"):
        groups: dict[tuple[int, str], list[RunConfig]] = {}
        for i, point in enumerate(runs):
            for config in point:
                groups.setdefault((i, config.optimizer), []).append(config)
        return list(groups.values())
    flat = [config for point in runs for config in point]
    return [[config] for config in sorted(flat, key=lambda config: config.seed)]


def figures_in(folder: Path) -> list[Figure]:
    """The figures of a sweep's folder, or of a folder of figures already aggregated.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file is not what it should be.
    """
    plans = sorted((folder / "plans").glob("*.json"))
    if plans:
        found = [aggregate(Plan.read(path), folder) for path in plans]
    else:
        found = [Figure.read(path) for path in sorted(folder.rglob("*.json"))]
    if not found:
        raise FileNotFoundError(f"{folder} has no figures: neither plans/*.json nor *.json")
    order = list(FIGURES)
    return sorted(found, key=lambda f: order.index(f.axes.name) if f.axes.name in order else len(order))


def publish(figures: Sequence[Figure], out: Path) -> None:
    """Write each figure as JSON, CSV, PNG and PDF."""
    from .report import draw

    out.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        figure.write(out / f"{figure.axes.name}.json")
        write_csv(figure, out / f"{figure.axes.name}.csv")
        if figure.points:
            draw(figure, out / figure.axes.name)

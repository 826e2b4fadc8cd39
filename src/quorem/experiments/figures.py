"""A figure: its axes, the points to train, and, once they are trained, the numbers of each point.

A point is one setting of one network, trained several times with each optimizer. ``FigurePlan`` says what to train;
``Figure`` has the results. Both are files in a sweep's folder, so that drawing needs no training code.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..files import atomic as files
from ..files.checked_json import build
from ..training.config import RunConfig

PLAN_FORMAT = "quorem-plan-1"


Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How to draw a figure; it has one panel for each network, and one line for each series.

    Args:
        name: name of the figure and its files, such as ``"figure5"``.
        title: title, in one line.
        x: the x axis: ``"x"`` (of the point), ``"parameters"``, ``"embedding_bytes"`` or ``"step"``, which draws the
            curves of validation loss over training.
        x_label: label of the x axis.
        x_column: text before a value of x in the column heads of tables.
        y: the y axis: ``"test"`` or ``"validation"`` (log loss, with its deviation), or ``"parameters"``.
        y_label: label of the y axis.
        x_log: whether the x axis is logarithmic.
        y_log: whether the y axis is logarithmic.
        paper: what the paper says about this figure, in our words.
        baseline: a series that is drawn as a horizontal line, because x does not apply to it.

    Raises:
        ValueError: if the name cannot name files, or an axis is none of these.

    >>> Axes(name="width", title="Fewer rows or shorter ones?", x="embedding_bytes", x_label="bytes", x_log=True).y
    'test'
    """

    name: str
    title: str
    x: Literal["x", "parameters", "embedding_bytes", "step"] = "x"
    x_label: str
    x_column: str = "x ="
    y: Literal["test", "validation", "parameters"] = "test"
    y_label: str = "test log loss"
    x_log: bool = False
    y_log: bool = False
    paper: str = ""
    baseline: str | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        if not re.fullmatch(r"[\w .-]+", self.name):
            raise ValueError(f"name ({self.name!r}) must be letters, digits, spaces, '_', '.' and '-': it names files")
        choices = {"x": ("x", "parameters", "embedding_bytes", "step"), "y": ("test", "validation", "parameters")}
        for axis, allowed in choices.items():
            if getattr(self, axis) not in allowed:
                raise ValueError(f"{axis} ({getattr(self, axis)!r}) must be one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: ``options`` of ``RunConfig`` without data, optimizer and seed.

    Args:
        series: name of the point's line.
        x: the point's x coordinate; None for a baseline.
        options: options of the run, such as ``{"network": "dcn", "scheme": QR(4)}``.
        data: folder of prepared data, if it is not that of the sweep.

    Raises:
        ValueError: if one of the first three is something else.

    >>> from quorem import QR
    >>> Point(series="mult", x=4, options={"network": "dcn", "scheme": QR(4)}).options["scheme"]
    QR(num_collisions=4)
    """

    series: str
    x: float | None
    options: Mapping[str, Any]
    data: str | None = None

    def __post_init__(self) -> None:
        """Check the fields: a point that could not be drawn is not trained."""
        if not isinstance(self.series, str):
            raise ValueError(f"series ({self.series!r}) must be text")
        if self.x is not None and not (isinstance(self.x, int | float) and math.isfinite(self.x)):
            raise ValueError(f"x ({self.x!r}) of point {self.series!r} must be a finite number, or None")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options ({self.options!r}) of point {self.series!r} must be a mapping")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A point once trained: means and standard deviations (n - 1) over its trials with the chosen optimizer.

    Args:
        optimizer: the chosen optimizer, with the lower mean validation loss.
        others: mean validation and test loss with each optimizer, including the chosen one.
        test_losses: test loss of each trial.
        curve: ``[step, mean, deviation]`` of the validation loss during training; empty if it was not measured.
            As in ``test_sd``, ``validation_sd`` and ``auc_sd``, the deviation of a single trial is None.
        trials: number of finished trials. ``missing`` trials (with any optimizer) are not finished, of which
            ``failed`` failed. Without finished trials, as in a figure that only counts parameters, means and
            deviations are None.
        seconds: mean time of a training; 0 if it is not known.
        config: configuration of the runs, without the seed.
        runs: keys of the runs, which are the names of their folders.
        command: the command that trains the first trial alone.
    """

    network: str
    series: str
    x: float | None
    optimizer: str = ""
    trials: int = 0
    test_mean: float | None = None
    test_sd: float | None = None
    validation_mean: float | None = None
    validation_sd: float | None = None
    auc_mean: float | None = None
    auc_sd: float | None = None
    parameters: int
    bytes: int
    embedding_parameters: int
    embedding_bytes: int
    rows_per_second: float = 0.0
    seconds: float = 0.0
    others: dict[str, dict[str, float]] = field(default_factory=dict)
    config: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    command: str
    test_losses: list[float] = field(default_factory=list)
    curve: list[list[float | None]] = field(default_factory=list)
    missing: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        """Check the curve."""
        if wrong := next((row for row in self.curve if len(row) != 3), None):
            raise ValueError(f"curve ({wrong}) must have rows of three numbers")

    def loss(self, split: str) -> tuple[float | None, float | None]:
        """Mean and deviation of the log loss on a split, ``"test"`` or ``"validation"``."""
        return getattr(self, f"{split}_mean"), getattr(self, f"{split}_sd")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items with equal keys, such as the points of each network; all in the order of the items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its numbers; ``made`` says how they were made: command, data, device, versions, commit, trials."""

    axes: Axes
    made: dict[str, Any]
    points: list[Result]

    def write(self, path: Path) -> None:
        """Write as JSON."""
        files.write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Figure":
        """The figure that ``write`` wrote.

        Raises:
            ValueError: if the file does not contain a figure.
        """
        try:
            return build(cls, files.read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} does not hold a figure: {error}") from None


@dataclass(frozen=True)
class _PlannedPoint:
    """A point of a plan's file."""

    series: str
    x: float | None
    runs: list[RunConfig]


@dataclass(frozen=True)
class _PlanFile:
    """The contents of a plan's file."""

    format: str
    axes: Axes
    made: dict[str, Any]
    points: list[_PlannedPoint]

    def __post_init__(self) -> None:
        """Check that each point has runs, and each run its data."""
        if self.format != PLAN_FORMAT:
            raise ValueError(f"format ({self.format!r}) must be {PLAN_FORMAT!r}")
        datasets = self.made.get("datasets")
        if not isinstance(datasets, dict) or not all(isinstance(about, dict) for about in datasets.values()):
            raise ValueError("made.datasets must be an object of objects")
        for point in self.points:
            if not point.runs or not all(config.data in datasets for config in point.runs):
                raise ValueError(f"point {point.series!r} must have runs on data of made.datasets")


@dataclass(frozen=True, kw_only=True)
class FigurePlan:
    """A figure and the runs for each of its points; ``made`` is as in ``Figure``.

    ``runs[i]`` are the configurations for ``points[i]``, with every optimizer and seed.
    """

    axes: Axes
    made: dict[str, Any]
    points: Sequence[Point]
    runs: Sequence[Sequence[RunConfig]]

    def write(self, path: Path) -> None:
        """Write as JSON."""
        points = [
            {"series": p.series, "x": p.x, "runs": [json.loads(config.to_json()) for config in runs]}
            for p, runs in zip(self.points, self.runs, strict=True)
        ]
        contents = {"axes": dataclasses.asdict(self.axes), "made": self.made, "points": points}
        files.write_json(path, {"format": PLAN_FORMAT, **contents})

    @classmethod
    def read(cls, path: Path) -> "FigurePlan":
        """The plan that ``write`` wrote.

        Raises:
            ValueError: if the file does not contain a plan.
        """
        try:
            converters = {RunConfig: lambda run: RunConfig.from_json(json.dumps(run))}
            values = build(_PlanFile, files.read_json(path), converters=converters)
            points = [Point(series=point.series, x=point.x, options={}) for point in values.points]
        except ValueError as error:
            raise ValueError(f"{path} does not hold a plan: {error}") from None
        return cls(axes=values.axes, made=values.made, points=points, runs=[point.runs for point in values.points])

"""What a figure is: how its axes read, the points it asks for, and, once trained, the numbers of each point.

A point is one setting of one network, trained several times with each optimizer. ``FigurePlan`` says what to train,
``Figure`` what came out; both are files of a sweep's folder, so that anything that draws needs no training code.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from .. import files
from ..training.config import RunConfig

PLAN_FORMAT = "quorem-plan-1"


Number = int | float | None  # in a file: None where it is not known


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How to draw a figure; one panel a network, one line a series.

    Args:
        name: such as ``"figure5"``; also the name of its files.
        title: one line.
        x: what is to the right: ``"x"`` (of the point), ``"parameters"``, ``"embedding_bytes"`` or ``"step"``, which
            draws the curves of validation loss over training.
        x_label: in words.
        x_column: what stands before a number of x at the head of a table's column.
        y: what is above: ``"test"`` or ``"validation"`` (log loss, with its deviation), or ``"parameters"``.
        y_label: in words.
        x_log: logarithmic to the right.
        y_log: logarithmic above.
        paper: what the paper says of this figure, in our words.
        baseline: a series drawn as a horizontal line where x does not apply to it.
    """

    name: str
    title: str
    x: str = "x"
    x_label: str
    x_column: str = "x ="
    y: str = "test"
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
        for axis, known in choices.items():
            if getattr(self, axis) not in known:
                raise ValueError(f"{axis} ({getattr(self, axis)!r}) must be one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: ``options`` of ``RunConfig`` without data, optimizer and seed.

    Args:
        series: name of its line.
        x: where on the line; None for a baseline.
        options: such as ``{"network": "dcn", "scheme": QR(4)}``.
        data: folder of prepared data, where not that of the sweep.
    """

    series: str
    x: float | None
    options: Mapping[str, Any]
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A point once trained: means and standard deviations (n - 1) over its trials with the chosen optimizer.

    Args:
        optimizer: the one with the lower mean validation loss.
        others: mean validation and test loss with each optimizer, the chosen one among them.
        test_losses: of each trial.
        curve: ``[step, mean, deviation]`` of the validation loss during training; empty if it was not followed.
            Here as in ``test_sd`` and its like, the deviation of a single trial is None.
        trials: how many were finished; ``missing`` (of any optimizer) are not, ``failed`` among them. With none, as
            where a figure only counts parameters, means and deviations are None.
        config: of the runs, without seed.
        runs: their keys, which name their folders.
        command: trains the first trial by itself.
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
    others: dict[str, dict[str, float]] = field(default_factory=dict)
    config: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    command: str
    test_losses: list[float] = field(default_factory=list)
    curve: list[list[float | None]] = field(default_factory=list)
    missing: int = 0
    failed: int = 0


# What the fields of a result are in a file.
KINDS: dict[str, tuple[type | UnionType, str]] = {
    **dict.fromkeys(("network", "series", "optimizer", "command"), (str, "text")),
    **dict.fromkeys(("parameters", "bytes", "embedding_parameters", "embedding_bytes"), (int, "an integer")),
    **dict.fromkeys(("trials", "missing", "failed"), (int, "an integer")),
    **{f"{name}_{kind}": (Number, "a number") for name in ("test", "validation", "auc") for kind in ("mean", "sd")},
    **dict.fromkeys(("x",), (Number, "a number")),
    **dict.fromkeys(("others", "config"), (dict, "an object")),
    **dict.fromkeys(("runs", "curve", "test_losses"), (list, "a list")),
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its numbers; ``made`` says by what: command, data, device, versions, commit and trials."""

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
            ValueError: if the file holds no figure.
        """
        try:
            values = files.read_json(path)
            points = [Result(**point) for point in values["points"]]
            if not isinstance(values["made"], dict):
                raise TypeError("made must be an object")
            for point in points:
                _check(point)
            return cls(axes=Axes(**values["axes"]), made=values["made"], points=points)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a figure: {error}") from None


def _check(point: Result) -> None:
    """Raise TypeError unless the fields of a result have their types."""
    for name, (kind, text) in KINDS.items():
        if not isinstance(value := getattr(point, name), kind):
            raise TypeError(f"{name} ({str(value)[:40]!r}) must be {text}")
    for row in point.curve:
        if not isinstance(row, list) or len(row) != 3 or not all(isinstance(value, Number) for value in row):
            raise TypeError(f"curve ({str(row)[:40]!r}) must be rows of three numbers")
    if not all(isinstance(other, dict) for other in point.others.values()):
        raise TypeError("others must hold objects")


@dataclass(frozen=True, kw_only=True)
class FigurePlan:
    """A figure and the runs behind each of its points; ``made`` as in ``Figure``.

    ``runs[i]`` are the configurations of ``points[i]``, every optimizer and seed.
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
        whole = {"axes": dataclasses.asdict(self.axes), "made": self.made, "points": points}
        files.write_json(path, {"format": PLAN_FORMAT, **whole})

    @classmethod
    def read(cls, path: Path) -> "FigurePlan":
        """The plan that ``write`` wrote.

        Raises:
            ValueError: if the file holds no plan.
        """
        try:
            values = files.read_json(path)
            points = [Point(series=p["series"], x=p["x"], options={}) for p in values["points"]]
            runs = [[RunConfig.from_json(json.dumps(run)) for run in p["runs"]] for p in values["points"]]
            if not all(isinstance(about, dict) for about in values["made"]["datasets"].values()):
                raise TypeError("made.datasets must hold objects")
            for point in points:
                if not isinstance(point.series, str) or not isinstance(point.x, int | float | None):
                    raise TypeError(f"series ({point.series!r}) must be text and x ({point.x!r}) a number")
            return cls(axes=Axes(**values["axes"]), made=values["made"], points=points, runs=runs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold a plan: {error}") from None

"""A figure: its axes, the points to train, and, once they are trained, the numbers of each point.

A point is one setting of one network, trained several times with each optimizer. ``FigurePlan`` says what to train;
``Figure`` has the results. Both are files in a sweep's folder, so that drawing needs no training code.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ..checks import check_choice
from ..data.prepared import Prepared
from ..files import atomic as files
from ..files.checked_json import build
from ..training.config import RunConfig
from ..training.model import data_identity

PLAN_FORMAT = "quorem-plan-2"
CurvePoint = tuple[float, float | None, float | None]  # step, mean and deviation of the loss
XAxis = Literal["x", "parameters", "embedding_bytes", "step"]
YAxis = Literal["test", "validation", "parameters"]

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
    x: XAxis = "x"
    x_label: str
    y: YAxis = "test"
    y_label: str = "test log loss"
    x_log: bool = False
    y_log: bool = False
    paper: str = ""
    baseline: str | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        if not re.fullmatch(r"[\w .-]+", self.name):
            raise ValueError(f"name ({self.name!r}) must be letters, digits, spaces, '_', '.' and '-': it names files")
        check_choice("x", self.x, XAxis)
        check_choice("y", self.y, YAxis)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: ``options`` of ``RunConfig`` without data, optimizer and seed.

    Args:
        series: name of the point's line.
        x: the point's x coordinate; None for a baseline.
        options: options of the run, such as ``{"network": "dcn", "scheme": QR(4)}``.

    Raises:
        ValueError: if ``x`` or ``options`` is something else.

    >>> from quorem import QR
    >>> Point(series="mult", x=4, options={"network": "dcn", "scheme": QR(4)}).options["scheme"]
    QR(num_collisions=4)
    """

    series: str
    x: float | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check the fields: a point that could not be drawn is not trained."""
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
        curve: step, mean and deviation of the validation loss during training; empty if it was not measured.
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
    curve: list[CurvePoint] = field(default_factory=list)
    missing: int = 0
    failed: int = 0

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
class Dataset:
    """What is known about prepared data: ``rows`` of each split, and the number of ids of each categorical feature."""

    name: str
    identity: str
    rows: dict[str, int]
    path: str = ""
    num_dense: int = 0
    cardinalities: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check that the training rows are counted."""
        if "train" not in self.rows:
            raise ValueError(f"rows ({self.rows}) must have those of train")

    @classmethod
    def of(cls, prepared: Prepared) -> "Dataset":
        """The description of prepared data."""
        return cls(
            name=prepared.path.absolute().name,
            path=str(prepared.path),
            identity=data_identity(prepared),
            rows={name: len(prepared.split(name, check=False)) for name in ("train", "validation", "test")},
            num_dense=len(prepared.dense_names),
            cardinalities=list(prepared.cardinalities),
        )


@dataclass(frozen=True, kw_only=True)
class Made:
    """How the numbers of a figure were made.

    Args:
        command: the command that made them.
        data: the data that all runs were trained on.
        trials: seeds of each setting.
        optimizers: optimizers of each setting.
    """

    command: str
    data: Dataset
    date: str = ""
    trials: int = 1
    optimizers: list[str] = field(default_factory=list)
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


class Conditions(NamedTuple):
    """What runs must share to be compared, beside their data: training rows of an epoch, epochs and batch size."""

    rows: int
    epochs: int
    batch_size: int

    def __str__(self) -> str:
        """The conditions in words.

        >>> str(Conditions(3000, 1, 128))
        '3,000 rows, 1 epoch, batch 128'
        """
        return f"{self.rows:,} rows, {self.epochs} epoch{'s' * (self.epochs != 1)}, batch {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its numbers."""

    axes: Axes
    made: Made
    points: list[Result]

    def conditions_of(self, point: Result) -> Conditions:
        """The conditions under which a point was trained."""
        config, rows = point.config, self.made.data.rows["train"]
        return Conditions(
            min(config.get("max_rows") or rows, rows), config.get("epochs", 1), config.get("batch_size", 128)
        )

    def conditions(self) -> list[Conditions]:
        """The conditions of the points, each once; if there are several, no point is called the best."""
        return list(dict.fromkeys(map(self.conditions_of, self.points)))

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
class PlannedPoint:
    """A point with its runs: a configuration for every optimizer and seed."""

    series: str
    x: float | None
    runs: list[RunConfig]


@dataclass(frozen=True, kw_only=True)
class FigurePlan:
    """A figure and the runs for each of its points."""

    axes: Axes
    made: Made
    points: list[PlannedPoint]
    format: str = PLAN_FORMAT

    def __post_init__(self) -> None:
        """Check that each point has runs, on the data of the figure."""
        if self.format != PLAN_FORMAT:
            raise ValueError(f"format ({self.format!r}) must be {PLAN_FORMAT!r}")
        for point in self.points:
            if {config.data for config in point.runs} != {self.made.data.identity}:
                raise ValueError(f"point {point.series!r} must have runs on the data of the figure")

    def write(self, path: Path) -> None:
        """Write as JSON."""
        runs = [[json.loads(config.to_json()) for config in point.runs] for point in self.points]
        points = [{"series": p.series, "x": p.x, "runs": r} for p, r in zip(self.points, runs, strict=True)]
        contents = {"axes": dataclasses.asdict(self.axes), "made": dataclasses.asdict(self.made), "points": points}
        files.write_json(path, {"format": self.format, **contents})

    @classmethod
    def read(cls, path: Path) -> "FigurePlan":
        """The plan that ``write`` wrote.

        Raises:
            ValueError: if the file does not contain a plan.
        """
        try:
            converters = {RunConfig: lambda run: RunConfig.from_json(json.dumps(run))}
            return build(cls, files.read_json(path), converters=converters)
        except ValueError as error:
            raise ValueError(f"{path} does not hold a plan: {error}") from None

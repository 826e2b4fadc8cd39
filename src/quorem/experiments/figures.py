"""A figure: its axes, and its points with their numbers.

A point is one setting of one network, trained several times with each optimizer. A sweep's folder has its figures
before training, with the settings and sizes of their points; ``aggregate`` fills in the numbers of finished runs.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ..checks import check_options
from ..data.prepared import Prepared
from ..files import atomic as files
from ..files.checked_json import build
from ..training.config import RunConfig
from ..training.model import data_identity

CurvePoint = tuple[float, float | None, float | None]  # step, mean and deviation of the loss

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
    x: Literal["x", "parameters", "embedding_bytes", "step"] = "x"
    x_label: str
    y: Literal["test", "validation", "parameters"] = "test"
    y_label: str = "test log loss"
    x_log: bool = False
    y_log: bool = False
    paper: str = ""
    baseline: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w .-]+", self.name):
            raise ValueError(f"name ({self.name!r}) must be letters, digits, spaces, '_', '.' and '-': it names files")
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: ``options`` of ``RunConfig`` without data, optimizer and seed.

    Args:
        series: name of the point's line.
        x: the point's x coordinate; None for a baseline.
        options: options of the run, such as ``{"network": "dcn", "scheme": QR(4)}``.

    >>> from quorem import QR
    >>> Point(series="mult", x=4, options={"network": "dcn", "scheme": QR(4)}).options["scheme"]
    QR(num_collisions=4)
    """

    series: str
    x: float | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.x is not None and not (isinstance(self.x, int | float) and math.isfinite(self.x)):
            raise ValueError(f"x ({self.x!r}) of point {self.series!r} must be a finite number, or None")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options ({self.options!r}) of point {self.series!r} must be a mapping")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A point: means and standard deviations (n - 1) over its trials with the chosen optimizer; None until trained.

    The deviation of a single trial is None.
    """

    network: str
    series: str
    x: float | None
    optimizer: str = ""  # the one with the lower mean validation loss
    trials: int = 0  # that are finished
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
    seconds: float = 0.0  # mean time of a training; 0 if it is not known
    others: dict[str, dict[str, float]] = field(default_factory=dict)  # mean losses with each optimizer
    config: dict[str, Any]  # of the runs, without the seed
    runs: list[str] = field(default_factory=list)  # their keys, which are the names of their folders
    command: str  # that trains the first trial alone
    test_losses: list[float] = field(default_factory=list)  # of each trial
    curve: list[CurvePoint] = field(default_factory=list)  # validation loss during training, if it was measured
    missing: int = 0  # trials with any optimizer that are not finished
    failed: int = 0  # of the missing ones

    @property
    def loss(self) -> float:
        """The mean test loss; NaN until trained."""
        return math.nan if self.test_mean is None else self.test_mean


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
        if "train" not in self.rows:
            raise ValueError(f"rows ({self.rows}) must have those of train")

    @classmethod
    def of(cls, prepared: Prepared) -> "Dataset":
        """The description of prepared data."""
        return cls(
            name=prepared.path.absolute().name,
            path=str(prepared.path),
            identity=data_identity(prepared),
            rows=prepared.meta.rows,
            num_dense=len(prepared.dense_names),
            cardinalities=list(prepared.cardinalities),
        )


@dataclass(frozen=True, kw_only=True)
class Made:
    """How the numbers of a figure were made."""

    command: str
    data: Dataset  # that all runs were trained on
    date: str = ""
    trials: int = 1  # seeds of each setting
    optimizers: list[str] = field(default_factory=list)  # of each setting
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


class Conditions(NamedTuple):
    """What runs must share to be compared, beside their data: training rows of an epoch, epochs and batch size."""

    rows: int
    epochs: int
    batch_size: int

    def __str__(self) -> str:
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
        trained_on = min(config.get("max_rows") or rows, rows)
        return Conditions(trained_on, config.get("epochs", 1), config.get("batch_size", 128))

    def conditions(self) -> list[Conditions]:
        """The conditions of the points, each once; if there are several, no point is called the best."""
        return list(dict.fromkeys(map(self.conditions_of, self.points)))

    def runs(self, point: Result) -> list[RunConfig]:
        """The runs of a point: with each optimizer, seeds 0, 1, ..."""
        try:
            run = RunConfig.from_json(json.dumps(point.config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.axes.name}: configuration of point {point.series!r}: {error}") from None
        if run.data != self.made.data.identity:
            raise ValueError(f"{self.axes.name}: point {point.series!r} must have runs on the data of the figure")
        names: list[Any] = self.made.optimizers
        return [replace(run, optimizer=name, seed=seed) for name in names for seed in range(self.made.trials)]

    def write(self, path: Path) -> None:
        files.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Figure":
        try:
            return build(cls, files.read_json(path))
        except ValueError as error:
            raise ValueError(f"{path} does not hold a figure: {error}") from None

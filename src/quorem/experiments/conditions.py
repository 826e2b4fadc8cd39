"""The conditions that runs must share to be compared: data, number of rows and epochs, and batch size."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..data.prepared import Prepared
from .figures import Figure, Result, grouped


class Conditions(NamedTuple):
    """The data by its identity, the training rows of an epoch (None if unknown), the epochs and the batch size."""

    data: str
    rows: int | None
    epochs: int
    batch_size: int

    def text(self) -> str:
        """The conditions in words.

        >>> Conditions("log", 3000, 1, 128).text()
        '3,000 rows, 1 epoch, batch 128'
        """
        rows = "an unknown number of rows" if self.rows is None else f"{self.rows:,} rows"
        return f"{rows}, {self.epochs} epoch{'s' * (self.epochs != 1)}, batch {self.batch_size}"

    def file_suffix(self) -> str:
        """A suffix for file names that differ only by the conditions.

        >>> Conditions("log", 3000, 2, 128).file_suffix()
        '-3000-rows-2-epochs-batch-128-log'
        """
        rows = "unknown" if self.rows is None else str(self.rows)
        return f"-{rows}-rows-{self.epochs}-epochs-batch-{self.batch_size}-{self.data[:8]}"


def describe(prepared: Prepared, identity: str) -> dict[str, Any]:
    """What the page says about prepared data."""
    return {
        "name": prepared.path.absolute().name,
        "path": str(prepared.path),
        "identity": identity,
        "rows": {name: len(prepared.split(name, check=False)) for name in ("train", "validation", "test")},
        "num_dense": len(prepared.dense_names),
        "cardinalities": list(prepared.cardinalities),
    }


def dataset_of(made: Mapping[str, Any], identity: str | None) -> Mapping[str, Any]:
    """The description of the data with that identity; or of the figure's only data, if there is no such entry."""
    datasets = made.get("datasets")
    if isinstance(datasets, Mapping) and isinstance(dataset := datasets.get(identity), Mapping):
        return dataset
    data = made.get("data")
    return data if isinstance(data, Mapping) else {"name": data or "data"}


def conditions_of(point: Result, made: Mapping[str, Any]) -> Conditions:
    """The conditions under which a point was trained."""
    config = point.config
    data = dataset_of(made, config.get("data"))
    splits = data.get("rows")
    rows = splits.get("train") if isinstance(splits, Mapping) else None
    limit = config.get("max_rows")
    if isinstance(limit, int):
        rows = limit if not isinstance(rows, int) else min(limit, rows)
    identity = str(data.get("identity", data.get("name", "data")))
    return Conditions(identity, rows, int(config.get("epochs", 1)), int(config.get("batch_size", 128)))


def all_conditions(figure: Figure) -> list[Conditions]:
    """The conditions of a figure's points, each once, in the order of the points."""
    return list(dict.fromkeys(conditions_of(point, figure.made) for point in figure.points))


def split(figure: Figure) -> list[Figure]:
    """The figure, or one figure for each of its conditions, so that runs under different conditions are never compared.

    A figure stays whole if its conditions change along x alone, such as when x is the number of rows: then all points
    at one x have the same conditions, and no horizontal line is drawn across all x.
    """
    parts = grouped(figure.points, lambda point: conditions_of(point, figure.made))
    xs = [x for points in parts.values() for x in {point.x for point in points}]
    along_x = None not in xs and figure.axes.x == "x" and len(xs) == len(set(xs))  # each x has one of the conditions
    if len(parts) < 2 or along_x:
        return [figure]
    return [dataclasses.replace(figure, made=_made_of(figure, points), points=points) for points in parts.values()]


def _made_of(figure: Figure, points: Sequence[Result]) -> dict[str, Any]:
    """``made`` for a part of a figure: that of the figure, with the part's own data."""
    return {**figure.made, "data": dict(dataset_of(figure.made, points[0].config.get("data")))}


def file_names(figures: Sequence[Figure]) -> list[str]:
    """A name for the files of each figure: the figure's name, with the conditions if several figures have that name."""
    names = [figure.axes.name for figure in figures]
    return [
        name if names.count(name) == 1 else name + all_conditions(figure)[0].file_suffix()
        for name, figure in zip(names, figures, strict=True)
    ]

"""The conditions that runs must share to be compared: data, number of rows and epochs, and batch size."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ..data.prepared import Prepared
from .figures import Dataset, Figure, Made, Result, grouped


class Conditions(NamedTuple):
    """The data by its identity, the training rows of an epoch, the epochs and the batch size."""

    data: str
    rows: int
    epochs: int
    batch_size: int

    def text(self) -> str:
        """The conditions in words.

        >>> Conditions("log", 3000, 1, 128).text()
        '3,000 rows, 1 epoch, batch 128'
        """
        return f"{self.rows:,} rows, {self.epochs} epoch{'s' * (self.epochs != 1)}, batch {self.batch_size}"

    def file_suffix(self) -> str:
        """A suffix for file names that differ only by the conditions.

        >>> Conditions("log", 3000, 2, 128).file_suffix()
        '-3000-rows-2-epochs-batch-128-log'
        """
        return f"-{self.rows}-rows-{self.epochs}-epochs-batch-{self.batch_size}-{self.data[:8]}"


def describe(prepared: Prepared, identity: str) -> Dataset:
    """What the page says about prepared data."""
    return Dataset(
        name=prepared.path.absolute().name,
        path=str(prepared.path),
        identity=identity,
        rows={name: len(prepared.split(name, check=False)) for name in ("train", "validation", "test")},
        num_dense=len(prepared.dense_names),
        cardinalities=list(prepared.cardinalities),
    )


def conditions_of(point: Result, made: Made) -> Conditions:
    """The conditions under which a point was trained."""
    config, data = point.config, made.dataset(point.config.get("data"))
    rows, limit = data.rows["train"], config.get("max_rows")
    rows = min(limit, rows) if isinstance(limit, int) else rows
    return Conditions(data.identity, rows, int(config.get("epochs", 1)), int(config.get("batch_size", 128)))


def all_conditions(figure: Figure) -> list[Conditions]:
    """The conditions of a figure's points, each once, in the order of the points."""
    return list(dict.fromkeys(conditions_of(point, figure.made) for point in figure.points))


def split(figure: Figure) -> list[Figure]:
    """The figure, or one figure for each of its conditions, so that runs under different conditions are never compared.

    A figure stays whole if its conditions change along x alone, such as when x is the number of rows: then all points
    at one x have the same conditions, and no horizontal line is drawn across all x. Finished runs that a user has put
    side by side are split by their data alone: the page says that their conditions differ, and names no best.
    """
    by_data = figure.axes.name == "runs"
    every = [conditions_of(point, figure.made) for point in figure.points]
    pairs = grouped(zip(figure.points, every, strict=True), lambda pair: pair[1].data if by_data else pair[1])
    parts = {key: [point for point, _ in members] for key, members in pairs.items()}
    xs = [x for points in parts.values() for x in {point.x for point in points}]
    along_x = None not in xs and figure.axes.x == "x" and len(xs) == len(set(xs))  # each x has one of the conditions
    if len(parts) < 2 or along_x:
        return [figure]
    data = [figure.made.dataset(points[0].config.get("data")) for points in parts.values()]
    return [
        dataclasses.replace(figure, made=dataclasses.replace(figure.made, data=own), points=points)
        for own, points in zip(data, parts.values(), strict=True)
    ]


def file_names(figures: Sequence[Figure]) -> list[str]:
    """A name for the files of each figure: the figure's name, with the conditions if several figures have that name."""
    names = [figure.axes.name for figure in figures]
    return [
        name if names.count(name) == 1 else name + all_conditions(figure)[0].file_suffix()
        for name, figure in zip(names, figures, strict=True)
    ]

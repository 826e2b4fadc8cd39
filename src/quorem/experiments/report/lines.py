"""The lines of a figure with their coordinates, one panel for each network."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..figures import Axes, Figure, Result, grouped
from ..words import NETWORK_NAMES, or_nan


class Place(NamedTuple):
    """A point of the figure, or of its curve, with its coordinates; the deviation is zero if there is none."""

    point: Result
    x: float
    y: float
    deviation: float


@dataclass(frozen=True)
class Line:
    """One line: the ``points`` of a series, the ``curve`` of one point, or a horizontal ``level``, whose x is no x."""

    series: str
    kind: Literal["points", "curve", "level"]
    places: Sequence[Place]

    @property
    def x(self) -> list[float]:
        return [place.x for place in self.places]

    @property
    def y(self) -> list[float]:
        return [place.y for place in self.places]


@dataclass(frozen=True)
class Panel:
    """What is drawn of one network."""

    lines: list[Line]  # points without finite coordinates are left out
    x_range: tuple[float, float]  # the least and greatest x, the same in all panels of a figure
    marks: list[float]  # the x of the points of all panels
    end: list[float] | None  # the range of y that shows the end of training; None shows all

    def shown(self, line: Line) -> list[Place]:
        """The places of a line in the range of y."""
        return [place for place in line.places if not self.end or self.end[0] <= place.y <= self.end[1]]


def panels(figure: Figure, *, whole: bool = False) -> dict[str, Panel]:
    """A panel for each network; ``whole`` shows all of a training instead of its end."""
    axes = figure.axes
    lines = {network: _lines(axes, points) for network, points in by_network(figure.points).items()}
    every = [line for own in lines.values() for line in own]
    marks = sorted({x for line in every if line.kind == "points" for x in line.x})
    x_range = span(every, log=axes.x_log)
    return {name: Panel(own, x_range, marks, None if whole else end_of(own)) for name, own in lines.items()}


def coinciding(lines: Sequence[Line], *, log: bool = False) -> list[str]:
    """Series that are drawn on top of each other, such as ``"add ≈ mult"``.

    Their distance is at most 0.4% of the height of all lines at every x.
    """
    height = math.log if log else float
    every = [height(y) for line in lines for y in line.y] or [0.0]
    limit = 0.004 * (max(every) - min(every))

    def coincide(one: Line, other: Line) -> bool:
        distances = (abs(height(a) - height(b)) for a, b in zip(one.y, other.y, strict=False))
        return (one.kind, one.x) == (other.kind, other.x) and max(distances) <= limit

    groups: list[list[Line]] = []
    for line in lines:
        group = next((group for group in groups if coincide(group[0], line)), None)
        groups.append([line]) if group is None else group.append(line)
    names = [dict.fromkeys(line.series for line in group) for group in groups]
    return [" ≈ ".join(series) for series in names if len(series) > 1]


def by_network(points: Iterable[Result]) -> dict[str, list[Result]]:
    """The points of each network: DCN before DLRM as in the paper, then others in the order of the points."""
    groups = grouped(points, lambda point: point.network)
    return {name: groups[name] for name in dict.fromkeys((*NETWORK_NAMES, *groups)) if name in groups}


def _lines(axes: Axes, points: Sequence[Result]) -> list[Line]:
    lines = []
    for series, members in grouped(points, lambda point: point.series).items():
        if axes.x == "step":
            lines += [Line(series, "curve", _finite((p, *step) for step in p.curve)) for p in members]
            continue
        are_levels = grouped(members, lambda p: p.x is None and (axes.x == "x" or p.series == axes.baseline))
        along_x = _finite((p, float(getattr(p, axes.x) or 0), *_y(axes, p)) for p in are_levels.get(False, []))
        shown = [place for place in along_x if place.x > 0 or not axes.x_log]
        lines.append(Line(series, "points", sorted(shown, key=lambda place: place.x)))
        lines += [Line(series, "level", _finite([(p, 0.0, *_y(axes, p))])) for p in are_levels.get(True, [])]
    return [line for line in lines if line.places]


def _finite(places: Iterable[tuple[Result, float, float | None, float | None]]) -> list[Place]:
    deviations = ((p, x, or_nan(mean), or_nan(sd)) for p, x, mean, sd in places)
    return [Place(p, x, y, sd if math.isfinite(sd) else 0.0) for p, x, y, sd in deviations if math.isfinite(y)]


def _y(axes: Axes, point: Result) -> tuple[float | None, float | None]:
    if axes.y == "parameters":
        return float(point.parameters), None
    return getattr(point, f"{axes.y}_mean"), getattr(point, f"{axes.y}_sd")


def span(lines: Iterable[Line], *, log: bool) -> tuple[float, float]:
    """The least and greatest x with a margin; on a logarithmic axis only positive ones count."""
    every = [x for line in lines if line.kind != "level" for x in line.x if x > 0 or not log] or [1.0]
    low, high = min(every), max(every)
    if log:
        room = (high / low) ** 0.04 if high > low else 2.0
        return low / room, high * room
    room = (high - low) * 0.04 or abs(low) * 0.1 or 0.5
    return low - room, high + room


def end_of(lines: Iterable[Line]) -> list[float] | None:
    """The range of the losses of curves after the first quarter of the training, with a margin; None without curves.

    Losses at the beginning are so much higher that the ends of the curves could not be told apart.
    """
    places = [place for line in lines if line.kind == "curve" and len(line.places) > 2 for place in line.places]
    if not places:
        return None
    begin = 0.25 * max(place.x for place in places)
    late = [place for place in places if place.x >= begin]
    low, high = min(p.y - p.deviation for p in late), max(p.y + p.deviation for p in late)
    room = 0.06 * (high - low) or 0.01
    return [low - room, high + room]

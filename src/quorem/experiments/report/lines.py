"""The lines of a figure with their coordinates, one panel for each network."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..figures import Axes, Figure, Result, grouped
from ..words import NETWORK_NAMES, or_nan

Kind = Literal["points", "curve", "level"]
Place = tuple[Result, float, float | None, float | None]  # a point of the figure, x, y and the deviation of y


@dataclass(frozen=True)
class Line:
    """One line: the ``points`` of a series, the ``curve`` of one point, or a horizontal ``level``, whose x is no x.

    Each coordinate has its point of the figure; ``deviation`` is zero if there is none.
    """

    series: str
    kind: Kind
    points: Sequence[Result]
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float]

    def within(self, reach: Sequence[float]) -> "Line":
        """The line without what lies out of a range of y."""
        every = zip(self.points, self.x, self.y, self.deviation, strict=True)
        return _line(self.series, self.kind, (place for place in every if reach[0] <= place[2] <= reach[1]))


@dataclass(frozen=True)
class Panel:
    """What is drawn of one network.

    Args:
        lines: its lines; points without finite coordinates are left out.
        x_range: the least and greatest x, the same in all panels of a figure.
        marks: the x of the points of all panels.
        end: the range of y that shows the end of training; None shows all.
    """

    lines: list[Line]
    x_range: tuple[float, float]
    marks: list[float]
    end: list[float] | None

    def shown(self, line: Line) -> Line:
        """A line of this panel without what lies out of the range of y."""
        return line.within(self.end) if self.end else line


def panels(figure: Figure, *, whole: bool = False) -> dict[str, Panel]:
    """A panel for each network; ``whole`` shows all of a training instead of its end."""
    axes = figure.axes
    lines = {network: _lines(axes, points) for network, points in by_network(figure.points).items()}
    every = [line for own in lines.values() for line in own]
    marks = sorted({x for line in every if line.kind == "points" for x in line.x})
    x_range = span(every, log=axes.x_log)
    return {name: Panel(own, x_range, marks, None if whole else end_of(own)) for name, own in lines.items()}


def by_network(points: Iterable[Result]) -> dict[str, list[Result]]:
    """The points of each network: DCN before DLRM as in the paper, then others in the order of the points."""
    groups = grouped(points, lambda point: point.network)
    return {name: groups[name] for name in dict.fromkeys((*NETWORK_NAMES, *groups)) if name in groups}


def _lines(axes: Axes, points: Sequence[Result]) -> list[Line]:
    lines = []
    for series, members in grouped(points, lambda point: point.series).items():
        if axes.x == "step":
            lines += [_line(series, "curve", [(point, *step) for step in point.curve]) for point in members]
            continue
        are_levels = grouped(members, lambda p: p.x is None and (axes.x == "x" or p.series == axes.baseline))
        along_x = [(point, _x(axes, point), *_y(axes, point)) for point in are_levels.get(False, [])]
        shown = [place for place in along_x if place[1] > 0 or not axes.x_log]
        lines.append(_line(series, "points", sorted(shown, key=lambda place: place[1])))
        lines += [_line(series, "level", [(point, 0.0, *_y(axes, point))]) for point in are_levels.get(True, [])]
    return [line for line in lines if line.points]


def _line(series: str, kind: Kind, places: Iterable[Place]) -> Line:
    rows = [(point, x, y, _finite(sd)) for point, x, mean, sd in places if math.isfinite(y := or_nan(mean))]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    return Line(series, kind, *columns)


def _x(axes: Axes, point: Result) -> float:
    return float({"x": point.x, "parameters": point.parameters, "embedding_bytes": point.embedding_bytes}[axes.x] or 0)


def _y(axes: Axes, point: Result) -> tuple[float | None, float | None]:
    return (float(point.parameters), None) if axes.y == "parameters" else point.loss(axes.y)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def span(lines: Iterable[Line], *, log: bool) -> tuple[float, float]:
    """The least and greatest x with a margin; on a logarithmic axis only positive ones count."""
    every = [x for line in lines if line.kind != "level" for x in line.x if x > 0 or not log]
    low, high = (min(every), max(every)) if every else (1.0, 1.0)
    if log:
        room = (high / low) ** 0.04 if high > low else 2.0
        return low / room, high * room
    room = (high - low) * 0.04 or abs(low) * 0.1 or 0.5
    return low - room, high + room


def end_of(lines: Iterable[Line]) -> list[float] | None:
    """The range of the losses of curves after the first quarter of the training, with a margin; None without curves.

    Losses at the beginning are so much higher that the ends of the curves could not be told apart.
    """
    curves = [line for line in lines if line.kind == "curve" and len(line.x) > 2]
    if not curves:
        return None
    begin = 0.25 * max(line.x[-1] for line in curves)
    late = [(y - s, y + s) for c in curves for x, y, s in zip(c.x, c.y, c.deviation, strict=True) if x >= begin]
    low, high = min(low for low, _ in late), max(high for _, high in late)
    room = 0.06 * (high - low) or 0.01
    return [low - room, high + room]


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
        group = next((g for g in groups if coincide(g[0], line)), None)
        groups.append([line]) if group is None else group.append(line)
    names = [dict.fromkeys(line.series for line in group) for group in groups]
    return [" ≈ ".join(series) for series in names if len(series) > 1]

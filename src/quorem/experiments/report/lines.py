"""The lines of a figure with their coordinates, one panel for each network."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..figures import Axes, Figure, Result, grouped
from ..words import NETWORK_NAMES, or_nan


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line: the ``points`` of a series, the ``curve`` of one point, or a horizontal ``level`` without x.

    ``deviation`` has the deviation of each y; zero if there is none.
    """

    series: str
    kind: Literal["points", "curve", "level"]
    points: Sequence[Result]
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float]


def panels(figure: Figure) -> dict[str, list[Line]]:
    """The lines of each network; points without finite coordinates are left out."""
    return {network: _lines(figure.axes, points) for network, points in by_network(figure.points).items()}


def by_network(points: Iterable[Result]) -> dict[str, list[Result]]:
    """The points of each network: DCN before DLRM as in the paper, then others in the order of the points."""
    groups = grouped(points, lambda point: point.network)
    return {name: groups[name] for name in dict.fromkeys((*NETWORK_NAMES, *groups)) if name in groups}


def _lines(axes: Axes, points: Sequence[Result]) -> list[Line]:
    lines = []
    for series, members in grouped(points, lambda point: point.series).items():
        if axes.x == "step":
            lines += [_curve(point) for point in members if point.curve]
            continue
        members = [point for point in members if math.isfinite(_y(axes, point)[0])]
        levels = [point for point in members if _is_level(axes, point)]
        along_x = [p for p in members if not _is_level(axes, p) and (_x(axes, p) > 0 or not axes.x_log)]
        if along_x:
            lines.append(_line(axes, series, "points", sorted(along_x, key=lambda p: _x(axes, p))))
        lines += [_line(axes, series, "level", [point]) for point in levels]
    return lines


def _is_level(axes: Axes, point: Result) -> bool:
    return point.x is None and (axes.x == "x" or point.series == axes.baseline)


def _line(axes: Axes, series: str, kind: Literal["points", "level"], points: Sequence[Result]) -> Line:
    y, deviation = zip(*(_y(axes, point) for point in points), strict=True)
    x = [_x(axes, point) for point in points] if kind == "points" else []
    return Line(series=series, kind=kind, points=points, x=x, y=y, deviation=deviation)


def _curve(point: Result) -> Line:
    rows = [(step, mean, _finite(sd)) for step, loss, sd in point.curve if math.isfinite(mean := or_nan(loss))]
    x, y, deviation = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return Line(series=point.series, kind="curve", points=[point], x=x, y=y, deviation=deviation)


def _x(axes: Axes, point: Result) -> float:
    return float({"x": point.x, "parameters": point.parameters, "embedding_bytes": point.embedding_bytes}[axes.x] or 0)


def _y(axes: Axes, point: Result) -> tuple[float, float]:
    if axes.y == "parameters":
        return float(point.parameters), 0.0
    mean, deviation = point.loss(axes.y)
    return or_nan(mean), _finite(deviation)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def span(lines: Iterable[Line], *, log: bool, values: Literal["x", "y"] = "x", margin: float = 0.04) -> list[float]:
    """The least and greatest coordinate with a margin; on a logarithmic axis only positive ones count."""
    coordinates = [v for line in lines for v in (line.x if values == "x" else line.y) if v > 0 or not log]
    if not coordinates:
        return [0.5, 2.0] if log else [0.0, 1.0]
    low, high = min(coordinates), max(coordinates)
    if log:
        room = (high / low) ** margin if high > low else 2.0
        return [low / room, high * room]
    room = (high - low) * margin or abs(low) * 0.1 or 0.5
    return [low - room, high + room]


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

    Their distance is at most 0.4% of the height of the plot at every x.
    """
    low, high = span(lines, log=log, values="y")
    height = math.log(high / low) if log else high - low
    groups: list[list[Line]] = []
    for line in lines:
        group = next((g for g in groups if _distance(g[0], line, log) <= 0.004 * height), None)
        groups.append([line]) if group is None else group.append(line)
    names = [dict.fromkeys(line.series for line in group) for group in groups]
    return [" ≈ ".join(series) for series in names if len(series) > 1]


def _distance(one: Line, other: Line, log: bool) -> float:
    """The greatest distance of two lines in y; infinite if their kinds or x coordinates differ."""
    if one.kind != other.kind or list(one.x) != list(other.x):
        return math.inf
    pairs = zip(one.y, other.y, strict=True)
    return max((abs(math.log(a / b)) if log else abs(a - b) for a, b in pairs), default=math.inf)

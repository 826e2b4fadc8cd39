"""What a figure draws: one panel a network, each of lines with their coordinates, whatever then draws them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ..figures import Axes, Figure, Result
from ..words import NETWORKS, known

STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,))  # of a decade
MAX_TICKS = 7


@dataclass(frozen=True, kw_only=True)
class Line:
    """Numbers of one series: ``points`` with an x each, the ``curve`` of one point, or a ``level`` without x.

    ``spread`` is one standard deviation of each y; zero where there is none.
    """

    series: str
    kind: Literal["points", "curve", "level"]
    points: Sequence[Result]
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]


def panels(figure: Figure) -> dict[str, list[Line]]:
    """The lines of each network, DCN before DLRM as in the paper; points that have no place are left out."""
    axes = figure.axes
    return {
        network: _lines(axes, [point for point in figure.points if point.network == network])
        for network in networks(figure.points)
    }


def networks(points: Iterable[Result]) -> list[str]:
    """The networks of points: the paper's in its order, then others as they come."""
    found = dict.fromkeys(point.network for point in points)
    return [name for name in NETWORKS if name in found] + [name for name in found if name not in NETWORKS]


def _lines(axes: Axes, points: Sequence[Result]) -> list[Line]:
    lines = []
    for series in dict.fromkeys(point.series for point in points):
        members = [point for point in points if point.series == series]
        if axes.x == "step":
            lines += [_curve(point) for point in members if point.curve]
            continue
        members = [point for point in members if math.isfinite(_y(axes, point)[0])]
        levels = [point for point in members if _is_level(axes, point)]
        placed = sorted((point for point in members if not _is_level(axes, point)), key=lambda p: _x(axes, p))
        placed = [point for point in placed if not axes.x_log or _x(axes, point) > 0]
        if placed:
            lines.append(_line(axes, series, "points", placed))
        lines += [_line(axes, series, "level", [point]) for point in levels]
    return lines


def _is_level(axes: Axes, point: Result) -> bool:
    return point.x is None and (axes.x == "x" or point.series == axes.baseline)


def _line(axes: Axes, series: str, kind: Literal["points", "level"], points: Sequence[Result]) -> Line:
    y, spread = zip(*(_y(axes, point) for point in points), strict=True)
    x = [_x(axes, point) for point in points] if kind == "points" else []
    return Line(series=series, kind=kind, points=points, x=x, y=y, spread=spread)


def _curve(point: Result) -> Line:
    rows = [(known(step), mean, _finite(sd)) for step, loss, sd in point.curve if math.isfinite(mean := known(loss))]
    x, y, spread = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return Line(series=point.series, kind="curve", points=[point], x=x, y=y, spread=spread)


def _x(axes: Axes, point: Result) -> float:
    return float({"x": point.x, "parameters": point.parameters, "embedding_bytes": point.embedding_bytes}[axes.x] or 0)


def _y(axes: Axes, point: Result) -> tuple[float, float]:
    match axes.y:
        case "parameters":
            return float(point.parameters), 0.0
        case "validation":
            return known(point.validation_mean), _finite(point.validation_sd)
        case _:
            return known(point.test_mean), _finite(point.test_sd)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def span(lines: Iterable[Line], *, log: bool, values: Literal["x", "y"] = "x", margin: float = 0.04) -> list[float]:
    """The least and greatest coordinate with some room around; on a logarithmic axis positive ones count."""
    lines = list(lines)
    found = [v for line in lines for v in (line.x if values == "x" else line.y) if v > 0 or not log]
    if not found:
        return [0.5, 2.0] if log else [0.0, 1.0]
    low, high = min(found), max(found)
    if log:
        room = (high / low) ** margin if high > low else 2.0
        return [low / room, high * room]
    room = (high - low) * margin or abs(low) * 0.1 or 0.5
    return [low - room, high + room]


def ticks(lines: Sequence[Line], span: Sequence[float], *, log: bool, own: bool) -> list[float] | None:
    """Where a logarithmic axis has its marks, or any axis whose points share a few x of their own; None for any."""
    if own:
        found = sorted({x for line in lines if line.kind == "points" for x in line.x})
        if 0 < len(found) <= MAX_TICKS + 1 and (log or _even(found)):
            return found
    if not log:
        return None
    decades = range(math.floor(math.log10(span[0])), math.ceil(math.log10(span[1])) + 1)
    for steps in STEPS:
        marks = [s * 10.0**k for k in decades for s in steps if span[0] <= s * 10.0**k <= span[1]]
        if len(marks) <= MAX_TICKS:
            break
    return marks if len(marks) > 1 else None


def _even(found: Sequence[float]) -> bool:
    """Whether marks at these places are far enough apart to be read."""
    gaps = [b - a for a, b in pairwise(found)]
    return not gaps or min(gaps) > (found[-1] - found[0]) / 12

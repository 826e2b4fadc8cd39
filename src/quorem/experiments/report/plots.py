"""The page's plots, by plotly: one plot for each panel, so that panels can be side by side or below each other.

A trace names its series in ``meta``; the page colours it by the theme, and hides it with the legend.
"""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from .. import words
from ..figures import Axes, Figure, Result, grouped
from .lines import Line, Scale, by_network, end_of, line_of, panels, span, tick_texts, ticks, x_scale, y_scale
from .styles import Style
from .tradeoff import front

LEVEL_POINTS = 40  # points of a level, so that hovering works anywhere on it


def figure_plots(figure: Figure, looks: Mapping[str, Style]) -> dict[str, str]:
    """A plot for each network, as plotly's JSON."""
    axes, lines_by_network = figure.axes, panels(figure)
    x = x_scale(axes, [line for lines in lines_by_network.values() for line in lines])
    result = {}
    for name, lines in lines_by_network.items():
        plot = _empty(axes.x_label, axes.y_label)
        _scale(plot.layout.xaxis, x)
        if y := y_scale(axes, lines):
            _scale(plot.layout.yaxis, y)
        else:
            _digits(plot.layout.yaxis, lines)
            if end := end_of(lines):
                plot.layout.yaxis.update(range=end)
        for line in lines:
            plot.add_traces(_traces(line, axes, looks[line.series], x))
        result[name] = _json(plot)
    return result


def tradeoff_plots(points: Sequence[Result], looks: Mapping[str, Style]) -> dict[str, str]:
    """Plots of test loss against the bytes of the tables, for each network, with the points that no other beats."""
    result = {}
    lines = _clouds(points)
    reach = span(lines, log=True)
    x = Scale(reach, ticks(lines, reach, log=True, at_points=False), log=True, unit="B")
    for name, members in by_network(points).items():
        plot = _empty("embedding tables", "test log loss")
        _scale(plot.layout.xaxis, x)
        best, clouds = front(members), _clouds(members)
        _digits(plot.layout.yaxis, clouds)
        plot.add_trace(
            go.Scatter(
                x=[*(p.embedding_bytes for p in best), reach[1]],
                y=[*(p.test_mean for p in best), best[-1].test_mean],
                mode="lines",
                line={"shape": "hv", "width": 6},
                opacity=0.35,
                hoverinfo="skip",
                meta={"role": "front"},
            )
        )
        axes = Axes(name="tradeoff", title="", x_label="")
        for line in clouds:
            trace = _points(line, looks[line.series], [hover(p, axes) for p in line.points])
            plot.add_trace(trace.update(mode="markers"))
        result[name] = _json(plot)
    return result


def _clouds(points: Sequence[Result]) -> list[Line]:
    """The points of each series, by the bytes of their tables."""
    axes = Axes(name="tradeoff", title="", x="embedding_bytes", x_label="")
    series = grouped(points, lambda point: point.series)
    return [line_of(axes, name, "points", members) for name, members in series.items()]


def hover(point: Result, axes: Axes, detail: str = "") -> str:
    """The hover text of a point, in plotly's HTML; all text from files is escaped."""
    where = axes.x == "x" and point.x is not None
    losses = [
        f"test log loss {words.mean_text(point.test_mean, point.test_sd, point.trials)}",
        f"validation log loss {words.mean_text(point.validation_mean, point.validation_sd, point.trials)}",
        f"trials {point.trials}" + (f", {point.missing} missing" if point.missing else ""),
    ]
    rows = [
        f"<b>{escape(point.series)}</b> · {escape(words.network(point.network))}",
        *map(escape, words.settings(point)),
        *([f"{escape(axes.x_label)} {point.x:g}"] if where else []),
        *([detail] if detail else []),
        *(losses if point.trials else ["not trained: parameters only"]),
        f"model {words.count(point.parameters)} parameters, {words.size(point.bytes)}",
        f"tables {words.count(point.embedding_parameters)} parameters, {words.size(point.embedding_bytes)}",
    ]
    return "<br>".join(rows)


def _traces(line: Line, axes: Axes, look: Style, scale: Scale) -> list[go.Scatter]:
    if line.kind == "points":
        return [_points(line, look, [hover(point, axes) for point in line.points])]
    point = line.points[0]
    if line.kind == "curve":
        x, y, deviation = list(line.x), list(line.y), list(line.deviation)
        texts = [
            hover(point, axes, f"step {step:,.0f}, {escape(axes.y_label)} {words.mean_text(mean, sd, point.trials)}")
            for step, mean, sd in zip(x, y, deviation, strict=True)
        ]
    else:
        x = _between(scale)
        y, deviation, texts = list(line.y) * len(x), list(line.deviation) * len(x), [hover(point, axes)] * len(x)
    dash = "dash" if line.kind == "level" else "solid"
    meta = {"role": "line", "series": line.series}
    drawn = go.Scatter(
        x=x, y=y, mode="lines", line={"dash": dash, "width": 2}, hovertext=texts, hoverinfo="text", meta=meta
    )
    if not any(deviation):
        return [drawn]
    upper = [mean + sd for mean, sd in zip(y, deviation, strict=True)]
    lower = [mean - sd for mean, sd in zip(y, deviation, strict=True)]
    band = go.Scatter(
        x=[*x, *reversed(x)],
        y=[*upper, *reversed(lower)],
        mode="lines",
        line={"width": 0},
        fill="toself",
        hoverinfo="skip",
        meta={**meta, "role": "band"},
    )
    return [band, drawn]


def _points(line: Line, look: Style, texts: Sequence[str]) -> go.Scatter:
    size = 11 if look.symbol == "star" else 9
    return go.Scatter(
        x=list(line.x),
        y=list(line.y),
        error_y={"array": list(line.deviation), "thickness": 1.2, "width": 3} if any(line.deviation) else None,
        mode="lines+markers",
        line={"width": 1.6},
        marker={"symbol": look.symbol, "size": size},
        hovertext=texts,
        hoverinfo="text",
        meta={"role": "line", "series": line.series},
    )


def _between(scale: Scale) -> list[float]:
    """Evenly spaced values along an axis."""
    low, high = map(math.log, scale.reach) if scale.log else scale.reach
    points = [low + (high - low) * k / (LEVEL_POINTS - 1) for k in range(LEVEL_POINTS)]
    return [math.exp(x) for x in points] if scale.log else points


def _empty(x_label: str, y_label: str) -> go.Figure:
    axis = {"automargin": True, "showline": True, "zeroline": False, "ticks": "outside", "ticklen": 4}
    return go.Figure(
        layout={
            "template": "none",
            "showlegend": False,
            "hovermode": "closest",
            "hoverlabel": {"align": "left"},
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "xaxis": {**axis, "title": {"text": escape(x_label), "standoff": 12}},
            "yaxis": {**axis, "title": {"text": escape(y_label), "standoff": 10}, "nticks": 7},
        }
    )


def _scale(axis: Any, scale: Scale) -> None:
    """Set the range, the kind and the marks of an axis; a logarithmic range is given in powers of ten."""
    axis.update(range=[math.log10(v) for v in scale.reach] if scale.log else list(scale.reach))
    if scale.log:
        axis.update(type="log")
    if scale.marks is not None:
        axis.update(tickmode="array", tickvals=list(scale.marks), ticktext=tick_texts(scale.marks, scale.unit))


def _digits(axis: Any, lines: Sequence[Line]) -> None:
    """Show as many decimals as are needed to see how the losses differ."""
    low, high = span(lines, log=False, values="y")
    axis.update(tickformat=f".{min(max(2, 1 - math.floor(math.log10(high - low))), 6)}f")


def _json(plot: go.Figure) -> str:
    content = json.loads(plot.to_json())
    content["layout"].pop("template", None)
    return json.dumps(content)

"""Charts by matplotlib: as PNG and PDF, and as SVG within the page, which colours them by its theme.

Means have bars or bands of one standard deviation. Each network has a panel of its own. A series has one style in
every figure: a mark, and a colour that colour-blind readers can tell apart. The colours are those of Okabe and Ito,
darkened for a light background and lightened for a dark one until each has a contrast of three to one.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from ...files.atomic import replacing
from ...planner.budget import show_bytes
from .. import words
from ..figures import Axes, Figure
from .lines import Line, Panel, Place, panels
from .tradeoff import front

PANEL = (4.0, 3.1)  # inches
TEXT, EDGE, GRID, FRONT = "#5b6573", "#dedad1", "#ebe8e1", "#8d95a1"  # on a light background
DARK = {TEXT: "#9ba6b4", EDGE: "#303844", GRID: "#272e38", FRONT: "#77818f"}
TRADEOFF = Axes(name="tradeoff", title="", x="embedding_bytes", x_label="embedding tables", x_log=True)


@dataclass(frozen=True)
class Style:
    """Colours on light and dark background, and the mark: matplotlib's name, and a character."""

    light: str
    dark: str
    marker: str
    glyph: str


FIXED = {
    "full": Style("#2b2f36", "#e8eaee", "o", "●"),
    "hash": Style("#c85000", "#f58a4b", "s", "■"),
    "feature": Style("#00845f", "#2fc49b", "^", "▲"),
    "concat": Style("#2f93cf", "#7cc8f5", "D", "◆"),
    "add": Style("#ad7a00", "#f2bd45", "v", "▼"),
    "mult": Style("#00589c", "#4b9cf0", "*", "★"),
    "path": Style("#b4508a", "#e28fbd", "p", "⬟"),
}
OTHERS = (
    Style("#6a51c7", "#ab98f5", "h", "⬢"),
    Style("#8a5a3c", "#cf9f7f", "P", "✚"),
    Style("#5f7a00", "#b3cc52", "X", "✖"),
    Style("#a3344b", "#f28b9d", "<", "◀"),
    Style("#007f8a", "#4fc7d1", ">", "▶"),
    Style("#7a7a7a", "#a9b0ba", "d", "✦"),
    Style("#d0358f", "#ff8fd0", "H", "✶"),
    Style("#3f7d20", "#8fdc6a", "8", "◥"),
)


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name: the paper's operations come first and have fixed styles; others use the rest in turn."""
    wanted = dict.fromkeys(names)
    fixed = {name: style for name, style in FIXED.items() if name in wanted}
    free = cycle([*OTHERS, *(style for name, style in FIXED.items() if name not in wanted)])
    return fixed | {name: next(free) for name in wanted if name not in FIXED}


def draw(figure: Figure, out_stem: Path) -> None:
    """Write ``<out_stem>.png`` and ``<out_stem>.pdf``, each completely or not at all.

    The PDF's fonts are TrueType (type 42), as publishers require.
    """
    out_stem.parent.mkdir(parents=True, exist_ok=True)
    canvas = drawing(figure)
    # The same numbers give the same files, so dates and versions are left out.
    with replacing(f"{out_stem}.png") as file:
        canvas.savefig(file, format="png", dpi=160, metadata={"Software": None})
    unsaid = {"CreationDate": None, "Creator": None, "Producer": None}
    with replacing(f"{out_stem}.pdf") as file, rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):
        canvas.savefig(file, format="pdf", metadata=unsaid)


def drawing(figure: Figure) -> Canvas:
    """All panels of a figure, which has points, side by side with one legend."""
    of_network = panels(figure)
    looks = styles(point.series for point in figure.points)
    canvas, width = _canvas(len(of_network)), PANEL[0] * len(of_network)
    handles: dict[str, Any] = {}
    grid = canvas.subplots(1, len(of_network), squeeze=False)[0]
    for plot, (network, panel) in zip(grid, of_network.items(), strict=True):
        handles |= _fill(plot, figure.axes, panel, looks)
        plot.set_title(_plain(words.network(network)), fontsize=11)
    if figure.axes.y != "parameters":
        trained = "; ".join(map(str, figure.conditions()))
        canvas.suptitle(f"trained on {trained}", fontsize=9, color=TEXT)
    if handles:
        columns = max(1, min(len(handles), int(width / (0.7 + 0.085 * max(map(len, handles))))))
        names = [_plain(name) for name in handles]
        canvas.legend(handles.values(), names, loc="outside lower center", ncols=columns, frameon=False)
    return canvas


def figure_svgs(figure: Figure, looks: Mapping[str, Style], *, whole: bool = False) -> dict[str, str]:
    """An SVG for each network; ``whole`` shows all of a training instead of its end.

    The trade-off has no lines between its points, but a broad one through those that no other beats.
    """
    return {name: _svg(figure.axes, panel, looks) for name, panel in panels(figure, whole=whole).items()}


def _canvas(num_panels: int) -> Canvas:
    size = (PANEL[0] * num_panels, PANEL[1] + 0.5 * (num_panels > 1))
    return Canvas(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))


def _fill(plot: Any, axes: Axes, panel: Panel, looks: Mapping[str, Style]) -> dict[str, Any]:
    """Draw one panel; returns a handle for each series."""
    handles: dict[str, Any] = {}
    numbers = {name: number for number, name in enumerate(looks)}
    for line in panel.lines:
        handle = _draw(plot, panel, line, looks[line.series], numbers[line.series], axes is not TRADEOFF)
        handles.setdefault(line.series, handle)
    plot.set(xscale="log" if axes.x_log else "linear", xlim=panel.x_range, yscale="log" if axes.y_log else "linear")
    plot.set_ylim(panel.end or ((0, None) if axes.y == "parameters" and not axes.y_log else None))
    unit, marks = "B" if axes.x == "embedding_bytes" else "", panel.marks if axes.x == "x" else []
    _ticks(plot.xaxis, unit=unit, marks=marks, log=axes.x_log)
    if axes.y == "parameters" or axes.y_log:
        _ticks(plot.yaxis, log=axes.y_log)
    else:
        plot.ticklabel_format(axis="y", useOffset=False)
    plot.set_xlabel(_plain(axes.x_label), color=TEXT)
    plot.set_ylabel(_plain(axes.y_label), color=TEXT)
    plot.tick_params(colors=TEXT, labelsize=8.5)
    plot.grid(color=GRID, lw=0.8)
    plot.set_axisbelow(True)
    plot.spines[:].set_color(EDGE)
    plot.spines[["top", "right"]].set_visible(False)
    return handles


def _draw(plot: Any, panel: Panel, line: Line, look: Style, number: int, joined: bool) -> Any:
    """Draw one line, and return its handle for the legend. The page finds what belongs to a series by its gid."""
    low = [place.y - place.deviation for place in line.places]
    high = [place.y + place.deviation for place in line.places]
    own, dots = {"color": look.light, "gid": f"series:{number}"}, {"color": look.light, "gid": f"points:{number}"}
    spread = any(place.deviation for place in line.places)
    if line.kind == "level":
        if spread:
            plot.axhspan(low[0], high[0], alpha=0.15, lw=0, **own)
        return plot.axhline(line.y[0], ls="--", lw=1.4, **own)
    if line.kind == "curve":
        if spread:
            plot.fill_between(line.x, low, high, alpha=0.18, lw=0, **own)
        shown = panel.shown(line)
        plot.plot([place.x for place in shown], [place.y for place in shown], lw=0, marker="o", ms=2.5, **dots)
        return plot.plot(line.x, line.y, lw=1.5, **own)[0]
    if spread:
        plot.vlines(line.x, low, high, lw=1, **own)
    mark = {"marker": look.marker, "ms": 8 if look.marker == "*" else 5, "lw": 1.3 if joined else 0}
    return plot.plot(line.x, line.y, **mark, **dots)[0]


def _ticks(axis: Any, *, unit: str = "", marks: Sequence[float] = (), log: bool = False) -> None:
    """Marks at the points if these are few, else at round numbers; large ones as "2 M" or, of bytes, "2 MB"."""
    low, high = sorted(axis.get_view_interval())
    gaps = [b - a for a, b in pairwise(marks)]
    if 0 < len(marks) < 9 and (log or not gaps or min(gaps) > (marks[-1] - marks[0]) / 12):
        axis.set_major_locator(FixedLocator(marks))
    elif log and high > 8 * low:
        axis.set_major_locator(LogLocator(subs=(1, 3) if high < 3000 * low else (1,)))
    else:
        axis.set_major_locator(MaxNLocator(4 if log else 6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(unit) if unit or high >= 1e4 else StrMethodFormatter("{x:,.6g}"))


def _svg(axes: Axes, panel: Panel, looks: Mapping[str, Style]) -> str:
    """One panel as SVG: colours are variables, a group has its series, and a point the text that the page shows."""
    canvas, file = _canvas(1), io.StringIO()
    plot = canvas.subplots()
    _fill(plot, axes, panel, looks)
    if axes is TRADEOFF:
        best = front(place.point for line in panel.lines for place in line.places)
        x = [*(point.embedding_bytes for point in best), panel.x_range[1]]
        y = [point.loss for point in (*best, best[-1])]
        plot.step(x, y, where="post", lw=5, color=FRONT, alpha=0.35, zorder=1)
    salt = repr((axes, panel))  # several SVGs in one page must not share ids
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        canvas.savefig(file, format="svg", transparent=True, metadata=nothing)
    texts: dict[str, list[str]] = {name: [] for name in looks}
    for line in panel.lines:
        if line.kind != "level":
            texts[line.series] += [about(place, axes) for place in panel.shown(line)]
    return _themed(file.getvalue(), [iter(own) for own in texts.values()])


def about(place: Place, axes: Axes) -> str:
    """What the page shows about a point, or about a step of its curve, in lines."""
    point = place.point
    threshold = point.config.get("threshold")
    step = f"step {place.x:,.0f}, {axes.y_label} {words.mean_text(place.y, place.deviation, point.trials)}"
    losses = [
        f"test log loss {words.mean_text(point.test_mean, point.test_sd, point.trials)}",
        f"validation log loss {words.mean_text(point.validation_mean, point.validation_sd, point.trials)}",
        f"trials {point.trials}" + (f", {point.missing} missing" if point.missing else ""),
    ]
    rows = [
        f"{point.series} · {words.network(point.network)}",
        f"scheme {words.scheme(point.config)}",
        *([f"threshold {threshold:,}"] if isinstance(threshold, int) else []),
        *([f"optimizer {words.optimizer(point.optimizer)}"] if point.optimizer else []),
        *([f"{axes.x_label} {point.x:g}"] if axes.x == "x" and point.x is not None else []),
        *([step] if axes.x == "step" else []),
        *(losses if point.trials else ["not trained: parameters only"]),
        f"model {words.count(point.parameters)} parameters, {show_bytes(point.bytes)}",
        f"tables {words.count(point.embedding_parameters)} parameters, {show_bytes(point.embedding_bytes)}",
    ]
    return "\n".join(rows)


def variable(colour: str) -> str:
    """The page's variable for a colour of a light background."""
    return f"--c{colour[1:]}"


def _themed(svg: str, texts: Sequence[Iterator[str]]) -> str:
    """The SVG as an element of the page: colours are variables, groups have their series, and points their texts."""
    about: Iterator[str] = iter(())  # texts of the points of the group that is being read

    def labelled(match: re.Match[str]) -> str:
        nonlocal about
        if match["kind"]:
            about = texts[int(match["number"])] if match["kind"] == "points" else iter(())
            return f' data-series="{match["number"]}"'
        text = next(about, None)
        return "<use" if text is None else '<use data-about="' + escape(text).replace("\n", "&#10;") + '"'

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda colour: f"var({variable(colour[0])})", svg)
    svg = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg)  # matplotlib's own names, to which nothing refers
    return re.sub(r' id="(?P<kind>series|points):(?P<number>\d+)"|<use', labelled, svg)


def _plain(text: str) -> str:
    """The text with dollar signs escaped, which would start a formula."""
    return text.replace("$", r"\$")

"""Figures in the style of the paper, by matplotlib: a panel for each network, means and one standard deviation."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from ...files import replacing, write
from .. import words
from ..conditions import all_conditions
from ..figures import Axes, Figure
from .lines import Line, Scale, coinciding, end_of, panels, tick_texts, x_scale, y_scale
from .styles import Style, styles
from .tables import hidden_layers

PANEL = (4.6, 3.5)  # inches


def draw(figure: Figure, out_stem: Path) -> None:
    """Write ``<out_stem>.png`` and ``<out_stem>.pdf``; for table 1 also ``<out_stem>.md``.

    Each file is written completely or not at all. The PDF's fonts are TrueType (type 42), as publishers require.

    Raises:
        ValueError: if the figure has no points.
    """
    out_stem.parent.mkdir(parents=True, exist_ok=True)
    canvas = drawing(figure)
    # The same numbers give the same files, so dates and versions are left out.
    with replacing(f"{out_stem}.png") as file:
        canvas.savefig(file, format="png", dpi=160, metadata={"Software": None})
    unsaid = {"CreationDate": None, "Creator": None, "Producer": None}
    with (
        replacing(f"{out_stem}.pdf") as file,
        rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}),
    ):  # matplotlib 3.11 needs both
        canvas.savefig(file, format="pdf", metadata=unsaid)
    if figure.axes.name == "table1":
        write(Path(f"{out_stem}.md"), "\n".join(words.table(hidden_layers(figure))) + "\n")


def drawing(figure: Figure) -> Canvas:
    """The matplotlib figure, with axes for each network.

    Raises:
        ValueError: if the figure has no points.
    """
    if not figure.points:
        raise ValueError(f"figure ({figure.axes.name!r}) must have points to be drawn")
    axes, lines_by_network = figure.axes, panels(figure)
    looks = styles(point.series for point in figure.points)
    x = x_scale(axes, [line for lines in lines_by_network.values() for line in lines])
    width = PANEL[0] * len(lines_by_network)
    canvas = Canvas(figsize=(width, PANEL[1] + 0.4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06))
    FigureCanvasAgg(canvas)
    handles: dict[str, Any] = {}
    for panel, (network, lines) in zip(
        canvas.subplots(1, len(lines_by_network), squeeze=False)[0], lines_by_network.items(), strict=True
    ):
        for line in lines:
            handles.setdefault(line.series, _line(panel, line, looks[line.series]))
        _frame(panel, axes, network, lines)
        _scale(panel, "x", x)
        if same := coinciding(lines, log=axes.y_log):
            panel.annotate(
                _plain("; ".join(same)), (1, 1), xycoords="axes fraction", ha="right", va="bottom", fontsize=8
            )
    if axes.y != "parameters":
        trained = "; ".join(conditions.text() for conditions in all_conditions(figure))
        canvas.suptitle(f"trained on {trained}", fontsize=9, color="0.35")
    if handles:
        canvas.legend(
            handles.values(),
            [_plain(name) for name in handles],
            loc="outside lower center",
            ncols=max(1, min(len(handles), int(width / (0.7 + 0.085 * max(map(len, handles)))))),
            frameon=False,
        )
    return canvas


def _line(panel: Any, line: Line, look: Style) -> Any:
    """Draw one line, and return its handle for the legend."""
    mark = {"marker": look.marker, "ms": 8 if look.marker == "*" else 5}
    if line.kind == "points":
        bars = list(line.deviation) if any(line.deviation) else None
        drawn = panel.errorbar(line.x, line.y, yerr=bars, color=look.light, capsize=2.5, lw=1.3, elinewidth=1, **mark)
        return drawn
    if line.kind == "level":
        drawn = panel.axhline(line.y[0], color=look.light, ls="--", lw=1.4)
        if line.deviation[0]:
            panel.axhspan(
                line.y[0] - line.deviation[0], line.y[0] + line.deviation[0], color=look.light, alpha=0.15, lw=0
            )
        return drawn
    (drawn,) = panel.plot(line.x, line.y, color=look.light, lw=1.5)
    if any(line.deviation):
        low = [y - s for y, s in zip(line.y, line.deviation, strict=True)]
        high = [y + s for y, s in zip(line.y, line.deviation, strict=True)]
        panel.fill_between(line.x, low, high, color=look.light, alpha=0.2, lw=0)
    return drawn


def _frame(panel: Any, axes: Axes, network: str, lines: list[Line]) -> None:
    panel.set_title(_plain(words.network(network)), fontsize=11)
    panel.set_xlabel(_plain(axes.x_label))
    panel.set_ylabel(_plain(axes.y_label))
    if y := y_scale(axes, lines):
        _scale(panel, "y", y)
    else:
        panel.ticklabel_format(axis="y", useOffset=False)
        if end := end_of(lines):
            panel.set_ylim(*end)
    panel.grid(alpha=0.25, lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _scale(panel: Any, name: str, scale: Scale) -> None:
    """Set the range, the kind and the marks of the axis ``name``."""
    panel.set(**{f"{name}scale": "log" if scale.log else "linear", f"{name}lim": scale.reach})
    if scale.marks is not None:
        axis = getattr(panel, f"{name}axis")
        axis.set_major_locator(FixedLocator(scale.marks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FixedFormatter(tick_texts(scale.marks, scale.unit)))


def _plain(text: str) -> str:
    """The text with dollar signs escaped, which would start a formula."""
    return text.replace("$", r"\$")

"""The sentences about a figure on the page: the paper's claim, the best result here, and what the plot hides."""

import math
from collections.abc import Sequence
from html import escape

from .. import words
from ..conditions import all_conditions
from ..figures import Figure, Result, grouped
from .lines import by_network, coinciding, panels
from .tradeoff import is_clear, is_full

TRAINED_IN_THE_PAPER = ("figure4", "figure5", "figure6", "table1")
PAPER_ROWS = "The paper trained on one epoch of 39.3 million rows."


def varies(figures: Sequence[Figure]) -> bool:
    """Whether the runs of the figures were trained under different conditions, so that no best can be named."""
    return len({conditions for figure in figures for conditions in all_conditions(figure)}) > 1


def claim(figure: Figure) -> str:
    """What the paper says, and the number of rows it trained on; empty for a figure that is not in the paper."""
    if not figure.axes.paper:
        return ""
    rows = "" if figure.axes.y == "parameters" or figure.axes.name not in TRAINED_IN_THE_PAPER else f" {PAPER_ROWS}"
    return f'<div class="claim"><h4>The paper</h4><p>{escape(figure.axes.paper + rows)}</p></div>'


def measured(figure: Figure) -> str:
    """The best result of each network in a sentence, to be shown beside the paper's claim."""
    if figure.axes.y == "parameters" or varies([figure]):
        return ""
    rows = []
    for network, members in by_network(figure.points).items():
        if points := [p for p in members if math.isfinite(words.or_nan(p.test_mean))]:
            rows.append(f"<li><strong>{escape(words.network(network))}</strong>: {escape(_best(figure, points))}</li>")
    return f'<div class="measured"><h4>Here, the best</h4><ul>{"".join(rows)}</ul></div>' if rows else ""


def _best(figure: Figure, points: Sequence[Result]) -> str:
    """The best point of one network, those that tie with it, and its difference from the full tables."""
    axes, full = figure.axes, next((p for p in points if is_full(p)), None)
    ranked = sorted((p for p in points if not is_full(p)), key=lambda p: words.or_nan(p.test_mean)) or points[:1]
    best = ranked[0]
    where = f" at {axes.x_label} {best.x:,.6g}" if axes.x == "x" and best.x is not None else ""
    where = where or (f" at {words.count(best.parameters)} parameters" if axes.x == "parameters" else "")
    text = f"{best.series}{where}, test {words.mean_text(best.test_mean, best.test_sd, best.trials)}"
    if full is not None and best is not full and full.test_mean:
        change = words.or_nan(best.test_mean) / full.test_mean - 1
        tie = ", a tie" if is_clear(best, full) is False else ""
        text += f", {abs(change):.2%} {'above' if change >= 0 else 'below'} full tables{tie}"
    series = grouped(ranked, lambda point: point.series)
    clear = {name: is_clear(best, points[0]) for name, points in series.items() if name != best.series}
    if ties := [name for name, is_better in clear.items() if is_better is False]:
        text += f"; ties with {', '.join(ties)}"
    if clear and set(clear.values()) == {None}:
        text += "; one trial, so whether it is a tie is not known"
    return text


def notes(figure: Figure) -> str:
    """What the plot does not show: lines on top of each other, and missing trials or points."""
    return _coinciding(figure) + _missing(figure)


def _coinciding(figure: Figure) -> str:
    texts: dict[str, list[str]] = {}
    for network, lines in panels(figure).items():
        for text in coinciding(lines, log=figure.axes.y_log):
            texts.setdefault(text, []).append(words.network(network))
    if not texts:
        return ""
    listed = "; ".join(f"{text} ({' and '.join(names)})" for text, names in texts.items())
    return f'<p class="note same">Drawn on top of each other: {escape(listed)}.</p>'


def _missing(figure: Figure) -> str:
    missing, failed = sum(p.missing for p in figure.points), sum(p.failed for p in figure.points)
    undrawn = len(figure.points) - sum(len(line.points) for lines in panels(figure).values() for line in lines)
    texts = []
    if missing:
        every = missing + sum(map(words.finished, figure.points))
        texts.append(
            f"{missing:,} of {every:,} trials are missing" + (f", {failed:,} of them failed" if failed else "")
        )
    if undrawn:
        short = ", since they trained for fewer steps than one mean of the loss takes" * (figure.axes.x == "step")
        texts.append(f"{undrawn:,} of {len(figure.points):,} points have nothing to draw{short}")
    return f'<p class="note">{"; ".join(texts)}.</p>' if texts else ""

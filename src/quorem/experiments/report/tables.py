"""The page's tables: the paper's table 1 with our numbers, the best method at each size, and all points."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .. import words
from ..figures import Figure, Result
from ..table1 import LOSSES
from .lines import by_network
from .styles import Style
from .tradeoff import Win, is_clear

BEST = "**"  # put around a number that is the best of its row


WIN_COLUMNS = ("tables of", "best", "test log loss", "next best", "difference", "more than the deviations?")
BELOW = ("deviation", "threshold", "AUC", "validation log loss")  # columns of points that are in the line below each
POINT_COLUMNS = (
    *("figure", "data", "rows", "network", "series", "x", "test log loss", "tables", "parameters", "optimizer"),
    *("trials", *BELOW),
)
TEXT_COLUMNS = (  # the others have numbers
    *("figure", "data", "network", "series", "optimizer", "hidden layer"),
    *("tables of", "best", "next best", "more than the deviations?"),
)


class PointRow(NamedTuple):
    """A point in the table of all points: names of its figure and section, and the rows that it was trained on."""

    figure: str
    data: str
    rows: int | None
    point: Result


def hidden_layers(figure: Figure) -> list[list[str]]:
    """Table 1: for each network a row each for parameters, our test loss and the paper's; the first row is the head.

    The best of a row, and numbers that tie with it, are between pairs of asterisks.
    """
    widths = sorted({point.x for point in figure.points if point.x is not None})
    rows = [["network", "hidden layer", *(f"{width:,.6g}" for width in widths)]]
    for network, members in by_network(figure.points).items():
        points = {point.x: point for point in members}
        results = [points.get(width) for width in widths]
        name = words.network(network)
        rows.append([name, "parameters", *(f"{p.parameters:,}" if p else words.NONE for p in results)])
        trained = [p for p in results if p and math.isfinite(words.or_nan(p.test_mean))]
        best = min(trained, key=lambda p: words.or_nan(p.test_mean), default=None)
        rows.append([name, "test log loss", *(_loss(p, best) for p in results)])
        printed = [LOSSES.get(network, {}).get(int(width), math.nan) for width in widths]
        if any(map(math.isfinite, printed)):
            least = min(filter(math.isfinite, printed))
            texts = [f"{BEST}{words.loss(v)}{BEST}" if v == least else words.loss(v) for v in printed]
            rows.append([name, "the paper's, 39.3 M rows", *texts])
    return rows


def _loss(point: Result | None, best: Result | None) -> str:
    """A test loss, between asterisks if it is the best or ties with it."""
    if point is None or best is None:
        return words.NONE
    text = words.mean_text(point.test_mean, point.test_sd, point.trials)
    return f"{BEST}{text}{BEST}" if point is best or is_clear(best, point) is False else text


def hidden_layers_html(figure: Figure) -> str:
    """Table 1 in HTML; the best of a row is bold."""
    head, *body = hidden_layers(figure)
    rows = [f"<tr>{_cells(head, [_bold(text) for text in row], row_heads=2)}</tr>" for row in body]
    return _table(_heads(head), f"<tbody>{''.join(rows)}</tbody>")


def _bold(text: str) -> str:
    if text.startswith(BEST):
        return f"<strong>{escape(text.removeprefix(BEST).removesuffix(BEST))}</strong>"
    return escape(text)


def _kind(column: str) -> str:
    return "text" if column in TEXT_COLUMNS else "number"


def _heads(columns: Sequence[str]) -> str:
    return "".join(f'<th scope="col" class="{_kind(name)}">{escape(name)}</th>' for name in columns)


def _cells(columns: Sequence[str], texts: Sequence[str], *, row_heads: int = 0) -> str:
    """The cells of a row, the first of which are heads; the texts are HTML."""
    cells = [f'<th scope="row" class="text">{text}</th>' for text in texts[:row_heads]]
    for name, text in zip(columns[row_heads:], texts[row_heads:], strict=True):
        cells.append(f'<td class="{_kind(name)}" data-label="{escape(name)}">{text}</td>')
    return "".join(cells)


def _table(heads: str, body: str, attributes: str = 'class="cards"') -> str:
    return f'<div class="box"><table {attributes}><thead><tr>{heads}</tr></thead>{body}</table></div>'


def winners_html(wins: Mapping[str, Sequence[Win]], looks: Mapping[str, Style]) -> str:
    """A table of the best method at each size, for each network."""
    parts = []
    for network, winners in wins.items():
        name = escape(words.network(network))
        parts.append(f'<tbody><tr class="group"><th scope="rowgroup" colspan="{len(WIN_COLUMNS)}">{name}</th></tr>')
        for win in winners:
            texts = (
                _about(win),
                swatch(win.best.series, looks),
                words.mean_text(win.best.test_mean, win.best.test_sd, win.best.trials),
                swatch(win.second.series, looks) if win.second else words.NONE,
                words.loss(win.difference),
                _verdict(win),
            )
            parts.append(f'<tr class="win">{_cells(WIN_COLUMNS, texts, row_heads=1)}</tr>')
        parts.append("</tbody>")
    return _table(_heads(WIN_COLUMNS), "".join(parts))


def _about(win: Win) -> str:
    low, high = words.size(win.low), words.size(win.high)
    share = f"1/{2**-win.power:,}" if win.power < 0 else f"{2**win.power:,}x" if win.power > 0 else "full"
    sizes = low if low == high else f"{low} to {high}"
    return f'{sizes} <span class="quiet">{share}</span>'


def _verdict(win: Win) -> str:
    if win.second is None:
        return '<span class="quiet">no other method</span>'
    if win.clear is None:
        return '<span class="quiet">not known: one trial</span>'
    return "yes" if win.clear else '<span class="quiet">no, a tie</span>'


def swatch(series: str, looks: Mapping[str, Style]) -> str:
    """The mark of a series in its colour, and its name."""
    glyph = looks[series].glyph
    mark = f'<span class="mark s{list(looks).index(series)}" aria-hidden="true">{glyph}</span>'
    return f"<span>{mark} {escape(series)}</span>"


def points_columns(rows: Sequence[PointRow], *, several_data: bool) -> list[str]:
    """The columns of the table of all points, without those that are the same in every row."""
    alike = {"data": not several_data, "rows": len({row.rows for row in rows}) < 2}
    return [name for name in POINT_COLUMNS if not alike.get(name, False)]


def points_html(rows: Sequence[PointRow], columns: Sequence[str], looks: Mapping[str, Style]) -> str:
    """The table of all points, each with its command and configuration."""
    heads = "".join(
        f'<th scope="col" class="{_kind(name)}" aria-sort="none" data-key="{key}">'
        f'<button type="button">{escape(name)}<span class="arrow" aria-hidden="true"></span></button></th>'
        for key, name in enumerate(columns)
        if name not in BELOW
    )
    return _table(heads, "".join(_point(row, columns, looks) for row in rows), 'id="points" class="cards"')


def _point(row: PointRow, columns: Sequence[str], looks: Mapping[str, Style]) -> str:
    figure, data, trained, point = row
    threshold = point.config.get("threshold")
    threshold = threshold if isinstance(threshold, int) else None
    values: dict[str, tuple[str, str | float | None]] = {  # the text to show, and the value to sort by
        "figure": (escape(figure), figure),
        "data": (escape(data), data),
        "rows": (_count(trained), trained),
        "network": (escape(words.network(point.network)), point.network),
        "series": (swatch(point.series, looks), point.series),
        "x": (words.NONE if point.x is None else f"{point.x:,.6g}", point.x),
        "test log loss": (words.mean_text(point.test_mean, point.test_sd, point.trials), point.test_mean),
        "tables": (words.size(point.embedding_bytes), point.embedding_bytes),
        "parameters": (f"{point.parameters:,}", point.parameters),
        "optimizer": (escape(words.optimizer(point.optimizer)) or words.NONE, point.optimizer),
        "trials": (_trials(point), point.trials),
        "deviation": ("", point.test_sd if point.trials > 1 else None),  # shown beside the loss
        "threshold": (_count(threshold), threshold),
        "AUC": (words.loss(point.auc_mean), point.auc_mean),
        "validation log loss": (words.loss(point.validation_mean), point.validation_mean),
    }
    shown = [name for name in columns if name not in BELOW]
    keys = escape(json.dumps([_key(values[name][1]) for name in columns]))
    more = " · ".join(f"{name} {values[name][0]}" for name in BELOW if values[name][0])
    return (
        f'<tbody class="point" data-keys="{keys}" data-figure="{escape(figure)}" data-data="{escape(data)}"'
        f' data-network="{escape(point.network)}" data-series="{escape(point.series)}">'
        f"<tr>{_cells(shown, [values[name][0] for name in shown])}</tr>"
        f'<tr class="how"><td colspan="{len(shown)}"><div class="below"><p class="more">{more}</p>'
        f"<details><summary>{escape(words.scheme(point.config))}</summary>"
        f'<div class="recipe"><h4>Command of the first trial</h4>{copyable(point.command)}'
        f"<h4>Configuration</h4>{copyable(json.dumps(point.config, indent=1, sort_keys=True))}"
        "</div></details></div></td></tr></tbody>\n"
    )


def _count(value: int | None) -> str:
    return words.NONE if value is None else f"{value:,}"


def _key(value: str | float | None) -> str | float | None:
    return value if isinstance(value, str) or (value is not None and math.isfinite(value)) else None


def _trials(point: Result) -> str:
    if not point.missing:
        return str(point.trials)
    failed = f", {point.failed} failed" if point.failed else ""
    return f'{point.trials} <span class="warn">({point.missing} missing{failed})</span>'


def copyable(text: str) -> str:
    """Text in a box with a button that copies it."""
    box = f'<pre tabindex="0">{escape(text)}</pre>'
    return f'<div class="copy">{box}<button type="button" class="small">Copy</button></div>'

"""The page's tables: the paper's table 1 with our numbers, the best method at each size, and all points."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .. import words
from ..figures import Figure, Result
from ..table1 import LOSSES
from .lines import networks
from .styles import Style
from .tradeoff import Win, is_clear

BEST = "**"  # put around a number that is the best of its row


class PointRow(NamedTuple):
    """A point in the table of all points: names of its figure and section, and the rows that it was trained on."""

    figure: str
    data: str
    rows: int | None
    point: Result


class PointColumn(NamedTuple):
    """A column to sort points by: ``kind`` is "text" or "number"; if not ``shown``, it is in the line below."""

    name: str
    kind: str
    shown: bool = True


POINT_COLUMNS = (
    PointColumn("figure", "text"),
    PointColumn("data", "text"),
    PointColumn("rows", "number"),
    PointColumn("network", "text"),
    PointColumn("series", "text"),
    PointColumn("x", "number"),
    PointColumn("test log loss", "number"),
    PointColumn("tables", "number"),
    PointColumn("parameters", "number"),
    PointColumn("optimizer", "text"),
    PointColumn("trials", "number"),
    PointColumn("deviation", "number", shown=False),
    PointColumn("threshold", "number", shown=False),
    PointColumn("AUC", "number", shown=False),
    PointColumn("validation log loss", "number", shown=False),
)


def hidden_layers(figure: Figure) -> list[list[str]]:
    """Table 1: for each network a row each for parameters, our test loss and the paper's; the first row is the head.

    The best of a row, and numbers that tie with it, are between pairs of asterisks.
    """
    widths = sorted({point.x for point in figure.points if point.x is not None})
    rows = [["network", "hidden layer", *(f"{width:,.6g}" for width in widths)]]
    for network in networks(figure.points):
        points = {point.x: point for point in figure.points if point.network == network}
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
    cells = "".join(
        f'<th scope="col" class="{"text" if k < 2 else "number"}">{escape(text)}</th>' for k, text in enumerate(head)
    )
    lines = []
    for row in body:
        texts = [
            f"<strong>{escape(t.removeprefix(BEST).removesuffix(BEST))}</strong>" if t.startswith(BEST) else escape(t)
            for t in row
        ]
        names = "".join(f'<th scope="row" class="text">{text}</th>' for text in texts[:2])
        numbers = "".join(
            f'<td class="number" data-label="{escape(width)}">{text}</td>'
            for width, text in zip(head[2:], texts[2:], strict=True)
        )
        lines.append(f"<tr>{names}{numbers}</tr>")
    table = f'<table class="cards"><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="box">{table}</div>'


def _heads(names: Sequence[str], kinds: Sequence[str]) -> str:
    return "".join(f'<th scope="col" class="{k}">{escape(n)}</th>' for n, k in zip(names, kinds, strict=True))


def winners_html(wins: Mapping[str, Sequence[Win]], looks: Mapping[str, Style]) -> str:
    """A table of the best method at each size, for each network."""
    head = ("tables of", "best", "test log loss", "next best", "difference", "more than the deviations?")
    kinds = ("text", "text", "number", "text", "number", "text")
    cells = _heads(head, kinds)
    parts = []
    for network, winners in wins.items():
        name = escape(words.network(network))
        parts.append(f'<tbody><tr class="group"><th scope="rowgroup" colspan="{len(head)}">{name}</th></tr>')
        for win in winners:
            best, second = win.best, win.second
            texts = (
                swatch(best.series, looks),
                words.mean_text(best.test_mean, best.test_sd, best.trials),
                swatch(second.series, looks) if second else words.NONE,
                words.loss(win.difference),
                _verdict(win),
            )
            row = f'<th scope="row" class="text">{_about(win)}</th>' + "".join(
                f'<td class="{kind}" data-label="{escape(name)}">{text}</td>'
                for name, kind, text in zip(head[1:], kinds[1:], texts, strict=True)
            )
            parts.append(f'<tr class="win">{row}</tr>')
        parts.append("</tbody>")
    table = f'<table class="cards"><thead><tr>{cells}</tr></thead>{"".join(parts)}</table>'
    return f'<div class="box">{table}</div>'


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


def points_columns(rows: Sequence[PointRow], *, several_data: bool) -> list[PointColumn]:
    """The columns of the table of all points, without those that are the same in every row."""
    alike = {"data": not several_data, "rows": len({row.rows for row in rows}) < 2}
    return [column for column in POINT_COLUMNS if not alike.get(column.name, False)]


def points_html(rows: Sequence[PointRow], columns: Sequence[PointColumn], looks: Mapping[str, Style]) -> str:
    """The table of all points, each with its command and configuration."""
    head = "".join(
        f'<th scope="col" class="{column.kind}" aria-sort="none" data-key="{key}">'
        f'<button type="button">{escape(column.name)}<span class="arrow" aria-hidden="true"></span></button></th>'
        for key, column in enumerate(columns)
        if column.shown
    )
    body = "".join(_point(row, columns, looks) for row in rows)
    return f'<div class="box"><table id="points" class="cards"><thead><tr>{head}</tr></thead>{body}</table></div>'


def _point(row: PointRow, columns: Sequence[PointColumn], looks: Mapping[str, Style]) -> str:
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
    cells = "".join(
        f'<td class="{column.kind}" data-label="{escape(column.name)}">{values[column.name][0]}</td>'
        for column in columns
        if column.shown
    )
    keys = escape(json.dumps([_key(values[column.name][1]) for column in columns]))
    more = " · ".join(
        f"{column.name} {text}" for column in columns if not column.shown and (text := values[column.name][0])
    )
    config = escape(json.dumps(point.config, indent=1, sort_keys=True))
    width = sum(column.shown for column in columns)
    return (
        f'<tbody class="point" data-keys="{keys}" data-figure="{escape(figure)}" data-data="{escape(data)}"'
        f' data-network="{escape(point.network)}" data-series="{escape(point.series)}"><tr>{cells}</tr>'
        f'<tr class="how"><td colspan="{width}"><div class="below"><p class="more">{more}</p>'
        f"<details><summary>{escape(words.scheme(point.config))}</summary>"
        f'<div class="recipe"><h4>Command of the first trial</h4>{copyable(point.command)}'
        f"<h4>Configuration</h4>{copyable(config, escaped=True)}</div></details></div></td></tr></tbody>\n"
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


def copyable(text: str, *, escaped: bool = False) -> str:
    """Text in a box with a button that copies it."""
    shown = text if escaped else escape(text)
    return f'<div class="copy"><pre tabindex="0">{shown}</pre><button type="button" class="small">Copy</button></div>'

"""The page's tables: the best method at each size, the paper's table 1 with our numbers, and all points."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from .. import words
from ..figures import Figure, Result
from ..paper_figures import TABLE_1_LOSSES
from .charts import variable
from .lines import by_network
from .styles import Style
from .tradeoff import Win, is_clear, winners

WIN_COLUMNS = ("size of the tables", "best", "test log loss", "next best", "difference", "beyond the deviations?")
TEXT_COLUMNS = {"figure", "data", "network", "series", "optimizer", "best", "next best", "hidden layer"}
TEXT_COLUMNS |= {"beyond the deviations?", "size of the tables"}  # others have numbers


class PointRow(NamedTuple):
    """A point in the table of all points: names of its figure and section, and the rows that it was trained on."""

    figure: str
    data: str
    rows: int
    point: Result


def winners_table(points: Sequence[Result], looks: Mapping[str, Style]) -> str:
    """The best method at each size, for each network."""
    rows = []
    for network, members in by_network(points).items():
        name = escape(words.network(network))
        rows.append(f'<tbody><tr class="group"><th scope="rowgroup" colspan="6">{name}</th></tr>')
        rows += [f'<tr class="win">{_cells(WIN_COLUMNS, _win(win, looks), heads=1)}</tr>' for win in winners(members)]
        rows.append("</tbody>")
    return _table("".join(map(_head, WIN_COLUMNS)), "".join(rows))


def _win(win: Win, looks: Mapping[str, Style]) -> tuple[str, ...]:
    low, high = words.size(win.low), words.size(win.high)
    sizes = low if low == high else f"{low} to {high}"
    share = f"1/{2**-win.power:,}" if win.power < 0 else f"{2**win.power:,}x" if win.power > 0 else "full"
    verdict = {True: "yes", False: "no, a tie", None: "not known: one trial"}[win.clear]
    return (
        f'{sizes} <span class="quiet">{share}</span>',
        swatch(win.best.series, looks),
        words.mean_text(win.best.test_mean, win.best.test_sd, win.best.trials),
        swatch(win.second.series, looks) if win.second else words.NONE,
        words.loss(win.difference),
        verdict if win.second else "no other method",
    )


def hidden_layers(figure: Figure) -> str:
    """Table 1: for each network a row each for parameters, our test loss and the paper's; the best is bold."""
    widths = sorted({point.x for point in figure.points if point.x is not None})
    columns = ["network", "hidden layer", *(f"{width:,.6g}" for width in widths)]
    rows = []
    for network, members in by_network(figure.points).items():
        points = {point.x: point for point in members}
        results = [points.get(width) for width in widths]
        trained = [p for p in results if p and math.isfinite(words.or_nan(p.test_mean))]
        best = min(trained, key=lambda p: words.or_nan(p.test_mean), default=None)
        name = escape(words.network(network))
        rows.append([name, "parameters", *(f"{p.parameters:,}" if p else words.NONE for p in results)])
        rows.append([name, "test log loss", *(_path_loss(p, best) for p in results)])
        if printed := TABLE_1_LOSSES.get(network, {}):
            texts = {width: words.loss(loss) for width, loss in printed.items()}
            least = min(printed, key=printed.__getitem__)
            texts[least] = f"<strong>{texts[least]}</strong>"
            rows.append([name, "test log loss, paper", *(texts.get(int(width), words.NONE) for width in widths)])
    body = "".join(f"<tr>{_cells(columns, row, heads=2)}</tr>" for row in rows)
    return _table("".join(map(_head, columns)), f"<tbody>{body}</tbody>")


def _path_loss(point: Result | None, best: Result | None) -> str:
    """The test loss in a cell of table 1; bold if it is the best or ties with it."""
    if point is None or best is None:
        return words.NONE
    text = words.mean_text(point.test_mean, point.test_sd, point.trials)
    return f"<strong>{text}</strong>" if point is best or is_clear(point, best) is False else text


def all_points(rows: Sequence[PointRow], several_data: bool, looks: Mapping[str, Style]) -> str:
    """The table of all points, which the page's script sorts and searches."""
    if not rows:
        return ""
    varies = {"data": several_data, "rows": len({row.rows for row in rows}) > 1}
    varies["x"] = any(row.point.x is not None for row in rows)
    columns = [name for name in _values(rows[0], looks) if varies.get(name, True)]
    heads = "".join(
        f'<th scope="col" class="{_kind(name)}" aria-sort="none"><button type="button">{escape(name)}'
        '<span class="arrow" aria-hidden="true"></span></button></th>'
        for name in columns
    )
    body = "".join(_point(row, columns, looks) for row in rows)
    table = _table(heads, body, 'id="points" class="cards"')
    keys = "".join(f'<option value="{k}">{escape(name)}</option>' for k, name in enumerate(columns))
    return (
        '<section id="all" aria-labelledby="allh"><h2 id="allh">All points</h2>'
        '<p class="quiet">Search finds the points that have every word, such as "mult 60". The scheme below a point'
        " opens its command and its configuration. Parameters are those of the whole model, tables the bytes of its"
        " embeddings.</p>"
        '<div class="card"><form id="filters">'
        '<label class="grow">search<input type="search" autocomplete="off"></label>'
        f'<label>sort by<select id="sort"><option value="">figure by figure</option>{keys}</select></label>'
        f'<output id="shown" aria-live="polite">{len(rows):,} points</output></form>'
        f"{table}</div></section>"
    )


def _values(row: PointRow, looks: Mapping[str, Style]) -> dict[str, tuple[str, str | float | None]]:
    """By column, what to show of a point, as HTML, and the value to sort by."""
    point = row.point
    failed = f", {point.failed} failed" if point.failed else ""
    missing = f' <span class="warn">({point.missing} missing{failed})</span>' if point.missing else ""
    seconds = point.seconds or None
    return {
        "figure": (escape(row.figure), row.figure),
        "data": (escape(row.data), row.data),
        "rows": (f"{row.rows:,}", row.rows),
        "network": (escape(words.network(point.network)), point.network),
        "series": (swatch(point.series, looks), point.series),
        "x": (words.NONE if point.x is None else f"{point.x:,.6g}", point.x),
        "test log loss": (words.mean_text(point.test_mean, point.test_sd, point.trials), point.test_mean),
        "AUC": (words.loss(point.auc_mean), point.auc_mean),
        "tables": (words.size(point.embedding_bytes), point.embedding_bytes),
        "parameters": (f"{point.parameters:,}", point.parameters),
        "time": (words.NONE if seconds is None else f"{seconds:,.3g} s", seconds),
        "optimizer": (escape(words.optimizer(point.optimizer)) or words.NONE, point.optimizer),
        "trials": (f"{point.trials}{missing}", point.trials),
    }


def _point(row: PointRow, columns: Sequence[str], looks: Mapping[str, Style]) -> str:
    point, values = row.point, _values(row, looks)
    keys = [values[name][1] for name in columns]
    sort_keys = json.dumps([None if isinstance(key, float) and not math.isfinite(key) else key for key in keys])
    threshold = point.config.get("threshold")
    more = f"threshold {threshold:,} · " if isinstance(threshold, int) else ""
    more += f"validation log loss {words.loss(point.validation_mean)}"
    return (
        f'<tbody class="point" data-keys="{escape(sort_keys)}">'
        f"<tr>{_cells(columns, [values[name][0] for name in columns])}</tr>"
        f'<tr class="how"><td colspan="{len(columns)}"><div class="below"><p class="more">{more}</p>'
        f"<details><summary>{escape(words.scheme(point.config))}</summary>"
        f'<div class="recipe"><h4>Command of the first trial</h4>{copyable(point.command)}'
        f"<h4>Configuration</h4>{copyable(json.dumps(point.config, indent=1, sort_keys=True))}"
        "</div></details></div></td></tr></tbody>\n"
    )


def copyable(text: str) -> str:
    """Text in a box with a button that copies it."""
    box = f'<pre tabindex="0">{escape(text)}</pre>'
    return f'<div class="copy">{box}<button type="button" class="small">Copy</button></div>'


def swatch(series: str, looks: Mapping[str, Style]) -> str:
    """The mark of a series in its colour, and its name."""
    look = looks[series]
    mark = f'<span class="mark" style="color: var({variable(look.light)})" aria-hidden="true">{look.glyph}</span>'
    return f"<span>{mark} {escape(series)}</span>"


def _table(heads: str, body: str, attributes: str = 'class="cards"') -> str:
    return f'<div class="box"><table {attributes}><thead><tr>{heads}</tr></thead>{body}</table></div>'


def _kind(column: str) -> str:
    return "text" if column in TEXT_COLUMNS else "number"


def _head(column: str) -> str:
    return f'<th scope="col" class="{_kind(column)}">{escape(column)}</th>'


def _cells(columns: Sequence[str], texts: Sequence[str], *, heads: int = 0) -> str:
    """The cells of a row, the first of which are heads; the texts are HTML."""
    cells = [f'<th scope="row" class="text">{text}</th>' for text in texts[:heads]]
    for name, text in zip(columns[heads:], texts[heads:], strict=True):
        cells.append(f'<td class="{_kind(name)}" data-label="{escape(name)}">{text}</td>')
    return "".join(cells)

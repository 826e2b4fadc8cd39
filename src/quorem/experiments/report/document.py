"""The page: every figure beside what the paper says of it, what each byte buys, and every point with its recipe."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from ...files import write
from .. import words
from ..figures import Figure, Result
from .lines import networks, panels
from .plots import figure_plots, tradeoff_plots
from .styles import Style, styles
from .tables import copyable, hidden_layers_html, points_html, swatch, winners_html
from .tradeoff import distinct, is_full, winners


def page(figures: Sequence[Figure], out: Path) -> None:
    """Write one HTML file that stands alone: it opens without a network.

    Args:
        figures: in the order they are shown; figures of one dataset, ``made["data"]``, stand together.
        out: the file.

    Raises:
        ValueError: if there are no figures.
    """
    if not figures:
        raise ValueError("figures ([]) must hold at least one figure")
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, html(figures))


def html(figures: Sequence[Figure]) -> str:
    """The page as text."""
    looks = styles(point.series for figure in figures for point in figure.points)
    groups = by_data(figures)
    plots: dict[str, str] = {}
    sections = [_dataset(k, name, members, looks, plots) for k, (name, members) in enumerate(groups.items())]
    rows = [
        (short_name(figure), name, point) for name, members in groups.items() for figure in members
        for point in figure.points
    ]  # fmt: skip
    parts = {
        "style": _file("report.css") + _series_css(looks),
        "summary": _summary(figures, groups),
        "links": _links(groups),
        "main": "".join(sections) + _all_points(rows, groups, looks),
        "made": _made(figures),
        "plotly": get_plotlyjs().replace("</script", r"<\/script"),
        "plots": "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in plots.items()).replace("<", r"\u003c") + "}",
        "colours": json.dumps({name: [s.light, s.dark] for name, s in looks.items()}).replace("<", r"\u003c"),
        "script": _file("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("report.html"))


def _file(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _series_css(looks: Mapping[str, Style]) -> str:
    return "".join(
        f".s{k} {{ --light: {looks[name].light}; --dark: {looks[name].dark} }}\n" for k, name in enumerate(looks)
    )


def by_data(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """The figures of each dataset; datasets of one name are told apart by a number."""
    found: dict[str, list[Figure]] = {}
    names: dict[str, str] = {}
    for figure in figures:
        data = figure.made.get("data")
        known = data if isinstance(data, Mapping) else {"name": data or "data"}
        name, key = (
            str(known.get("name", "data")),
            json.dumps(known.get("identity", known), sort_keys=True, default=str),
        )
        if key not in names:
            same = sum(
                other == name or re.fullmatch(re.escape(name) + r" \(\d+\)", other) is not None for other in found
            )
            names[key] = f"{name} ({same + 1})" if same else name
        found.setdefault(names[key], []).append(figure)
    return found


def short_name(figure: Figure) -> str:
    """The name of a figure in words: ``figure5`` is Figure 5."""
    match = re.fullmatch(r"(figure|table)(\d+)", figure.axes.name)
    return f"{match[1].capitalize()} {match[2]}" if match else figure.axes.name[:1].upper() + figure.axes.name[1:]


def _title(figure: Figure) -> str:
    name = short_name(figure)
    title = figure.axes.title.removeprefix(name).lstrip(":. ") or name
    return title[:1].upper() + title[1:]


def _dataset(
    number: int, name: str, figures: Sequence[Figure], looks: Mapping[str, Style], plots: dict[str, str]
) -> str:
    data = figures[0].made.get("data")
    known = words.data(data) if isinstance(data, Mapping) else ""
    about = f'<p class="quiet">{escape(known)}</p>' if known else ""
    inner = _tradeoff(number, figures, looks, plots)
    inner += "".join(_figure(f"d{number}f{k}", figure, looks, plots) for k, figure in enumerate(figures))
    head = f'<h2 id="d{number}h">{escape(name)}</h2>{about}'
    return f'<section id="d{number}" aria-labelledby="d{number}h">{head}{inner}</section>'


def _tradeoff(number: int, figures: Sequence[Figure], looks: Mapping[str, Style], plots: dict[str, str]) -> str:
    points = distinct(figures)
    if not points:
        return ""
    wins = {name: winners([p for p in points if p.network == name]) for name in networks(points)}
    drawn = tradeoff_plots(points, looks)
    held = _panels(f"d{number}t", drawn, "Test log loss against bytes", plots)
    table = winners_html(wins, looks)
    return (
        f'<article class="card" id="d{number}t"><header><h3>What a byte buys</h3></header>'
        "<p>Every setting of every figure, by the bytes of its embedding tables. "
        'Along the <span class="front-key">broad line</span> no other setting is both as small and better.</p>'
        f"{_legend(points, looks)}{held}"
        "<h4>Which method wins at which size</h4>"
        '<p class="quiet">Sizes are powers of two of the full tables; a point belongs to the nearest. A difference'
        f" counts where it is more than both deviations together.</p>{table}</article>"
    )


def _figure(key: str, figure: Figure, looks: Mapping[str, Style], plots: dict[str, str]) -> str:
    name, title = escape(short_name(figure)), escape(_title(figure))
    paper = figure.axes.paper
    claim = f'<div class="claim"><h4>The paper</h4><p>{escape(paper)}</p></div>' if paper else ""
    measured = _measured(figure)
    aside = f'<div class="aside">{claim}{measured}</div>' if claim or measured else ""
    if figure.points:
        held = _panels(key, figure_plots(figure, looks), f"{short_name(figure)}: {_title(figure)}", plots)
        body = f"{_legend(figure.points, looks)}{held}{_missing(figure)}"
    else:
        body = '<p class="note">No point of this figure is trained yet.</p>'
    table = hidden_layers_html(figure) if figure.axes.name == "table1" and figure.points else ""
    return (
        f'<article class="card figure" id="{key}"><header><p class="kicker">{name}</p><h3>{title}</h3></header>'
        f'<div class="beside">{aside}<div class="drawn">{body}</div></div>{table}</article>'
    )


def _legend(points: Sequence[Result], looks: Mapping[str, Style]) -> str:
    found = {point.series for point in points}
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{escape(name)}">{swatch(name, looks)}</button>'
        for name in looks
        if name in found
    )
    return f'<div class="legend" role="group" aria-label="Methods shown">{buttons}</div>'


def _panels(key: str, drawn: Mapping[str, str], label: str, plots: dict[str, str]) -> str:
    parts = []
    for k, (network, plot) in enumerate(drawn.items()):
        plots[f"{key}p{k}"] = plot
        name = escape(words.network(network))
        parts.append(
            f'<figure class="panel"><figcaption>{name}</figcaption>'
            f'<div class="plot" id="{key}p{k}" role="img" aria-label="{escape(label)}, {name};'
            ' every number is in the table of all points"></div></figure>'
        )
    return f'<div class="panels">{"".join(parts)}</div>'


def _measured(figure: Figure) -> str:
    """The best of each network in a sentence, beside what the paper found."""
    axes, rows = figure.axes, []
    if axes.y == "parameters":
        return ""
    for network in networks(figure.points):
        points = [p for p in figure.points if p.network == network and math.isfinite(words.known(p.test_mean))]
        if not points:
            continue
        best = min((p for p in points if not is_full(p)), key=lambda p: words.known(p.test_mean), default=points[0])
        full = next((p for p in points if is_full(p)), None)
        than = ""
        if full is not None and best is not full and full.test_mean:
            change = words.known(best.test_mean) / full.test_mean - 1
            than = f", {abs(change):.2%} {'above' if change >= 0 else 'below'} full tables"
        at = f" at {axes.x_label} {best.x:,.6g}" if axes.x == "x" and best.x is not None else ""
        at = at or (f" at {words.count(best.parameters)} parameters" if axes.x == "parameters" else "")
        rows.append(
            f"<li><strong>{escape(words.network(network))}</strong>: {escape(best.series)}{escape(at)},"
            f" test {words.spread(best.test_mean, best.test_sd, best.trials)}{than}</li>"
        )
    return f'<div class="measured"><h4>Here, the best</h4><ul>{"".join(rows)}</ul></div>' if rows else ""


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
        texts.append(f"{undrawn:,} of {len(figure.points):,} points have nothing to draw")
    return f'<p class="note">{"; ".join(texts)}.</p>' if texts else ""


def _summary(figures: Sequence[Figure], groups: Mapping[str, Sequence[Figure]]) -> str:
    points = [point for figure in figures for point in figure.points]
    if not points:
        return "No point of any figure is trained yet."
    missing = sum(p.missing for p in points)
    text = f"{len(figures)} figures" if len(figures) != 1 else "One figure"
    text += f", {len(points):,} points"
    text += f", {words.trials(missing)} missing" if missing else ""
    return escape(f"{text}; {', '.join(groups)}.")


def _links(groups: Mapping[str, Sequence[Figure]]) -> str:
    parts = []
    for number, (name, figures) in enumerate(groups.items()):
        links = [f'<a href="#d{number}t">What a byte buys</a>'] if distinct(figures) else []
        links += [f'<a href="#d{number}f{k}">{escape(short_name(figure))}</a>' for k, figure in enumerate(figures)]
        label = f'<span class="quiet">{escape(name)}</span>' if len(groups) > 1 else ""
        parts.append(f"<div>{label}{''.join(links)}</div>")
    parts.append('<div><a href="#all">All points</a><a href="#made">Made by</a></div>')
    return "".join(parts)


def _all_points(rows: Sequence[tuple[str, str, Result]], groups: Mapping[str, Any], looks: Mapping[str, Style]) -> str:
    if not rows:
        return ""
    choices = {
        "figure": {name: name for name, _, _ in rows},
        "data": {name: name for _, name, _ in rows},
        "network": {name: words.network(name) for name in networks([point for _, _, point in rows])},
        "series": {name: name for name in looks},
    }
    selects = "".join(
        f'<label>{label}<select data-filter="{label}"><option value="">all</option>'
        + "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options.items())
        + "</select></label>"
        for label, options in choices.items()
        if label != "data" or len(groups) > 1
    )
    return (
        '<section id="all" aria-labelledby="allh"><h2 id="allh">All points</h2>'
        '<p class="quiet">A heading sorts. Below each point is its scheme: open it for the command and the'
        " configuration. Parameters are those of the whole model, tables the bytes of its embeddings.</p>"
        '<div class="card"><form id="filters">'
        '<label class="grow">search<input type="search" autocomplete="off"></label>'
        f'{selects}<output id="shown" aria-live="polite">{len(rows):,} points</output></form>'
        f"{points_html(rows, looks, several_data=len(groups) > 1)}</div></section>"
    )


def _made(figures: Sequence[Figure]) -> str:
    """By what each figure was made; figures made alike share an entry."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for figure in figures:
        key = json.dumps(figure.made, sort_keys=True, default=str)
        found.setdefault(key, (figure.made, []))[1].append(short_name(figure))
    parts, hidden = [], ("command", "datasets")
    for made, names in found.values():
        command = copyable(str(made["command"])) if made.get("command") else ""
        shown = {name: words.value_text(value).strip("()") for name, value in made.items() if name not in hidden}
        if isinstance(data := made.get("data"), Mapping):
            shown["data"] = f"{data.get('name', '')}: {words.data(data)}"
        listed = "".join(
            f"<div><dt>{escape(str(name))}</dt><dd>{escape(text)}</dd></div>" for name, text in shown.items()
        )
        parts.append(f"<h3>{escape(', '.join(names))}</h3>{command}<dl>{listed}</dl>")
    return "".join(parts)

"""The page: each figure beside what the paper says about it, loss against bytes, and each point with its command."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from ...files import write
from .. import words
from ..conditions import Conditions, all_conditions, conditions_of, dataset_of, split
from ..figures import Figure, Result, grouped
from .lines import by_network, end_of, panels
from .plots import figure_plots, tradeoff_plots
from .sentences import claim, measured, notes, varies
from .styles import Style, styles
from .tables import PointRow, copyable, hidden_layers_html, points_columns, points_html, swatch, winners_html
from .tradeoff import distinct, winners


def page(figures: Sequence[Figure], out: Path, *, headline: str = "") -> None:
    """Write one self-contained HTML file, which opens without a network.

    Args:
        figures: the figures in the order of the page; figures of one dataset, ``made["data"]``, are grouped.
        out: the file.
        headline: the first sentence of the page.

    Raises:
        ValueError: if there are no figures.
    """
    if not figures:
        raise ValueError("figures ([]) must hold at least one figure")
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, html(figures, headline))


def html(figures: Sequence[Figure], headline: str = "") -> str:
    """The page as text."""
    figures = [part for figure in figures for part in split(figure)]
    looks = styles(point.series for figure in figures for point in figure.points)
    groups = sections(figures)
    plots: dict[str, str] = {}
    parts = [_section(k, name, members, looks, plots) for k, (name, members) in enumerate(groups.items())]
    rows = [
        PointRow(short_name(figure), name, conditions_of(point, figure.made).rows, point)
        for name, members in groups.items()
        for figure in members
        for point in figure.points
    ]
    colours = [f".s{k} {{ --light: {s.light}; --dark: {s.dark} }}\n" for k, s in enumerate(looks.values())]
    values = {
        "style": _file("report.css") + "".join(colours),
        "headline": f'<p class="headline">{escape(headline)}</p>' if headline else "",
        "summary": _summary(figures, groups),
        "links": _links(groups),
        "main": "".join(parts) + _all_points(rows, groups, looks),
        "made": _made(figures),
        "plotly": get_plotlyjs().replace("</script", r"<\/script"),
        "plots": "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in plots.items()).replace("<", r"\u003c") + "}",
        "colours": json.dumps({name: [s.light, s.dark] for name, s in looks.items()}).replace("<", r"\u003c"),
        "script": _file("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _file("report.html"))


def _file(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def sections(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Groups of figures that may be compared, by heading: those of one dataset, trained under the same conditions.

    Datasets with equal names get a number; a heading names the conditions if a dataset has several.
    """
    names: dict[str, str] = {}  # names of datasets, by identity
    groups: dict[tuple[str, tuple[Conditions, ...]], list[Figure]] = {}
    for figure in figures:
        data = dataset_of(figure.made, figure.points[0].config.get("data") if figure.points else None)
        identity = json.dumps(data.get("identity", data), sort_keys=True, default=str)
        if identity not in names:
            name = str(data.get("name", "data"))
            same = sum(re.fullmatch(re.escape(name) + r"( \(\d+\))?", other) is not None for other in names.values())
            names[identity] = f"{name} ({same + 1})" if same else name
        groups.setdefault((names[identity], tuple(all_conditions(figure))), []).append(figure)
    for name, conditions in [key for key in groups if not key[1]]:  # figures without points join others of their data
        for other in groups:
            if other[0] == name and other[1]:
                groups[other] += groups.pop((name, conditions))
                break
    several = {name for name in names.values() if sum(key[0] == name for key in groups) > 1}
    return {
        f"{name}: {_trained_on(members)}" if name in several else name: members for (name, _), members in groups.items()
    }


def _trained_on(figures: Sequence[Figure]) -> str:
    """Rows, epochs and batch size of the figures, in words."""
    return "; ".join(dict.fromkeys(conditions.text() for figure in figures for conditions in all_conditions(figure)))


def short_name(figure: Figure) -> str:
    """The name of a figure for headings: ``figure5`` becomes Figure 5."""
    match = re.fullmatch(r"(figure|table)(\d+)", figure.axes.name)
    return f"{match[1].capitalize()} {match[2]}" if match else figure.axes.name[:1].upper() + figure.axes.name[1:]


def _title(figure: Figure) -> str:
    name = short_name(figure)
    title = figure.axes.title.removeprefix(name).lstrip(":. ") or name
    return title[:1].upper() + title[1:]


def _section(
    number: int, name: str, figures: Sequence[Figure], looks: Mapping[str, Style], plots: dict[str, str]
) -> str:
    data = figures[0].made.get("data")
    facts = [words.data(data)] if isinstance(data, Mapping) else []
    if any(figure.points for figure in figures):
        facts.append(f"trained on {_trained_on(figures)}")
    about = f'<p class="quiet">{escape("; ".join(filter(None, facts)))}</p>' if any(facts) else ""
    inner = _tradeoff(number, figures, looks, plots)
    inner += "".join(_figure(f"d{number}f{k}", figure, looks, plots) for k, figure in enumerate(figures))
    head = f'<h2 id="d{number}h">{escape(name)}</h2>{about}'
    return f'<section id="d{number}" aria-labelledby="d{number}h">{head}{inner}</section>'


def _is_compared(figures: Sequence[Figure]) -> bool:
    """Whether loss can be compared against bytes: several settings, all trained under the same conditions."""
    return len(distinct(figures)) > 1 and not varies(figures)


def _tradeoff(number: int, figures: Sequence[Figure], looks: Mapping[str, Style], plots: dict[str, str]) -> str:
    points = distinct(figures)
    if not _is_compared(figures):
        return ""
    wins = {name: winners(members) for name, members in by_network(points).items()}
    drawn = tradeoff_plots(points, looks)
    panels = _panels(f"d{number}t", drawn, "Test log loss against bytes", plots)
    table = winners_html(wins, looks)
    return (
        f'<article class="card" id="d{number}t"><header><h3>What a byte buys</h3></header>'
        "<p>Every setting of every figure, by the bytes of its embedding tables. "
        'Along the <span class="front-key">broad line</span> no other setting is both as small and better.</p>'
        f"{_legend(points, looks)}{panels}"
        "<h4>Which method wins at which size</h4>"
        '<p class="quiet">Sizes are powers of two of the full tables; a point belongs to the nearest. A difference'
        f" counts where it is more than both deviations together.</p>{table}</article>"
    )


def _figure(key: str, figure: Figure, looks: Mapping[str, Style], plots: dict[str, str]) -> str:
    name, title = escape(short_name(figure)), escape(_title(figure))
    trained = f"trained on {_trained_on([figure])}" if figure.points and figure.axes.y != "parameters" else ""
    text = claim(figure) + measured(figure)
    aside = f'<div class="aside">{text}</div>' if text else ""
    if figure.points and not any(line.points for lines in panels(figure).values() for line in lines):
        body = notes(figure)
    elif figure.points:
        content = _panels(key, figure_plots(figure, looks), f"{short_name(figure)}: {_title(figure)}", plots)
        body = f"{_legend(figure.points, looks)}{content}{_zoom(figure)}{notes(figure)}"
    else:
        body = '<p class="note">No point of this figure is trained yet.</p>'
    table = hidden_layers_html(figure) if figure.axes.name == "table1" and figure.points else ""
    return (
        f'<article class="card figure" id="{key}"><header><p class="kicker">{name}</p><h3>{title}</h3>'
        f'<p class="trained">{escape(trained)}</p></header>'
        f'<div class="beside">{aside}<div class="drawn">{body}</div></div>{table}</article>'
    )


def _zoom(figure: Figure) -> str:
    """The button that switches between the end of the training, which is shown first, and the whole training."""
    if not any(end_of(lines) for lines in panels(figure).values()):
        return ""
    return (
        '<p class="zoom"><button type="button" class="small" data-end="Show the end of training"'
        ' data-all="Show all of training">Show all of training</button></p>'
    )


def _legend(points: Sequence[Result], looks: Mapping[str, Style]) -> str:
    series = {point.series for point in points}
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{escape(name)}">{swatch(name, looks)}</button>'
        for name in looks
        if name in series
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


def _summary(figures: Sequence[Figure], groups: Mapping[str, Sequence[Figure]]) -> str:
    points = [point for figure in figures for point in figure.points]
    if not points:
        return "No point of any figure is trained yet."
    missing = sum(p.missing for p in points)
    text = f"{len(figures)} figures" if len(figures) != 1 else "One figure"
    text += f", {len(points):,} point{'s' * (len(points) != 1)}"
    text += f", {missing} trial{'s' * (missing != 1)} missing" if missing else ""
    return escape(f"{text}; {', '.join(groups)}.")


def _links(groups: Mapping[str, Sequence[Figure]]) -> str:
    parts = []
    for number, (name, figures) in enumerate(groups.items()):
        links = [f'<a href="#d{number}t">What a byte buys</a>'] if _is_compared(figures) else []
        links += [f'<a href="#d{number}f{k}">{escape(short_name(figure))}</a>' for k, figure in enumerate(figures)]
        label = f'<span class="quiet">{escape(name)}</span>' if len(groups) > 1 else ""
        parts.append(f"<div>{label}{''.join(links)}</div>")
    parts.append('<div><a href="#all">All points</a><a href="#made">Made by</a></div>')
    return "".join(parts)


def _all_points(rows: Sequence[PointRow], groups: Mapping[str, Any], looks: Mapping[str, Style]) -> str:
    if not rows:
        return ""
    choices = {
        "figure": {row.figure: row.figure for row in rows},
        "data": {row.data: row.data for row in rows},
        "network": {name: words.network(name) for name in by_network(row.point for row in rows)},
        "series": {name: name for name in looks},
    }
    selects = "".join(
        f'<label>{label}<select data-filter="{label}"><option value="">all</option>'
        + "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options.items())
        + "</select></label>"
        for label, options in choices.items()
        if label != "data" or len(groups) > 1
    )
    columns = points_columns(rows, several_data=len(groups) > 1)
    keys = "".join(f'<option value="{k}">{escape(name)}</option>' for k, name in enumerate(columns))
    return (
        '<section id="all" aria-labelledby="allh"><h2 id="allh">All points</h2>'
        '<p class="quiet">Search finds the points that have every word, such as "mult 60". The scheme below a point'
        " opens its command and its configuration. Parameters are those of the whole model, tables the bytes of its"
        " embeddings.</p>"
        '<div class="card"><form id="filters">'
        '<label class="grow">search<input type="search" autocomplete="off"></label>'
        f'{selects}<label>sort by<select id="sort"><option value="">figure by figure</option>{keys}</select></label>'
        '<button type="button" id="direction" disabled>Reverse</button>'
        f'<output id="shown" aria-live="polite">{len(rows):,} points</output></form>'
        f'{points_html(rows, columns, looks)}<p><button type="button" id="more" hidden></button></p></div></section>'
    )


def _made(figures: Sequence[Figure]) -> str:
    """How each figure was made; figures that were made in the same way share an entry."""
    parts, hidden = [], ("command", "datasets")
    for members in grouped(figures, lambda figure: json.dumps(figure.made, sort_keys=True, default=str)).values():
        made, names = members[0].made, map(short_name, members)
        command = copyable(str(made["command"])) if made.get("command") else ""
        shown = {name: words.value_text(value).strip("()") for name, value in made.items() if name not in hidden}
        if isinstance(data := made.get("data"), Mapping):
            shown["data"] = f"{data.get('name', '')}: {words.data(data)}"
        listed = "".join(
            f"<div><dt>{escape(str(name))}</dt><dd>{escape(text)}</dd></div>" for name, text in shown.items()
        )
        parts.append(f"<h3>{escape(', '.join(names))}</h3>{command}<dl>{listed}</dl>")
    return "".join(parts)

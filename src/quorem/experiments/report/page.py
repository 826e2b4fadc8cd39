"""The page: each figure beside what the paper says about it, loss against bytes, and each point with its command."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ...files.atomic import write
from .. import words
from ..figures import Figure, Made, Result, grouped
from .charts import DARK, TRADEOFF, figure_svgs, variable
from .lines import by_network, coinciding, panels
from .styles import Style, styles
from .tables import PointRow, all_points, copyable, hidden_layers, swatch, winners_table
from .tradeoff import distinct, is_clear, is_full

PAPER_ROWS = "The paper trained on one epoch of 39.3 million rows."
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page(figures: Sequence[Figure], out: Path, *, headline: str = "") -> None:
    """Write one self-contained HTML file, which opens without a network.

    Args:
        figures: the figures in the order of the page; those of one dataset are grouped.
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
    looks = styles(point.series for figure in figures for point in figure.points)
    groups = sections(figures)
    rows = [
        PointRow(
            ", ".join(point.runs) if figure.axes.name == "runs" else short_name(figure),
            name,
            figure.conditions_of(point).rows,
            point,
        )
        for name, members in groups.items()
        for figure in members
        for point in figure.points
    ]
    main = "".join(_section(k, name, members, looks) for k, (name, members) in enumerate(groups.items()))
    first = f'<p class="headline">{escape(headline)}</p>' if headline else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>quorem: results</title>
<style>
{_file("report.css")}{_colours(looks)}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header class="top">
<div class="wide">
<div><h1>Smaller embedding tables, and what they cost</h1>{first}<p>{_summary(figures, groups)}</p></div>
<button type="button" id="theme"><span aria-hidden="true">◐</span> <span class="name">Dark theme</span></button></div>
<nav class="wide" aria-label="Sections">{_links(groups)}</nav>
</header>
<main id="main" class="wide" tabindex="-1">{main}{all_points(rows, len(groups) > 1, looks)}</main>
<footer id="made"><div class="wide"><h2>Made by</h2>{_made(figures)}</div></footer>
<script>
{_file("report.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def _colours(looks: Mapping[str, Style]) -> str:
    """The variables of the charts' colours, for both themes."""
    pairs = {**DARK, **{look.light: look.dark for look in looks.values()}}
    light = "; ".join(f"{variable(light)}: {light}" for light in pairs)
    dark = "; ".join(f"{variable(light)}: {dark}" for light, dark in pairs.items())
    return f':root {{ {light} }}\n:root[data-theme="dark"] {{ {dark} }}\n'


def sections(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Groups of figures that may be compared, by heading: those of one dataset, trained under the same conditions.

    A heading names the conditions if a dataset has several, and a part of the identity if datasets have equal names.
    """
    first = {f.made.data.identity: _trained_on([f]) for f in reversed(figures) if f.points}
    groups = grouped(
        figures,  # one without points joins the first others of its data
        lambda f: (f.made.data.identity, _trained_on([f]) or first.get(f.made.data.identity, "")),
    )
    identities = [identity for identity, _ in groups]
    names = {f.made.data.identity: f.made.data.name for f in figures}
    headings = {}
    for (identity, trained), members in groups.items():
        heading = names[identity]
        if list(names.values()).count(heading) > 1:
            heading += f" ({identity[:8]})"
        headings[f"{heading}: {trained}" if identities.count(identity) > 1 else heading] = members
    return headings


def _trained_on(figures: Sequence[Figure]) -> str:
    """Rows, epochs and batch size of the figures, in words."""
    return "; ".join(dict.fromkeys(str(conditions) for figure in figures for conditions in figure.conditions()))


def short_name(figure: Figure) -> str:
    """The name of a figure for headings: ``figure5`` becomes Figure 5."""
    match = re.fullmatch(r"(figure|table)(\d+)", figure.axes.name)
    return f"{match[1].capitalize()} {match[2]}" if match else figure.axes.name[:1].upper() + figure.axes.name[1:]


def _section(number: int, name: str, figures: Sequence[Figure], looks: Mapping[str, Style]) -> str:
    facts = [words.data(figures[0].made.data)]
    if any(figure.points for figure in figures):
        facts.append(f"trained on {_trained_on(figures)}")
    about = f'<p class="quiet">{escape("; ".join(facts))}</p>'
    inner = _tradeoff(number, figures, looks) if _is_compared(figures) else ""
    inner += "".join(_figure(f"d{number}f{k}", figure, looks) for k, figure in enumerate(figures))
    head = f'<h2 id="d{number}h">{escape(name)}</h2>{about}'
    return f'<section id="d{number}" aria-labelledby="d{number}h">{head}{inner}</section>'


def _is_compared(figures: Sequence[Figure]) -> bool:
    """Whether loss can be compared against bytes: several settings, all trained under the same conditions."""
    return len(distinct(figures)) > 1 and len({c for figure in figures for c in figure.conditions()}) == 1


def _tradeoff(number: int, figures: Sequence[Figure], looks: Mapping[str, Style]) -> str:
    points = distinct(figures)
    drawn = figure_svgs(Figure(axes=TRADEOFF, made=figures[0].made, points=points), looks)
    return (
        f'<article class="card" id="d{number}t"><header><h3>What a byte buys</h3></header>'
        "<p>Every setting of every figure, by the bytes of its embedding tables. "
        "Along the broad line no other setting is both as small and better.</p>"
        f"{_legend(points, looks)}{_panels(drawn, 'Test log loss against bytes')}"
        "<h4>Which method wins at which size</h4>"
        '<p class="quiet">Sizes are powers of two of the full tables; a point belongs to the nearest. A difference'
        f" counts where it is more than both deviations together.</p>{winners_table(points, looks)}</article>"
    )


def _figure(key: str, figure: Figure, looks: Mapping[str, Style]) -> str:
    axes, name = figure.axes, short_name(figure)
    title = axes.title.removeprefix(name).lstrip(":. ") or name
    trained = f"trained on {_trained_on([figure])}" if figure.points and axes.y != "parameters" else ""
    text = _claim(figure) + _measured(figure)
    aside = f'<div class="aside">{text}</div>' if text else ""
    of_network = panels(figure).values()
    body = _notes(figure) if figure.points else '<p class="note">No point of this figure is trained yet.</p>'
    if any(panel.lines for panel in of_network):
        drawn = _panels(figure_svgs(figure, looks), f"{name}: {title}")
        if any(panel.end for panel in of_network):
            whole = _panels(figure_svgs(figure, looks, whole=True), f"{name}: {title}, all of training")
            drawn += f"<details><summary>Show all of training</summary>{whole}</details>"
        body = _legend(figure.points, looks) + drawn + body
    table = hidden_layers(figure) if axes.name == "table1" and figure.points else ""
    return (
        f'<article class="card figure" id="{key}"><header><p class="kicker">{escape(name)}</p>'
        f'<h3>{escape(title[:1].upper() + title[1:])}</h3><p class="trained">{escape(trained)}</p></header>'
        f'<div class="beside">{aside}<div class="drawn">{body}</div>'
        f"</div>{table}</article>"
    )


def _claim(figure: Figure) -> str:
    """What the paper says, and the number of rows it trained on; empty for a figure that is not in the paper."""
    if not figure.axes.paper:
        return ""
    trained = figure.axes.y != "parameters" and figure.axes.name in ("figure4", "figure5", "figure6", "table1")
    text = figure.axes.paper + (f" {PAPER_ROWS}" if trained else "")
    return f'<div class="claim"><h4>The paper</h4><p>{escape(text)}</p></div>'


def _measured(figure: Figure) -> str:
    """The best result of each network in a sentence, to be shown beside the paper's claim."""
    if figure.axes.y == "parameters" or len(figure.conditions()) > 1:
        return ""
    rows = []
    for network, members in by_network(figure.points).items():
        if points := [p for p in members if math.isfinite(words.or_nan(p.test_mean))]:
            rows.append(f"<li><strong>{escape(words.network(network))}</strong>: {escape(_best(figure, points))}</li>")
    return f'<div class="measured"><h4>Best of these runs</h4><ul>{"".join(rows)}</ul></div>' if rows else ""


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


def _notes(figure: Figure) -> str:
    """What the plot does not show: lines on top of each other, and missing trials or points."""
    texts: dict[str, list[str]] = {}
    drawn: set[int] = set()
    for network, panel in panels(figure).items():
        drawn |= {id(point) for line in panel.lines for point in line.points}
        for text in coinciding(panel.lines, log=figure.axes.y_log):
            texts.setdefault(text, []).append(words.network(network))
    listed = "; ".join(f"{text} ({' and '.join(names)})" for text, names in texts.items())
    said = [f"Drawn on top of each other: {listed}"] if texts else []
    missing, failed = sum(p.missing for p in figure.points), sum(p.failed for p in figure.points)
    if missing:
        every = missing + sum(map(words.finished, figure.points))
        said.append(f"{missing:,} of {every:,} trials are missing" + (f", {failed:,} of them failed" if failed else ""))
    if undrawn := len(figure.points) - len(drawn):
        short = ", since they trained for fewer steps than one mean of the loss takes" * (figure.axes.x == "step")
        said.append(f"{undrawn:,} of {len(figure.points):,} points have nothing to draw{short}")
    return "".join(f'<p class="note">{escape(text)}.</p>' for text in said)


def _legend(points: Sequence[Result], looks: Mapping[str, Style]) -> str:
    series = {point.series for point in points}
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-hides="{k}">{swatch(name, looks)}</button>'
        for k, name in enumerate(looks)
        if name in series
    )
    return f'<div class="legend" role="group" aria-label="Methods shown">{buttons}</div>'


def _panels(svgs: Mapping[str, str], label: str) -> str:
    parts = [
        f'<figure class="panel"><figcaption>{escape(words.network(network))}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(label)}, {escape(words.network(network))};'
        f' every number is in the table of all points">{svg}</div></figure>'
        for network, svg in svgs.items()
    ]
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
    return "".join([*parts, '<div><a href="#all">All points</a><a href="#made">Made by</a></div>'])


def _made(figures: Sequence[Figure]) -> str:
    """How each figure was made; figures that were made in the same way share an entry."""
    parts = []
    for members in grouped(figures, lambda figure: repr(figure.made)).values():
        made = members[0].made
        listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in _facts(made))
        names = escape(", ".join(dict.fromkeys(map(short_name, members))))
        parts.append(f"<h3>{names}</h3>{copyable(made.command)}<dl>{listed}</dl>")
    return "".join(parts)


def _facts(made: Made) -> list[tuple[str, str]]:
    """Name and text of what is known about the making of a figure."""
    facts = {
        "date": made.date,
        "data": f"{made.data.name}: {words.data(made.data)}",
        "trials": str(made.trials),
        "optimizers": ", ".join(made.optimizers),
        "device": made.device,
        "versions": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
        "commit": made.commit or "",
    }
    return [(name, text) for name, text in facts.items() if text]

"""The page: each figure beside what the paper says about it, loss against bytes, and each point with its command.

Here is what it shows; ``static/page.html`` is how, as a template of Jinja.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...files.atomic import write
from ...planner.budget import show_bytes
from .. import words
from ..figures import Figure, Result, grouped
from ..paper_figures import TABLE_1_LOSSES
from .charts import DARK, TRADEOFF, Style, figure_svgs, styles, variable
from .lines import by_network, coinciding, panels
from .tradeoff import distinct, is_clear, is_full, winners

PAPER_ROWS = "The paper trained on one epoch of 39.3 million rows."


def page(figures: Sequence[Figure], out: Path) -> None:
    """Write one self-contained HTML file, which opens without a network; figures of one dataset are grouped."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, html(figures))


def html(figures: Sequence[Figure]) -> str:
    """The page as text."""
    looks = styles(point.series for figure in figures for point in figure.points)
    groups = sections(figures)
    rows = [
        _point(figure, name, point) for name, members in groups.items() for figure in members for point in figure.points
    ]
    varies = {"data": len(groups) > 1, "rows": len({row["cells"]["rows"] for row in rows}) > 1}
    varies["x"] = any(row["point"].x is not None for row in rows)
    columns = [name for name in rows[0]["cells"] if varies.get(name, True)] if rows else []
    for row in rows:
        keys = [row["cells"][name][1] for name in columns]
        finite = [None if isinstance(key, float) and not math.isfinite(key) else key for key in keys]
        row["sort_keys"] = json.dumps(finite)
    files = PackageLoader(__package__, "static")
    templates = Environment(
        loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.globals |= {"looks": looks, "words": words, "variable": variable, "columns": columns}
    templates.globals |= {"is_clear": is_clear, "show_bytes": show_bytes}
    templates.filters["short_name"] = _short_name
    return templates.get_template("page.html").render(
        dark={**DARK, **{look.light: look.dark for look in looks.values()}},
        sections=[_section(k, name, members, looks) for k, (name, members) in enumerate(groups.items())],
        rows=rows,
        makers=grouped(figures, lambda figure: repr(figure.made)).values(),
    )


def sections(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Groups of figures that may be compared, by heading: those of one dataset, trained under the same conditions.

    A heading names the conditions if a dataset has several, and a part of the identity if datasets have equal names.
    """
    first = {f.made.data.identity: _trained_on([f]) for f in reversed(figures) if f.points}
    # A figure without points joins the first others of its data.
    groups = grouped(figures, lambda f: (f.made.data.identity, _trained_on([f]) or first.get(f.made.data.identity, "")))
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


def _short_name(figure: Figure) -> str:
    """The name of a figure for headings: ``figure5`` becomes Figure 5."""
    match = re.fullmatch(r"(figure|table)(\d+)", figure.axes.name)
    return f"{match[1].capitalize()} {match[2]}" if match else figure.axes.name[:1].upper() + figure.axes.name[1:]


def _section(number: int, name: str, figures: Sequence[Figure], looks: Mapping[str, Style]) -> dict[str, Any]:
    facts, points = [words.data(figures[0].made.data)], distinct(figures)
    if any(figure.points for figure in figures):
        facts.append(f"trained on {_trained_on(figures)}")
    tradeoff = None
    if len(points) > 1 and len({c for figure in figures for c in figure.conditions()}) == 1:
        drawn = figure_svgs(Figure(axes=TRADEOFF, made=figures[0].made, points=points), looks)
        wins = {network: winners(members) for network, members in by_network(points).items()}
        tradeoff = {"id": f"d{number}t", "points": points, "drawn": drawn, "winners": wins}
    return {
        "id": f"d{number}",
        "name": name,
        "about": "; ".join(facts),
        "tradeoff": tradeoff,
        "figures": [_figure(f"d{number}f{k}", figure, looks) for k, figure in enumerate(figures)],
    }


def _figure(key: str, figure: Figure, looks: Mapping[str, Style]) -> dict[str, Any]:
    axes, name = figure.axes, _short_name(figure)
    title = axes.title.removeprefix(name).lstrip(":. ") or name
    is_trained = axes.y != "parameters"
    claim = axes.paper  # what the paper says, and the number of rows it trained on
    if claim and is_trained and axes.name in ("figure4", "figure5", "figure6", "table1"):
        claim += f" {PAPER_ROWS}"
    best = {}
    if is_trained and len(figure.conditions()) == 1:
        for network, members in by_network(figure.points).items():
            if points := [p for p in members if math.isfinite(p.loss)]:
                best[network] = _best(figure, points)
    of_network = panels(figure).values()
    is_drawn, is_cut = any(panel.lines for panel in of_network), any(panel.end for panel in of_network)
    return {
        "id": key,
        "name": name,
        "title": title[:1].upper() + title[1:],
        "trained": f"trained on {_trained_on([figure])}" if figure.points and is_trained else "",
        "claim": claim,
        "best": best,
        "points": figure.points,
        "drawn": figure_svgs(figure, looks) if is_drawn else {},
        "whole": figure_svgs(figure, looks, whole=True) if is_drawn and is_cut else {},
        "notes": _notes(figure) if figure.points else ["No point of this figure is trained yet"],
        "table": _hidden_layers(figure) if axes.name == "table1" and figure.points else None,
    }


def _best(figure: Figure, points: Sequence[Result]) -> str:
    """The best point of one network, those that tie with it, and its difference from the full tables."""
    axes, full = figure.axes, next((p for p in points if is_full(p)), None)
    ranked = sorted((p for p in points if not is_full(p)), key=lambda p: p.loss) or points[:1]
    best = ranked[0]
    where = f" at {axes.x_label} {best.x:,.6g}" if axes.x == "x" and best.x is not None else ""
    where = where or (f" at {words.count(best.parameters)} parameters" if axes.x == "parameters" else "")
    text = f"{best.series}{where}, test {words.mean_text(best.test_mean, best.test_sd, best.trials)}"
    if full is not None and best is not full and full.loss:
        change = best.loss / full.loss - 1
        tie = ", a tie" if is_clear(best, full) is False else ""
        text += f", {abs(change):.2%} {'above' if change >= 0 else 'below'} full tables{tie}"
    series = grouped(ranked, lambda point: point.series)
    clear = {name: is_clear(best, points[0]) for name, points in series.items() if name != best.series}
    if ties := [name for name, is_better in clear.items() if is_better is False]:
        text += f"; ties with {', '.join(ties)}"
    if clear and set(clear.values()) == {None}:
        text += f"; {'the others have ' * (best.trials > 1)}one trial, so whether it is a tie is not known"
    return text


def _notes(figure: Figure) -> list[str]:
    """What the plot does not show: lines on top of each other, and missing trials or points."""
    notes, shown = [], panels(figure)
    drawn = {id(p.point) for panel in shown.values() for line in panel.lines for p in line.places}
    texts = {name: coinciding(panel.lines, log=figure.axes.y_log) for name, panel in shown.items()}
    for text in dict.fromkeys(text for own in texts.values() for text in own):
        networks = " and ".join(words.network(name) for name, own in texts.items() if text in own)
        notes.append(f"Drawn on top of each other: {text} ({networks})")
    missing, failed = sum(p.missing for p in figure.points), sum(p.failed for p in figure.points)
    if missing:
        done = sum(sum(int(o.get("trials", 0)) for o in p.others.values()) or p.trials for p in figure.points)
        text = f"{missing:,} of {missing + done:,} trials are missing"
        notes.append(text + (f", {failed:,} of them failed" if failed else ""))
    if undrawn := len(figure.points) - len(drawn):
        short = ", since they trained for fewer steps than one mean of the loss takes" * (figure.axes.x == "step")
        notes.append(f"{undrawn:,} of {len(figure.points):,} points have nothing to draw{short}")
    return notes


def _hidden_layers(figure: Figure) -> dict[str, Any]:
    """Table 1: for each network its points by width, the best of them, and the paper's losses by width."""
    widths = sorted({point.x for point in figure.points if point.x is not None})
    rows = []
    for network, members in by_network(figure.points).items():
        points = {point.x: point for point in members}
        best = min((p for p in members if math.isfinite(p.loss)), key=lambda p: p.loss, default=None)
        rows.append((network, [points.get(width) for width in widths], best, TABLE_1_LOSSES.get(network, {})))
    return {"widths": widths, "rows": rows}


def _point(figure: Figure, data: str, point: Result) -> dict[str, Any]:
    """A point in the table of all points: by column, what to show and what to sort by."""
    name = ", ".join(point.runs) if figure.axes.name == "runs" else _short_name(figure)
    rows, seconds = figure.conditions_of(point).rows, point.seconds or None
    cells: dict[str, tuple[str, str | float | None]] = {
        "figure": (name, name),
        "data": (data, data),
        "rows": (f"{rows:,}", rows),
        "network": (words.network(point.network), point.network),
        "series": (point.series, point.series),
        "x": (words.NONE if point.x is None else f"{point.x:,.6g}", point.x),
        "test log loss": (words.mean_text(point.test_mean, point.test_sd, point.trials), point.test_mean),
        "AUC": (words.loss(point.auc_mean), point.auc_mean),
        "tables": (show_bytes(point.embedding_bytes), point.embedding_bytes),
        "parameters": (f"{point.parameters:,}", point.parameters),
        "time": (words.NONE if seconds is None else f"{seconds:,.3g} s", seconds),
        "optimizer": (words.optimizer(point.optimizer) or words.NONE, point.optimizer),
        "trials": (str(point.trials), point.trials),
    }
    return {"point": point, "cells": cells, "config": json.dumps(point.config, indent=1, sort_keys=True)}

"""The style of a series, the same in every figure: colours that colour-blind readers can tell apart, and marks.

The colours are those of Okabe and Ito, darkened for a light background and lightened for a dark one until each has a
contrast of three to one.
"""

from collections.abc import Iterable
from dataclasses import dataclass


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
    names = [name for name in FIXED if name in wanted] + [name for name in wanted if name not in FIXED]
    free = [*OTHERS, *(style for name, style in FIXED.items() if name not in names)]
    others = [name for name in names if name not in FIXED]
    return {name: FIXED[name] if name in FIXED else free[others.index(name) % len(free)] for name in names}

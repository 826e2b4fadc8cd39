"""Quality against bytes: the points no other point beats, and the method that wins at each size."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..figures import Figure, Result, grouped
from ..words import or_nan

WITHOUT_EFFECT = ("seed", "validate_every")  # options that do not make a different setting


class Win(NamedTuple):
    """The best point among tables of about ``2 ** power`` times the bytes of the full ones, ``low`` to ``high`` bytes.

    ``second`` is the best point of another series; None if there is no such.
    """

    power: int
    low: int
    high: int
    best: Result
    second: Result | None


def distinct(figures: Iterable[Figure]) -> list[Result]:
    """The points of all figures that have a test loss; a setting that is in several figures is listed once."""
    best: dict[str, Result] = {}
    for figure in figures:
        for point in figure.points:
            if math.isfinite(point.loss) and point.embedding_bytes > 0:
                config = {name: value for name, value in point.config.items() if name not in WITHOUT_EFFECT}
                best.setdefault(json.dumps([point.network, config], sort_keys=True), point)
    return list(best.values())


def front(points: Iterable[Result]) -> list[Result]:
    """The points that no other point beats: no other has at most as many bytes and a lower loss."""
    best: list[Result] = []
    for point in sorted(points, key=lambda p: (p.embedding_bytes, p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def winners(points: Sequence[Result]) -> list[Win]:
    """The best series at each size, the largest first; sizes are powers of two of the full tables' bytes.

    A point belongs to the nearest power, so that methods of equal collisions, whose bytes differ little, are compared.
    """
    full = [point.embedding_bytes for point in points if is_full(point)]
    whole = max(full or [point.embedding_bytes for point in points], default=1)
    sizes = grouped(points, lambda point: round(math.log2(point.embedding_bytes / whole)))
    wins = []
    for power in sorted(sizes, reverse=True):
        best, *others = sorted(sizes[power], key=lambda point: point.loss)
        second = next((point for point in others if point.series != best.series), None)
        num_bytes = [point.embedding_bytes for point in sizes[power]]
        wins.append(Win(power, min(num_bytes), max(num_bytes), best, second))
    return wins


def is_full(point: Result) -> bool:
    """Whether every table is full."""
    scheme = point.config.get("scheme")
    return isinstance(scheme, dict) and scheme.get("scheme") == "Full" and "plan" not in point.config


def is_clear(one: Result, other: Result) -> bool | None:
    """Whether two test losses differ by more than the sum of both deviations; None if one has a single trial."""
    if min(one.trials, other.trials) < 2:
        return None
    return abs(one.loss - other.loss) > or_nan(one.test_sd) + or_nan(other.test_sd)

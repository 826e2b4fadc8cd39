"""Quality against bytes: the points no other point beats, and the method that wins at each size."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..figures import Figure, Result, grouped
from ..words import or_nan

WITHOUT_EFFECT = ("seed", "validate_every")  # options that do not make a different setting


class Win(NamedTuple):
    """The best series among tables of about ``2 ** power`` times the bytes of the full ones, ``low`` to ``high`` bytes.

    ``second`` is the best point of another series, and ``clear`` whether the two losses differ by more than the sum of
    both deviations; each is None if there is no such.
    """

    power: int
    low: int
    high: int
    best: Result
    second: Result | None
    clear: bool | None

    @property
    def difference(self) -> float:
        """Test loss of the second minus that of the best."""
        return math.nan if self.second is None else or_nan(self.second.test_mean) - or_nan(self.best.test_mean)


def distinct(figures: Iterable[Figure]) -> list[Result]:
    """The points of all figures that have a test loss; a setting that is in several figures is listed once."""
    best: dict[str, Result] = {}
    for figure in figures:
        for point in figure.points:
            if math.isfinite(or_nan(point.test_mean)) and point.embedding_bytes > 0:
                config = {name: value for name, value in point.config.items() if name not in WITHOUT_EFFECT}
                best.setdefault(json.dumps([point.network, config], sort_keys=True), point)
    return list(best.values())


def front(points: Iterable[Result]) -> list[Result]:
    """The points that no other point beats: no other has at most as many bytes and a lower loss."""
    best: list[Result] = []
    for point in sorted(points, key=lambda p: (p.embedding_bytes, or_nan(p.test_mean))):
        if not best or or_nan(point.test_mean) < or_nan(best[-1].test_mean):
            best.append(point)
    return best


def winners(points: Sequence[Result]) -> list[Win]:
    """The best series at each size, the largest first; sizes are powers of two of the full tables' bytes.

    A point belongs to the nearest power, so that methods of equal collisions, whose bytes differ little, are compared.
    """
    full = [point.embedding_bytes for point in points if is_full(point)]
    whole = max(full or [point.embedding_bytes for point in points], default=1)
    sizes = grouped(points, lambda point: round(math.log2(point.embedding_bytes / whole)))
    return [_win(power, sizes[power]) for power in sorted(sizes, reverse=True)]


def is_full(point: Result) -> bool:
    """Whether every table is full."""
    scheme = point.config.get("scheme")
    return isinstance(scheme, dict) and scheme.get("scheme") == "Full" and "plan" not in point.config


def is_clear(one: Result, other: Result) -> bool | None:
    """Whether two test losses differ by more than the sum of both deviations; None if one has a single trial."""
    if min(one.trials, other.trials) < 2:
        return None
    apart = abs(or_nan(one.test_mean) - or_nan(other.test_mean))
    return apart > or_nan(one.test_sd) + or_nan(other.test_sd)


def _win(power: int, points: Sequence[Result]) -> Win:
    best, *others = sorted(points, key=lambda p: or_nan(p.test_mean))
    second = next((p for p in others if p.series != best.series), None)
    sizes = [point.embedding_bytes for point in points]
    return Win(power, min(sizes), max(sizes), best, second, None if second is None else is_clear(best, second))

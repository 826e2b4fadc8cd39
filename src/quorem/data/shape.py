"""The shape of the Criteo Kaggle click log (section 5): its columns, cardinalities and days."""

import numpy as np
from numpy.typing import NDArray

from ..checks import check_int

DENSE_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL_NAMES = tuple(f"C{i}" for i in range(1, 27))
COLUMN_NAMES = ("label", *DENSE_NAMES, *CATEGORICAL_NAMES)

# Number of distinct tokens of each categorical feature over the seven days, without NULL.
NUM_TOKENS = (
    *(1460, 583, 10131226, 2202607, 305, 23, 12517, 633, 3, 93145, 5683, 8351592, 3194),
    *(27, 14992, 5461305, 10, 5652, 2172, 3, 7046546, 17, 15, 286180, 104, 142571),
)
CARDINALITIES = tuple(n + 1 for n in NUM_TOKENS)
NUM_ROWS = 45_840_617
MOST_DAYS = 100_000


def scaled_cardinalities(scale: float) -> tuple[int, ...]:
    """The 26 cardinalities times ``scale``, but at least 100; those below 100 are not scaled.

    >>> scaled_cardinalities(0.001)[:4]
    (100, 100, 10131, 2203)
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale ({scale}) must be in (0, 1]")
    return tuple(max(min(n, 100), round(n * scale)) for n in CARDINALITIES)


def day_split(num_rows: int, days: int = 7, times: NDArray[np.float64] | None = None) -> dict[str, tuple[int, int]]:
    """Rows ``[start, stop)`` of each split: the last day is halved into validation and test (section 5.2).

    If the rising ``times`` of the rows are given, a split begins where the time changes.

    >>> day_split(45_840_617)["train"], day_split(80_000, days=5)["test"]
    ((0, 39291958), (72000, 80000))
    """
    check_int("days", days, 2, MOST_DAYS)
    last = _at_change(num_rows - num_rows // days, 0, num_rows, times)  # the other days have the rows left over
    middle = _at_change(last + -(-(num_rows - last) // 2), last, num_rows, times)
    return {"train": (0, last), "validation": (last, middle), "test": (middle, num_rows)}


def _at_change(row: int, first: int, stop: int, times: NDArray[np.float64] | None) -> int:
    """The first row from ``row`` on where the time changes, or the last before it; ``row`` if it never changes."""
    if times is None or row in (first, stop):
        return row
    before, after = (int(np.searchsorted(times, times[row - 1], side)) for side in ("left", "right"))
    return after if after < stop else before if before > first else row

"""Sorting rows by time, if the file has them in another order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .column import Column
from .folder import Folder, Progress, file_name

TIMES = "times.npy"  # scratch file with the times of the rows, in the order of the file


def by_time(
    folder: Folder, name: str, parts: dict[str, Column], bags: Sequence[str], report: Progress
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Sort the rows by time, unless they are in order already; rows with equal times keep their order.

    It needs memory for the order and for one column at a time: some twenty bytes per row.

    Args:
        folder: folder with labels, dense features, offsets of bags, and the times.
        name: name of the time column.
        parts: the categorical columns; sorting replaces them in this mapping.
        bags: the categorical columns with several values per row.
        report: called after each column.

    Returns:
        The sorted times, and a summary of them for ``meta.json``.
    """
    scratch = folder.partial / "scratch"
    times: NDArray[np.float64] = np.load(scratch / TIMES)
    steps_back = int(np.count_nonzero(np.diff(times) < 0))
    about = {"column": name, "first": float(times.min()), "last": float(times.max()), "steps_back": steps_back}
    if not steps_back:
        return times, about
    order = np.argsort(times, kind="stable")
    (scratch / "sorted").mkdir()
    for array in ("labels.npy", "dense.npy"):
        folder.reorder(array, order)
    for done, (part, column) in enumerate(list(parts.items()), 1):
        values = _reorder_bags(folder, part, order) if part in bags else order
        parts[part] = column.reordered(values, scratch / "sorted")
        report("sort", done / len(parts), len(order))
    return times[order], about


def _reorder_bags(folder: Folder, name: str, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rewrite the offsets of a column of bags for another order of rows; returns the new order of its values."""
    file = f"bags/{file_name(name)}.offsets.npy"
    old = np.load(folder.arrays[file].path)
    lengths = np.diff(old)[order]
    new = np.concatenate([[0], np.cumsum(lengths)])
    folder.arrays[file].path.unlink()
    folder.save(file, new)
    folder.arrays[file].close()
    return np.arange(new[-1]) + np.repeat(old[:-1][order] - new[:-1], lengths)

"""Write parsed rows, block by block, into a folder of arrays: labels, dense features and ids.

The file is parsed once. Labels and dense features are written to their arrays at once. Categories are written to
scratch files as codes, with separate words for each group of rows (``ids``), because the training days are known
only at the end. Then the words are given ids, and the codes are replaced by ids. So memory holds a group of rows or a
vocabulary, never the whole file.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files.provenance import versions
from . import shape
from .batches import ahead
from .columns import Columns
from .config import PrepareConfig
from .dense import Dense
from .folder import ArrayFile, Folder, Progress, file_name, offsets_file
from .ids import NULL, Column, write_vocabulary
from .malformed import Malformed, ParsedRows

GROUP_ROWS = 1 << 20
COLUMNS_AT_ONCE = 2
WEAVE_ROWS = 1 << 14  # rows of all columns that fit in the cache
TIMES = "times.npy"  # scratch file with the times of the rows, in the order of the file
LABEL, TIME = "\nlabel", "\ntime"  # parsed rows have labels and times, as numbers, under these names


def write(
    source: Path,
    out: Path,
    columns: Columns,
    rows: Iterable[ParsedRows],
    malformed: Malformed,
    config: PrepareConfig,
    separator: str = ",",
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the prepared folder ``out``; ``separator`` is that of the file, for later files of its kind.

    Raises:
        FileExistsError: if ``out`` exists and ``overwrite`` is False, or if it is not prepared data.
        ValueError: if there is no row, or too many lines are malformed.
        OSError: if the disk is full; the message says how many bytes are needed.
    """
    report = progress or (lambda stage, done, rows: None)
    with Folder(out, overwrite=overwrite) as folder:
        scratch = folder.partial / "scratch"
        scratch.mkdir()
        parts = {name: Column(name, scratch) for name in columns.categorical}
        dense = Dense(columns.dense, config.transform or "signed_log", config.transforms)
        checked = ahead(dense.checked(batch, malformed) for batch in rows)
        num_rows = _set_aside(folder, columns, parts, checked, dense, report)
        if num_rows == 0:
            raise ValueError(f"{source} has no well-formed rows ({malformed.count} malformed)")
        times = time_meta = None
        if columns.time is not None:
            times, time_meta = _sort_by_time(folder, columns, parts, report)
        split = shape.day_split(num_rows, config.days, times)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            encode = partial(_number, folder, columns.bags, split["train"][1], config)
            for cardinality in pool.map(encode, parts.values()):
                cardinalities.append(cardinality)
                report("number", len(cardinalities) / len(parts), num_rows)
        _weave(folder, [parts[name] for name in columns.single], num_rows, config, report)
        shutil.rmtree(scratch)
        folder.commit(
            {
                "num_rows": num_rows,
                "label": columns.label,
                "dense": list(columns.dense),
                "categorical": list(columns.categorical),
                "bags": list(columns.bags),
                "cardinalities": cardinalities,
                "split": {name: list(bounds) for name, bounds in split.items()},
                "day_starts": shape.day_starts(num_rows, config.days, times),
                "time": time_meta,
                "separator": separator,
                "multi_separator": columns.multi_separator,
                "positive": columns.positive,
                "missing": list(columns.missing),
                "transforms": dense.kinds,
                "clipped": dense.clipped,
                "null_id": NULL,
                "unknown_id": 1 if config.vocabulary == "train" else None,
                "first_token_id": None if config.ids == "raw" else config.first_token,
                "config": asdict(config),
                "malformed": {"count": malformed.count, "first": [list(pair) for pair in malformed.first]},
                "source": {"name": source.name, "bytes": source.stat().st_size},
                "versions": versions("polars"),
            }
        )


def _set_aside(
    folder: Folder,
    columns: Columns,
    parts: Mapping[str, Column],
    rows: Iterator[ParsedRows],
    dense: Dense,
    report: Progress,
) -> int:
    """Write labels, dense features and offsets of bags, and categories to scratch files; returns the number of rows."""
    labels = folder.array("labels.npy", np.uint8)
    numbers = folder.array("dense.npy", np.float32, (len(columns.dense),))
    times = ArrayFile(folder.partial / "scratch" / TIMES, np.float64)
    offsets = {name: folder.array(offsets_file(name), np.int64) for name in columns.bags}
    for array in offsets.values():
        array.append(np.zeros(1, np.int64))
    ends = dict.fromkeys(columns.bags, 0)
    group: list[list[pl.Series]] = []  # values of the next group of rows, one series per column
    grouped = 0

    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:

        def write_group() -> None:
            list(pool.map(Column.add, parts.values(), zip(*group, strict=True)))
            group.clear()

        for frame, _, done in rows:
            labels.append(frame[LABEL].to_numpy())
            numbers.append(dense.array(frame))
            if columns.time is not None:
                times.append(frame[TIME].to_numpy())
            for name in columns.bags:
                lengths = frame[name].list.len().fill_null(0).to_numpy()
                offsets[name].append(ends[name] + np.cumsum(lengths, dtype=np.int64))
                ends[name] += int(lengths.sum())
            group.append([_flat(frame[name]) for name in parts])
            if labels.rows - grouped >= GROUP_ROWS:
                write_group()
                grouped = labels.rows
            report("parse", done, labels.rows)
        if group:
            write_group()
    return labels.rows


def _flat(values: pl.Series) -> pl.Series:
    """Categories as text, with those of bags one after another."""
    if values.dtype == pl.List:
        values = values.filter(values.list.len() > 0).explode()
    return values.cast(pl.String)


def _sort_by_time(
    folder: Folder, columns: Columns, parts: dict[str, Column], report: Progress
) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Sort the rows by time, unless they are in order already; rows with equal times keep their order.

    It needs memory for the order and for one column at a time: some twenty bytes per row. The columns in ``parts`` are
    replaced by sorted ones.

    Returns:
        The sorted times, and a summary of them for ``meta.json``.
    """
    scratch = folder.partial / "scratch"
    times: NDArray[np.float64] = np.load(scratch / TIMES)
    steps_back = int(np.count_nonzero(np.diff(times) < 0))
    about = {"column": columns.time, "first": times.min().item(), "last": times.max().item(), "steps_back": steps_back}
    if not steps_back:
        return times, about
    order = np.argsort(times, kind="stable")
    (scratch / "sorted").mkdir()
    for array in ("labels.npy", "dense.npy"):
        folder.reorder(array, order)
    for done, (name, column) in enumerate(list(parts.items()), 1):
        values = _sort_offsets(folder, name, order) if name in columns.bags else order
        parts[name] = column.reordered(values, scratch / "sorted")
        report("sort", done / len(parts), len(order))
    return times[order], about


def _sort_offsets(folder: Folder, name: str, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rewrite the offsets of a column of bags for another order of rows; returns the new order of its values."""
    old = np.load(folder.partial / offsets_file(name))
    lengths = np.diff(old)[order]
    new = np.concatenate([[0], np.cumsum(lengths)])
    folder.save(offsets_file(name), new)
    return np.arange(new[-1]) + np.repeat(old[:-1][order] - new[:-1], lengths)


def _number(folder: Folder, bags: Sequence[str], num_train: int, config: PrepareConfig, column: Column) -> int:
    """Give a column its ids; write its counts, its vocabulary and the values of bags; returns its cardinality."""
    name = file_name(column.name)
    if column.name in bags:
        num_train = int(np.load(folder.partial / offsets_file(column.name), mmap_mode="r")[num_train])
    numbered = column.number(num_train, config)
    if numbered.raw is not None:
        folder.save(f"raw_ids/{name}.npy", numbered.raw)
    if numbered.tokens is not None:
        path = folder.partial / "vocabulary" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        write_vocabulary(path, numbered.tokens)
    folder.save_counts(column.name, numbered.counts)
    if column.name in bags:
        values = folder.array(f"bags/{name}.values.npy", _id_dtype(config))
        for group in range(len(column.num_values)):
            values.append(column.ids(group))
    return config.id_space if config.ids == "raw" else len(numbered.counts)


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, config: PrepareConfig, report: Progress) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", _id_dtype(config), (len(columns),))
    if not columns:
        array.append(np.empty((num_rows, 0)))
        return
    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
        for group, size in enumerate(columns[0].num_values):
            values = list(pool.map(partial(Column.ids, group=group), columns))
            for start in range(0, size, WEAVE_ROWS):
                array.append(np.stack([column[start : start + WEAVE_ROWS] for column in values], axis=1))
            report("write", array.rows / num_rows, num_rows)


def _id_dtype(config: PrepareConfig) -> type[np.integer[Any]]:
    return np.int64 if config.ids == "raw" else np.int32

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

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files.provenance import versions
from . import shape
from .batches import ahead
from .columns import Columns
from .config import RAW_IDS, PrepareConfig
from .dense import Dense
from .folder import Folder, Progress, file_name, offsets_file
from .ids import NULL, Column, write_vocabulary
from .malformed import Malformed, ParsedRows

GROUP_ROWS = 1 << 20
COLUMNS_AT_ONCE = 2
WEAVE_ROWS = 1 << 14  # rows of all columns that fit in the cache
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
        parts = {name: Column(name, scratch, config.id_dtype) for name in columns.categorical}
        dense = Dense(columns.dense, config.transform or "signed_log", config.transforms)
        checked = ahead(dense.checked(batch, malformed) for batch in rows)
        num_rows, times = _set_aside(folder, columns, parts, checked, dense, report)
        if num_rows == 0:
            raise ValueError(f"{source} has no well-formed rows ({malformed.count} malformed)")
        time_meta = order = None
        if times is not None:
            num_steps_back = int(np.count_nonzero(np.diff(times) < 0))
            time_meta = {"column": columns.time, "first": float(times.min()), "last": float(times.max())}
            time_meta["steps_back"] = num_steps_back
            if num_steps_back:
                order = np.argsort(times, kind="stable")  # rows with equal times keep their order
                times = times[order]
                for array in ("labels.npy", "dense.npy"):
                    folder.reorder(array, order)
        split = shape.day_split(num_rows, config.days, times)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            encode = partial(_number, folder, columns.bags, split["train"][1], config, order)
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
) -> tuple[int, NDArray[np.float64] | None]:
    """Write labels, dense features and offsets of bags, and categories to scratch files.

    Returns:
        The number of rows, and their times if there is such a column.
    """
    labels = folder.array("labels.npy", np.uint8)
    numbers = folder.array("dense.npy", np.float32, (len(columns.dense),))
    times = [np.empty(0)]
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
    return labels.rows, None if columns.time is None else np.concatenate(times)


def _flat(values: pl.Series) -> pl.Series:
    """Categories as text, with those of bags one after another."""
    if values.dtype == pl.List:
        values = values.filter(values.list.len() > 0).explode()
    return values.cast(pl.String)


def _sort_offsets(folder: Folder, name: str, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rewrite the offsets of a column of bags for another order of rows; returns the new order of its values."""
    old = np.load(folder.partial / offsets_file(name))
    lengths = np.diff(old)[order]
    new = np.concatenate([[0], np.cumsum(lengths)])
    folder.save(offsets_file(name), new)
    return np.arange(new[-1]) + np.repeat(old[:-1][order] - new[:-1], lengths)


def _number(
    folder: Folder,
    bags: Sequence[str],
    num_train: int,
    config: PrepareConfig,
    order: NDArray[np.int64] | None,
    column: Column,
) -> int:
    """Give a column its ids; write its counts, its vocabulary and the values of bags; returns its cardinality."""
    name = file_name(column.name)
    if column.name in bags:
        if order is not None:
            order = _sort_offsets(folder, column.name, order)
        num_train = int(np.load(folder.partial / offsets_file(column.name), mmap_mode="r")[num_train])
    numbered = column.number(num_train, config, order)
    if numbered.raw is not None:
        folder.save(f"raw_ids/{name}.npy", numbered.raw)
    if numbered.tokens is not None:
        path = folder.partial / "vocabulary" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        write_vocabulary(path, numbered.tokens)
    folder.save_counts(column.name, numbered.counts)
    if column.name in bags:
        folder.save(f"bags/{name}.values.npy", column.ids())
    return RAW_IDS if config.ids == "raw" else len(numbered.counts)


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, config: PrepareConfig, report: Progress) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", config.id_dtype, (len(columns),))
    if not columns:
        array.append(np.empty((num_rows, 0)))
        return
    for start in range(0, num_rows, WEAVE_ROWS):
        array.append(np.stack([column.ids(start, WEAVE_ROWS) for column in columns], axis=1))
        report("write", array.rows / num_rows, num_rows)

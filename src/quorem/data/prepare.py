"""Write parsed rows, block by block, into a folder of arrays: labels, dense features and ids.

The file is parsed once. Labels and dense features are written to their arrays at once. Categories are written to
scratch files as codes, with separate words for each group of rows (``ids``), because the training days are known
only at the end. Then the words are given ids, and the codes are replaced by ids. So memory holds a group of rows or a
vocabulary, never the whole file.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files.provenance import versions
from . import shape
from .batches import ahead
from .columns import Columns
from .config import PrepareConfig
from .folder import Folder, Progress, bag_file, file_name, new_folder
from .ids import Column, write_vocabulary
from .malformed import Malformed, ParsedRows
from .meta import Meta, Transform
from .prepared import Prepared
from .source import LABEL, TIME, Source
from .values import dense, flat

GROUP_ROWS = 1 << 20
COLUMNS_AT_ONCE = 2
WEAVE_ROWS = 1 << 14  # rows of all columns that fit in the cache


def prepare_columns(
    source: Source,
    out: str | os.PathLike[str],
    columns: Columns,
    config: PrepareConfig,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """``prepare_table`` with columns that ``choose_columns`` chose."""
    report = progress or (lambda stage, done, rows: None)
    transforms = dict.fromkeys(columns.dense, config.transform or "signed_log") | dict(config.transforms)
    if strangers := sorted(transforms.keys() - set(columns.dense)):
        raise ValueError(f"transforms ({', '.join(strangers)}) must be of dense columns ({', '.join(columns.dense)})")
    malformed = Malformed(str(source.path), config.max_malformed, source.unit)
    with new_folder(out, overwrite=overwrite) as folder:
        scratch = folder.partial / "scratch"
        scratch.mkdir()
        parts = [Column(name, scratch) for name in columns.categorical]
        rows = ahead(source.rows(columns, transforms, malformed))
        num_rows, times = _set_aside(folder, columns, parts, rows, transforms, report)
        if num_rows == 0:
            raise ValueError(f"{source.path} has no well-formed rows ({malformed.count} malformed)")
        if columns.positive is not None and not np.load(folder.partial / "labels.npy", mmap_mode="r").any():
            raise ValueError(_no_click(source, columns))
        steps_back, order = 0, None
        if times is not None and (steps_back := int(np.count_nonzero(np.diff(times) < 0))):
            order = np.argsort(times, kind="stable")  # rows with equal times keep their order
            times = times[order]
            for array in ("labels.npy", "dense.npy"):
                folder.reorder(array, order)
        split = shape.day_split(num_rows, config.days, times)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            work = partial(_number, folder, columns, split["train"][1], config, order)
            for cardinality in pool.map(work, parts):
                cardinalities.append(cardinality)
                report("number", len(cardinalities) / len(parts), num_rows)
        _weave(folder, [part for part in parts if part.name in columns.single], num_rows, report)
        shutil.rmtree(scratch)
        folder.commit(
            Meta(
                num_rows=num_rows,
                columns=replace(columns, time=None),
                cardinalities=cardinalities,
                split=split,
                transforms=transforms,
                separator=source.separator if source.is_csv else ",",  # predict recognizes Criteo's format by itself
                first_token_id=config.first_token,
                unknown_id=1 if config.vocabulary == "train" else None,
                config=asdict(config),
                versions=versions("polars"),
                malformed={"count": malformed.count, "first": malformed.first},
                time=columns.time,
                steps_back=steps_back,
                source={"name": source.path.name, "bytes": source.path.stat().st_size},
            )
        )
    return Prepared(out)


def _set_aside(
    folder: Folder,
    columns: Columns,
    parts: Sequence[Column],
    rows: Iterator[ParsedRows],
    transforms: dict[str, Transform],
    report: Progress,
) -> tuple[int, NDArray[np.float64] | None]:
    """Write labels, dense features and offsets of bags, and categories to scratch files.

    Returns the number of rows, and their times if there is such a column.
    """
    labels = folder.array("labels.npy", np.uint8)
    numbers = folder.array("dense.npy", np.float32, (len(columns.dense),))
    offsets = {name: folder.array(bag_file(name, "offsets"), np.int64) for name in columns.bags}
    for array in offsets.values():
        array.append(np.zeros(1, np.int64))
    times = [np.empty(0)]
    ends = dict.fromkeys(columns.bags, 0)
    group: list[list[pl.Series]] = []  # values of the next group of rows, one series per column
    grouped = 0

    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:

        def write_group() -> None:
            list(pool.map(Column.add, parts, zip(*group, strict=True)))
            group.clear()

        for frame, _, done in rows:
            labels.append(frame[LABEL].to_numpy())
            numbers.append(dense(frame, transforms))
            if columns.time is not None:
                times.append(frame[TIME].to_numpy())
            for name in columns.bags:
                lengths = frame[name].list.len().fill_null(0).to_numpy()
                offsets[name].append(ends[name] + np.cumsum(lengths, dtype=np.int64))
                ends[name] += int(lengths.sum())
            group.append([flat(frame[n]) if n in columns.bags else frame[n] for n in columns.categorical])
            if labels.rows - grouped >= GROUP_ROWS:
                write_group()
                grouped = labels.rows
            report("parse", done, labels.rows)
        if group:
            write_group()
    return labels.rows, None if columns.time is None else np.concatenate(times)


def _no_click(source: Source, columns: Columns) -> str:
    assert columns.label is not None
    values = source.first_rows([columns.label], 1000)[columns.label].unique(maintain_order=True).to_list()
    shown = ", ".join(map(repr, values[:5])) + ", ..." * (len(values) > 5)
    return (
        f"positive ({columns.positive!r}) must be a value of {columns.label}, or a bound such as '>=4' that some of its"
        f" values reach; it has {shown}"
    )


def _number(
    folder: Folder,
    columns: Columns,
    num_train: int,
    config: PrepareConfig,
    order: NDArray[np.int64] | None,
    column: Column,
) -> int:
    """Give a column its ids; write its counts, its vocabulary and the values of bags; returns its cardinality."""
    if column.name in columns.bags:
        if order is not None:
            order = _sort_bags(folder, column.name, order)
        num_train = int(np.load(folder.partial / bag_file(column.name, "offsets"), mmap_mode="r")[num_train])
    numbered = column.number(num_train, config, order)
    write_vocabulary(folder.partial / "vocabulary" / f"{file_name(column.name)}.txt", numbered.tokens)
    folder.save_counts(column.name, numbered.counts)
    if column.name in columns.bags:
        folder.save(bag_file(column.name, "values"), column.ids())
    return len(numbered.counts)


def _sort_bags(folder: Folder, name: str, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rewrite the offsets of a column of bags for another order of rows; returns the new order of its values."""
    old = np.load(folder.partial / bag_file(name, "offsets"))
    lengths = np.diff(old)[order]
    new = np.concatenate([[0], np.cumsum(lengths)])
    folder.save(bag_file(name, "offsets"), new)
    return np.arange(new[-1]) + np.repeat(old[:-1][order] - new[:-1], lengths)


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, report: Progress) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", np.int32, (len(columns),))
    if not columns:
        array.append(np.empty((num_rows, 0)))
        return
    for start in range(0, num_rows, WEAVE_ROWS):
        array.append(np.stack([column.ids(start, WEAVE_ROWS) for column in columns], axis=1))
        report("write", array.rows / num_rows, num_rows)

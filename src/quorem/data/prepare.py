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
from dataclasses import asdict

import numpy as np
import polars as pl

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
from .source import LABEL, Source
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
    progress: Progress | None = None,
) -> Prepared:
    """``prepare_table`` with columns that ``choose_columns`` chose."""
    report = progress or (lambda stage, done, rows: None)
    malformed = Malformed(str(source.path), config.max_malformed, source.unit)
    with new_folder(out) as folder:
        scratch = folder.partial / "scratch"
        scratch.mkdir()
        parts = [Column(name, scratch) for name in columns.categorical]
        transforms = dict.fromkeys(columns.dense, config.transform or "signed_log")
        rows = ahead(source.rows(columns, transforms, malformed))
        num_rows = _set_aside(folder, columns, parts, rows, transforms, report)
        if num_rows == 0:
            raise ValueError(f"{source.path} has no well-formed rows ({malformed.count} malformed)")
        split = shape.day_split(num_rows, config.days)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            for cardinality in pool.map(lambda part: _number(folder, columns, split["train"][1], config, part), parts):
                cardinalities.append(cardinality)
                report("number", len(cardinalities) / len(parts), num_rows)
        _weave(folder, [part for part in parts if part.name in columns.single], num_rows, report)
        shutil.rmtree(scratch)
        folder.commit(
            Meta(
                num_rows=num_rows,
                columns=columns,
                cardinalities=cardinalities,
                split=split,
                transforms=transforms,
                separator=source.separator if source.is_csv else ",",  # predict recognizes Criteo's format by itself
                first_token_id=config.first_token,
                unknown_id=1 if config.vocabulary == "train" else None,
                config=asdict(config),
                versions=versions("polars"),
                malformed={"count": malformed.count, "first": malformed.first},
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
) -> int:
    """Write labels, dense features and offsets of bags, and categories to scratch files; returns the number of rows."""
    labels = folder.array("labels.npy", np.uint8)
    numbers = folder.array("dense.npy", np.float32, (len(columns.dense),))
    offsets = {name: folder.array(bag_file(name, "offsets"), np.int64) for name in columns.bags}
    for array in offsets.values():
        array.append(np.zeros(1, np.int64))
    ends = dict.fromkeys(columns.bags, 0)
    group: list[list[pl.Series]] = []  # values of the next group of rows, one series per column
    grouped, any_click = 0, False

    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:

        def write_group() -> None:
            list(pool.map(Column.add, parts, zip(*group, strict=True)))
            group.clear()

        for frame, _, done in rows:
            any_click = any_click or 1 in frame[LABEL]
            labels.append(frame[LABEL].to_numpy())
            numbers.append(dense(frame, transforms))
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
    if labels.rows and columns.positive is not None and not any_click:
        raise ValueError(f"positive ({columns.positive!r}) must be a value, or a bound, of some of {columns.label}")
    return labels.rows


def _number(folder: Folder, columns: Columns, num_train: int, config: PrepareConfig, column: Column) -> int:
    """Give a column its ids; write its counts, its vocabulary and the values of bags; returns its cardinality."""
    if column.name in columns.bags:
        num_train = int(np.load(folder.partial / bag_file(column.name, "offsets"), mmap_mode="r")[num_train])
    numbered = column.number(num_train, config)
    write_vocabulary(folder.partial / "vocabulary" / f"{file_name(column.name)}.txt", numbered.tokens)
    folder.save_counts(column.name, numbered.counts)
    if column.name in columns.bags:
        folder.save(bag_file(column.name, "values"), column.ids())
    return len(numbered.counts)


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, report: Progress) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", np.int32, (len(columns),))
    if not columns:
        array.append(np.empty((num_rows, 0)))
        return
    for start in range(0, num_rows, WEAVE_ROWS):
        array.append(np.stack([column.ids(start, WEAVE_ROWS) for column in columns], axis=1))
        report("write", array.rows / num_rows, num_rows)

"""Write parsed rows, block by block, into a folder of arrays: labels, dense features and ids.

The file is parsed once. Labels and dense features are written to their arrays at once. Categories are written to
scratch files as codes, with separate words for each group of rows (``column``), because the training days are known
only at the end. Then the words are given ids, and the codes are replaced by ids. So memory holds a group of rows or a
vocabulary, never the whole file.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files.provenance import versions
from . import ids, ordering, shape
from .ahead import ahead
from .column import Column
from .columns import Columns
from .dense import Dense
from .folder import ArrayFile, Folder, Progress, file_name
from .malformed import Malformed, ParsedRows
from .meta import TRANSFORMS, Transform

GROUP_ROWS = 1 << 20
COLUMNS_AT_ONCE = 2
WEAVE_ROWS = 1 << 16
LABEL, TIME = "\nlabel", "\ntime"  # parsed rows have labels and times, as numbers, under these names


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(ids.IdConfig):
    """How a click log is prepared.

    Args:
        ids: how tokens are given ids: ``"frequency"``, ``"appearance"``, ``"hash"`` or ``"raw"`` (see ``IdConfig``).
        vocabulary: ``"all"`` has the tokens of all days; ``"train"`` has those of the training days, and all others
            share id 1.
        buckets: number of hashed ids per feature, with ``ids="hash"``.
        id_bits: with ``ids="raw"``, tables have ``2 ** id_bits`` ids; 40 if None.
        days: number of equal parts of the log. The last part is halved into validation and test; the others train.
        max_malformed: number of malformed lines that may be left out; with one more, the run stops.
        transform: transform of dense features: ``"log"``, ``log(max(x, 0) + 1)`` as in the paper; ``"signed_log"``,
            ``sign(x) log(|x| + 1)``; or ``"none"``. None means ``"log"`` for Criteo, ``"signed_log"`` for other tables.
        transforms: exceptions to ``transform``, by name of the dense feature.

    Raises:
        ValueError: if a value is out of range or unknown, or for a reason that ``IdConfig`` lists.

    >>> PrepareConfig(days=5, transform="none", transforms={"price": "log"}).ids
    'frequency'
    """

    days: int = 7
    max_malformed: int = 10
    transform: Transform | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        shape.check_days(self.days)
        if self.max_malformed < 0:
            raise ValueError(f"max_malformed ({self.max_malformed}) must be at least 0")
        for name, kind in {"transform": self.transform, **self.transforms}.items():
            if kind not in TRANSFORMS and not (kind is None and name == "transform"):
                known = ", ".join(map(repr, TRANSFORMS))
                raise ValueError(f"transform of {name} ({kind!r}) must be one of {known}")


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
        dense = Dense(columns.dense, config.transform or "log", config.transforms)
        checked = ahead(dense.checked(batch, malformed) for batch in rows)
        num_rows = _set_aside(folder, columns, parts, checked, dense, report)
        if num_rows == 0:
            raise ValueError(f"{source} has no well-formed rows ({malformed.count} malformed)")
        times = time_meta = None
        if columns.time is not None:
            times, time_meta = ordering.by_time(folder, columns.time, parts, columns.bags, report)
        split = shape.day_split(num_rows, config.days, times)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            encode = partial(_number, folder, columns.bags, split["train"][1], config)
            for cardinality in pool.map(encode, parts.values()):
                cardinalities.append(cardinality)
                report("number", len(cardinalities) / len(parts), num_rows)
        id_dtype = np.dtype(np.int64 if config.ids == "raw" else np.int32)
        _weave(folder, [parts[name] for name in columns.single], num_rows, id_dtype, report)
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
                "null_id": ids.NULL,
                "unknown_id": 1 if config.vocabulary == "train" else None,
                "first_token_id": None if config.ids in ("hash", "raw") else config.first_token,
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
    times = ArrayFile(folder.partial / "scratch" / ordering.TIMES, np.float64)
    offsets = {name: folder.array(f"bags/{file_name(name)}.offsets.npy", np.int64) for name in columns.bags}
    for array in offsets.values():
        array.append(np.zeros(1, np.int64))
    ends = dict.fromkeys(columns.bags, 0)
    grouped = 0
    threads = pl.thread_pool_size()
    waiting: list[list[pl.Series]] = []  # values of the next group of rows, one series per column
    writing: list[Future[None]] = []  # the group before it, which other threads write to scratch files

    def write_group() -> None:
        for future in writing:
            future.result()
        columns = zip(parts.values(), zip(*waiting, strict=True), strict=True)
        writing[:] = [writers.submit(column.add, values) for column, values in columns]
        waiting.clear()

    with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(threads) as writers:
        for frame, _, done in rows:
            labels.append(frame[LABEL].to_numpy())
            numbers.append(dense.array(frame))
            if columns.time is not None:
                times.append(frame[TIME].to_numpy())
            for name in columns.bags:
                lengths = frame[name].list.len().fill_null(0).to_numpy()
                offsets[name].append(ends[name] + np.cumsum(lengths, dtype=np.int64))
                ends[name] += int(lengths.sum())
            waiting.append(list(pool.map(compact, frame.select(*parts))))
            if labels.rows - grouped >= GROUP_ROWS:
                write_group()
                grouped = labels.rows
            report("parse", done, labels.rows)
        if waiting:
            write_group()
    for future in writing:
        future.result()
    for array in (labels, numbers, times, *offsets.values()):
        array.close()
    return labels.rows


def compact(values: pl.Series) -> pl.Series:
    """Categories in the form in which a ``Column`` stores them: integers, packed tokens or text; bags are flattened."""
    if values.dtype == pl.List:
        values = values.filter(values.list.len() > 0).explode()
    if values.dtype.is_integer() and values.dtype != pl.UInt64:
        return values.cast(pl.Int64)
    return ids.packed(values.cast(pl.String))


def _number(folder: Folder, bags: Sequence[str], num_train: int, config: PrepareConfig, column: Column) -> int:
    """Give a column its ids; write its counts, its vocabulary and the values of bags; returns its cardinality."""
    name = file_name(column.name)
    if column.name in bags:
        num_train = int(np.load(folder.partial / "bags" / f"{name}.offsets.npy", mmap_mode="r")[num_train])
    if config.ids == "raw":
        distinct, counts = column.number_raw(num_train)
        folder.save(f"raw_ids/{name}.npy", distinct)
        num_ids = config.id_space
    else:
        counts, tokens = column.number(num_train, config)
        if (num_ids := len(counts)) >= 2**31:
            raise ValueError(f"{column.name} has {num_ids:,} ids but ids must be below 2**31")
        if tokens is not None:
            path = folder.partial / "vocabulary" / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            ids.write_vocabulary(path, tokens)
    folder.save_counts(column.name, counts)
    if column.name in bags:
        values = folder.array(f"bags/{name}.values.npy", column.id_dtype)
        for group in range(len(column.num_values)):
            values.append(column.ids_of_words(group)[column.codes(group)])
    return num_ids


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, dtype: np.dtype[Any], report: Progress) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", dtype, (len(columns),))
    if not columns:
        array.append(np.empty((num_rows, 0), dtype))
        return
    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
        for group, size in enumerate(columns[0].num_values):
            rows_from = partial(_rows, [(column.ids_of_words(group), column.codes(group)) for column in columns])
            for rows in pool.map(rows_from, range(0, size, WEAVE_ROWS)):
                array.append(rows)
            report("write", array.rows / num_rows, num_rows)


def _rows(columns: Sequence[tuple[NDArray[Any], NDArray[Any]]], start: int) -> NDArray[Any]:
    """The ids ``[rows, F]`` of at most ``WEAVE_ROWS`` rows from ``start``; a column is its words' ids and its codes."""
    rows = np.empty((min(WEAVE_ROWS, len(columns[0][1]) - start), len(columns)), columns[0][0].dtype)
    for k, (ids_of_words, codes) in enumerate(columns):
        rows[:, k] = ids_of_words.take(codes[start : start + len(rows)])
    return rows

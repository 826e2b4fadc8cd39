"""Write parsed rows, block by block, into a folder of arrays: labels, dense features and ids.

The file is parsed once. Labels and dense features are written to their arrays at once; categories get their ids at the
end (``ids``), because only then the training days are known. So memory holds a group of rows or a vocabulary, never the
whole file.
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
from .config import PrepareConfig
from .folder import Folder, ProgressCallback, new_folder
from .ids import Column
from .malformed import Malformed, ParsedRows
from .meta import Columns, Meta
from .prepared import Prepared
from .source import LABEL, TIME, Source
from .values import dense

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
    progress: ProgressCallback | None = None,
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
        parts = [Column(folder, name, is_bag=name in columns.bags) for name in columns.categorical]
        rows = ahead(source.rows(columns, transforms, malformed))
        num_rows, times = _set_aside(folder, columns, parts, rows, report)
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
            work = partial(Column.number, num_train=split["train"][1], config=config, order=order)
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
    folder: Folder, columns: Columns, parts: Sequence[Column], rows: Iterator[ParsedRows], report: ProgressCallback
) -> tuple[int, NDArray[np.float64] | None]:
    """Write labels, dense features, and categories to scratch files; returns the number of rows, and any times."""
    labels = folder.array("labels.npy", np.uint8)
    numbers = folder.array("dense.npy", np.float32, (len(columns.dense),))
    times = [np.empty(0)]
    grouped = 0  # rows
    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
        for frame, _, done in rows:
            labels.append(frame[LABEL].to_numpy())
            numbers.append(dense(frame, columns.dense))
            if columns.time is not None:
                times.append(frame[TIME].to_numpy())
            for part in parts:
                part.add(frame[part.name])
            if labels.rows - grouped >= GROUP_ROWS:
                list(pool.map(Column.write_group, parts))
                grouped = labels.rows
            report("parse", done, labels.rows)
        if labels.rows > grouped:
            list(pool.map(Column.write_group, parts))
    return labels.rows, None if columns.time is None else np.concatenate(times)


def _no_click(source: Source, columns: Columns) -> str:
    assert columns.label is not None
    values = source.first_rows([columns.label], 1000)[columns.label].unique(maintain_order=True).to_list()
    shown = ", ".join(map(repr, values[:5])) + ", ..." * (len(values) > 5)
    rule = f"must be a value of {columns.label}, or a bound such as '>=4' that some of its values reach"
    return f"positive ({columns.positive!r}) {rule}; it has {shown}"


def _weave(folder: Folder, columns: Sequence[Column], num_rows: int, report: ProgressCallback) -> None:
    """Write the ids of all columns as one array ``[N, F]``."""
    array = folder.array("categorical.npy", np.int32, (len(columns),))
    for start in range(0, num_rows, WEAVE_ROWS):
        ids = [column.ids(start, WEAVE_ROWS) for column in columns]
        array.append(np.stack(ids, axis=1) if ids else np.empty((min(WEAVE_ROWS, num_rows - start), 0)))
        report("write", array.rows / num_rows, num_rows)

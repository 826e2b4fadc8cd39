"""From parsed rows to a folder of arrays: labels, dense features and ids are written, block by block.

The file is parsed once. Labels and dense features go straight to their arrays; tokens are set aside, because
the training days are known only at the end. Then one column at a time is read back, given ids, and at last
the columns are woven into rows. So memory holds one block, or one column, never the file.
"""

import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from . import ids, shape
from .folder import Folder, Progress, file_name
from .text import Malformed, Rows, ahead

ASIDE_ROWS = 1 << 20  # of a file of tokens
COLUMNS_AT_ONCE = 2
WEAVE_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(ids.IdConfig):
    """How a click log is prepared.

    Args:
        days: equal parts of the log; all but the last train, the last is halved into validation and test.
        max_malformed: malformed lines that are left out before the run stops.
        log_dense: dense features become ``log(max(x, 0) + 1)``; a missing one is 0 either way.

    Raises:
        ValueError: if a value is out of range, or as ``IdConfig`` says.
    """

    days: int = 7
    max_malformed: int = 10
    log_dense: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.days < 2:
            raise ValueError(f"days ({self.days}) must be at least 2")
        if self.max_malformed < 0:
            raise ValueError(f"max_malformed ({self.max_malformed}) must be at least 0")


@dataclass(frozen=True)
class Columns:
    """Which column is what; ``bags`` are the categorical columns with several values a row."""

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    bags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the names."""
        shape.check_names([self.label, *self.dense, *self.categorical], "names of columns")
        if not self.categorical:
            raise ValueError("categorical must name at least one column")

    @property
    def single(self) -> tuple[str, ...]:
        """The categorical columns with one value a row."""
        return tuple(name for name in self.categorical if name not in self.bags)


def write(
    source: Path,
    out: Path,
    columns: Columns,
    rows: Iterable[Rows],
    malformed: Malformed,
    config: PrepareConfig,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the prepared folder ``out``.

    Raises:
        FileExistsError: if ``out`` exists and is not to be, or must not be, overwritten.
        ValueError: if there is no row, or too many lines are malformed.
        OSError: if the disk is full; the message says how many bytes are needed.
    """
    report = progress or (lambda stage, done, rows: None)
    with Folder(out, overwrite=overwrite) as folder:
        scratch = folder.partial / "scratch"
        scratch.mkdir()
        checked = ahead(_checked(batch, columns, malformed) for batch in rows)
        num_rows = _set_aside(folder, columns, checked, config, report)
        if num_rows == 0:
            raise ValueError(f"{source} has no well-formed rows ({malformed.count} malformed)")
        split = shape.day_split(num_rows, config.days)
        cardinalities = []
        with ThreadPoolExecutor(COLUMNS_AT_ONCE) as pool:
            encode = partial(_encode_column, folder, columns.bags, split["train"][1], config)
            for cardinality in pool.map(encode, columns.categorical):
                cardinalities.append(cardinality)
                report("encode", len(cardinalities) / len(columns.categorical), num_rows)
        for block in scratch.glob("*.arrow"):
            block.unlink()
        _weave(folder, [scratch / f"{file_name(name)}.ids" for name in columns.single], num_rows, report)
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
                "day_starts": shape.day_starts(num_rows, config.days),
                "null_id": ids.NULL,
                "unknown_id": 1 if config.vocabulary == "train" else None,
                "first_token_id": None if config.ids == "hash" else config.first_token,
                "config": asdict(config),
                "malformed": {"count": malformed.count, "first": [list(found) for found in malformed.first]},
                "source": {"name": source.name, "bytes": source.stat().st_size},
                "versions": versions(),
            }
        )


def versions() -> dict[str, str]:
    """What prepared the data."""
    return {
        "quorem": version("quorem"),
        "polars": pl.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _set_aside(folder: Folder, columns: Columns, rows: Iterator[Rows], config: PrepareConfig, report: Progress) -> int:
    """Write labels and dense features, put tokens aside; return the number of rows."""
    labels = folder.array("labels.npy", np.uint8)
    dense = folder.array("dense.npy", np.float32, (len(columns.dense),))
    row_bytes = 1 + 4 * len(columns.dense) + 8 * len(columns.single)
    done, aside, waiting = 0.0, 0, Waiting(folder.partial / "scratch")
    folder.bytes_needed = lambda: round((row_bytes * labels.rows + aside) / done) if done else 0
    with ThreadPoolExecutor(pl.thread_pool_size()) as pool:
        for frame, _, part in rows:
            labels.append(frame[columns.label].fill_null(0).cast(pl.UInt8).to_numpy())
            dense.append(dense_array(frame, columns.dense, config.log_dense))
            tokens = pl.DataFrame(list(pool.map(compact, frame.select(columns.categorical))))
            waiting.add(tokens)
            done, aside = part, aside + int(tokens.estimated_size())
            folder.check_space()
            report("parse", done, labels.rows)
        waiting.flush()
    return labels.rows


class Waiting:
    """Frames of tokens that are to be written together: few large files are read back faster than many small ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.frames, self.files = folder, list[pl.DataFrame](), 0

    def add(self, frame: pl.DataFrame) -> None:
        """Keep a frame, and write those kept once they are many rows or of another type."""
        if self.frames and self.frames[0].schema != frame.schema:
            self.flush()
        self.frames.append(frame)
        if sum(frame.height for frame in self.frames) >= ASIDE_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the frames kept."""
        if self.frames:
            pl.concat(self.frames).write_ipc(self.folder / f"{self.files:06}.arrow")
            self.frames, self.files = [], self.files + 1


def _checked(batch: Rows, columns: Columns, malformed: Malformed) -> Rows:
    """The rows whose label is 0, 1 or missing and whose dense features are finite or missing."""
    frame, numbers, done = batch
    reasons = {f"{columns.label} is neither 0 nor 1": (pl.col(columns.label) != 0) & (pl.col(columns.label) != 1)}
    for name in columns.dense:
        if frame[name].dtype.is_float():
            reasons[f"{name} is not finite"] = pl.col(name).is_infinite()
    for reason, condition in reasons.items():
        bad = frame.select(condition.fill_null(False)).to_series()
        if bad.any():
            malformed.add(numbers[bad.to_numpy()], [reason] * int(bad.sum()))
            frame, numbers = frame.filter(~bad), numbers[~bad.to_numpy()]
    return Rows(frame, numbers, done)


def dense_array(frame: pl.DataFrame, names: Sequence[str], log: bool) -> NDArray[np.float32]:
    """The dense features ``[N, F]``: 0 where missing, and ``log(max(x, 0) + 1)`` if asked for."""
    if not names:
        return np.empty((frame.height, 0), np.float32)
    values = frame.select(pl.col(names).cast(pl.Float64).fill_nan(None).fill_null(0)).to_numpy(order="c")
    if log:
        values = np.log1p(np.maximum(values, 0))
    return values.astype(np.float32)


def compact(values: pl.Series) -> pl.Series:
    """A categorical column as it is set aside: integers, hex digits as UInt32, text, or lists of text."""
    if values.dtype == pl.List:
        return values
    return values.cast(pl.Int64) if values.dtype.is_integer() else ids.hex_or_text(values)


def _encode_column(folder: Folder, bags: Sequence[str], num_train: int, config: PrepareConfig, name: str) -> int:
    """Give a column its ids, write its counts and vocabulary; return its cardinality."""
    scratch, plain, bag = folder.partial / "scratch", file_name(name), name in bags
    values = _read_back(scratch, name)
    if bag:
        lengths = values.list.len().fill_null(0).to_numpy()
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        num_train = int(offsets[num_train])
        values = values.filter(pl.Series(lengths > 0)).explode()
        folder.save(f"bags/{plain}.offsets.npy", offsets)
    encoded = ids.encode(values, num_train, config)
    if len(encoded.counts) >= 2**31:
        raise ValueError(f"{name} has {len(encoded.counts):,} ids but ids must be below 2**31")
    folder.save(f"counts/{plain}.npy", encoded.counts)
    if encoded.tokens is not None:
        path = folder.partial / "vocabulary" / f"{plain}.txt"
        path.parent.mkdir(exist_ok=True)
        ids.write_vocabulary(path, encoded.tokens)
    if bag:
        folder.save(f"bags/{plain}.values.npy", encoded.ids)
    else:
        with open(scratch / f"{plain}.ids", "wb") as file:
            file.write(encoded.ids.data)
    return len(encoded.counts)


def _read_back(scratch: Path, name: str) -> pl.Series:
    parts = [pl.read_ipc(path, columns=[name]).to_series() for path in sorted(scratch.glob("*.arrow"))]
    if len({part.dtype for part in parts}) > 1:  # some blocks have other tokens than eight hex digits
        parts = [ids.as_text(part) for part in parts]
    return pl.concat(parts)


def _weave(folder: Folder, paths: Sequence[Path], num_rows: int, report: Progress) -> None:
    """Write the columns' ids as rows ``[N, F]``."""
    array = folder.array("categorical.npy", np.int32, (len(paths),))
    files = [open(path, "rb") for path in paths]  # noqa: SIM115 - closed below
    try:
        for start in range(0, num_rows, WEAVE_ROWS):
            rows = np.empty((min(WEAVE_ROWS, num_rows - start), len(paths)), np.int32)
            for k, file in enumerate(files):
                rows[:, k] = np.frombuffer(file.read(4 * len(rows)), np.int32)
            array.append(rows)
            report("write", (start + len(rows)) / num_rows, num_rows)
    finally:
        for file in files:
            file.close()

"""The synthetic click log as text: in the format of the Criteo file, or as CSV, to try ``quorem prepare`` on."""

import gzip
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files import atomic as files
from .folder import Progress
from .synthetic import CHUNK_ROWS, MISSING, WRITE_ROWS, Chunk, ClickLog, in_threads, is_csv

HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def write_raw(
    log: ClickLog,
    num_rows: int,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the first rows of a log as lines of label, counts and tokens, separated by tabs; missing ones are empty.

    A token is eight hex digits, different for every id of a feature. A file whose name ends in ``.gz`` is compressed.
    One whose name ends in ``.csv`` or ``.csv.gz`` has commas instead of tabs, and a header line (``click,I1,...``).

    Args:
        log: the hidden model.
        num_rows: number of rows.
        path: file to write.
        overwrite: replace an existing file.
        progress: called with the stage, the fraction of it that is done, and the rows so far.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False.
        ValueError: if ``num_rows`` is below 1.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> write_raw(ClickLog(cardinalities=(10, 10), num_dense=1), 3, path)
    >>> path.read_text().splitlines()[0]
    'click,I1,C1,C2'
    """
    path = Path(path)
    if num_rows < 1:
        raise ValueError(f"num_rows ({num_rows}) must be at least 1")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another name, or overwrite=True (--overwrite)")

    names = [f"I{k + 1}" for k in range(log.num_dense)] + [f"C{k + 1}" for k in range(len(log.cardinalities))]
    separator = "," if is_csv(path) else "\t"

    def text(start: int) -> bytes:
        chunk = Chunk(*(part[..., : num_rows - start] for part in log.chunk(start)))
        frame = frame_of(chunk, names)
        return frame.write_csv(separator=separator, include_header=is_csv(path) and start == 0).encode()

    packed = path.suffix == ".gz"
    with files.replacing(path) as plain, gzip.GzipFile("", "wb", 6, plain) if packed else nullcontext(plain) as file:
        for start in range(0, num_rows, WRITE_ROWS):
            stop = min(start + WRITE_ROWS, num_rows)
            file.writelines(in_threads(text, range(start, stop, CHUNK_ROWS)))
            if progress is not None:
                progress("draw", stop / num_rows, stop)


def frame_of(chunk: Chunk, names: Sequence[str]) -> pl.DataFrame:
    """Label, counts and tokens of some rows; what is missing is null."""
    frame = pl.DataFrame({"click": chunk.labels.numpy().astype(np.uint8)})
    counts = [pl.Series(count).replace(MISSING, None) for count in chunk.counts.numpy()]
    tokens = [tokens_of(ids, feature) for feature, ids in enumerate(chunk.ids.numpy())]
    return frame.with_columns(values.alias(name) for name, values in zip(names, counts + tokens, strict=True))


def tokens_of(ids: NDArray[np.int64], feature: int) -> pl.Series:
    """Eight hex digits for each id of a feature; null for the missing value, id 0.

    >>> tokens_of(np.array([0, 10]), 0).to_list()
    [None, 'c4213245']
    """
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    digits = HEX_DIGITS[(token(ids, feature)[:, None] >> shifts) & np.uint32(15)]
    return pl.Series(digits.view("S8")[:, 0].astype(str)).set(pl.Series(ids == 0), None)


def token(ids: NDArray[np.int64], feature: int) -> NDArray[np.uint32]:
    """A 32-bit number for each id of a feature; distinct ids have distinct numbers, since every step can be undone.

    >>> len(set(token(np.arange(1000), 3).tolist()))
    1000
    """
    x = ids.astype(np.uint32) + np.uint32(feature * 0x3C6EF372 & 0xFFFFFFFF)
    for shift, factor in ((15, 0x9E3779B1), (13, 0x85EBCA77)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))

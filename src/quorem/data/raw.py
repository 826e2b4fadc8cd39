"""The synthetic click log as text: in the format of the Criteo file, or as CSV, to try ``quorem prepare`` on."""

import gzip
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import polars as pl

from ..checks import check_int
from ..files import atomic as files
from .folder import ProgressCallback
from .synthetic import CHUNK_ROWS, MISSING, WRITE_ROWS, Chunk, ClickLog, in_threads


def write_raw(
    log: ClickLog,
    num_rows: int,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Write the first rows of a log as lines of label, counts and tokens, separated by tabs; missing ones are empty.

    The token of an id is "c" and its digits. A file whose name ends in ``.gz`` is compressed. One whose name ends in
    ``.csv`` or ``.csv.gz`` has commas instead of tabs, and a header line (``click,I1,...``).

    Args:
        log: the hidden model.
        num_rows: number of rows.
        path: file to write.
        overwrite: replace an existing file.
        progress: called with the stage, the fraction of it that is done, and the rows so far.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> write_raw(ClickLog(cardinalities=(10, 10), num_dense=1), 3, path)
    >>> path.read_text().splitlines()[0]
    'click,I1,C1,C2'
    """
    path = Path(path)
    check_int("num_rows", num_rows)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another name, or overwrite=True (--overwrite)")
    is_csv = path.name.endswith((".csv", ".csv.gz"))

    def text(start: int) -> bytes:
        chunk = Chunk(*(part[..., : num_rows - start] for part in log.chunk(start)))
        columns = [pl.Series("click", chunk.labels.numpy().astype(np.uint8))]
        columns += [pl.Series(f"I{k}", each).replace(MISSING, None) for k, each in enumerate(chunk.counts.numpy(), 1)]
        for k, ids in enumerate(chunk.ids.numpy(), 1):
            tokens = "c" + pl.Series(ids).replace(0, None).cast(pl.String)
            columns.append(tokens.alias(f"C{k}"))
        frame = pl.DataFrame(columns)
        return frame.write_csv(separator="," if is_csv else "\t", include_header=is_csv and start == 0).encode()

    packed = path.suffix == ".gz"
    with files.replacing(path) as plain, gzip.GzipFile("", "wb", 6, plain) if packed else nullcontext(plain) as file:
        for start in range(0, num_rows, WRITE_ROWS):
            stop = min(start + WRITE_ROWS, num_rows)
            file.writelines(in_threads(text, range(start, stop, CHUNK_ROWS)))
            if progress is not None:
                progress("draw", stop / num_rows, stop)

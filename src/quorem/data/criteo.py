"""``quorem prepare criteo``: the Kaggle display advertising file (section 5.2), plain or gzip."""

import os
from dataclasses import replace
from pathlib import Path

import polars as pl

from . import shape
from .config import PrepareConfig
from .folder import ProgressCallback
from .meta import Columns
from .prepare import prepare_columns
from .prepared import Prepared
from .source import Source
from .text import BLOCK_BYTES, TextFile

COLUMNS = Columns("label", shape.DENSE_NAMES, shape.CATEGORICAL_NAMES, missing=())


def prepare_criteo(
    raw: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Prepared:
    """Turn the Criteo file into memory-mapped arrays, vocabularies and ``meta.json``.

    Args:
        raw: plain or gzip file; each line has a label, 13 numbers and 26 tokens, separated by tabs, empty if missing.
        out: folder to write; it appears under this name only once it is complete.
        config: ids, vocabulary, days and the limit of malformed lines.
        overwrite: as in ``prepare_table``.
        progress: as in ``prepare_table``.
        block_bytes: as in ``prepare_table``.

    Raises:
        FileExistsError: if ``out`` exists, and is not prepared data that may be overwritten.
        ValueError: if the file is empty, damaged, or has more malformed lines than the limit.

    >>> import tempfile
    >>> from quorem.data.raw import write_raw
    >>> from quorem.data.synthetic import ClickLog
    >>> folder = tempfile.mkdtemp()
    >>> write_raw(ClickLog(cardinalities=(100,) * 26), 70, f"{folder}/train.txt")
    >>> prepare_criteo(f"{folder}/train.txt", f"{folder}/criteo").meta.split
    {'train': (0, 60), 'validation': (60, 65), 'test': (65, 70)}
    """
    config = config or PrepareConfig()
    config = replace(config, transform=config.transform or "log")
    source = criteo_source(TextFile(Path(raw), block_bytes))
    return prepare_columns(source, out, COLUMNS, config, overwrite=overwrite, progress=progress)


def criteo_source(text: TextFile) -> Source:
    """A file in Criteo's format; the first line tells whether lines begin with a label."""
    is_labelled = text.head.partition(b"\n")[0].count(b"\t") != len(shape.COLUMN_NAMES) - 2
    names = shape.COLUMN_NAMES if is_labelled else shape.COLUMN_NAMES[1:]
    return Source(text.path, dict.fromkeys(names, pl.String()), text, "\t", is_csv=False)

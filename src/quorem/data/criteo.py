"""``quorem prepare criteo``: the Kaggle display advertising file (section 5.2), plain or gzip."""

import os
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from . import shape
from .columns import Columns
from .folder import Progress
from .prepare import PrepareConfig, write
from .prepared import Prepared
from .text import BLOCK_BYTES, Malformed, ParsedRows, TextLayout, blocks, parse

TYPES = {name: pl.String if name in shape.CATEGORICAL_NAMES else pl.Int64 for name in shape.COLUMN_NAMES}
LAYOUT = TextLayout(shape.COLUMN_NAMES, TYPES)
COLUMNS = Columns("label", shape.DENSE_NAMES, shape.CATEGORICAL_NAMES)


def prepare_criteo(
    raw: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Prepared:
    """Turn the Criteo file into memory-mapped arrays, vocabularies and ``meta.json``.

    Args:
        raw: plain or gzip file; each line has a label, 13 integers and 26 tokens, separated by tabs, empty if missing.
        out: folder to write; it appears under this name only once it is complete.
        config: ids, vocabulary, days and the limit of malformed lines.
        overwrite: replace prepared data in ``out``.
        progress: called with the stage, the fraction of it that is done, and the rows so far.
        block_bytes: bytes of text parsed at a time; changes memory and speed, not the result.

    Raises:
        FileExistsError: if ``out`` exists and ``overwrite`` is False, or if it is not prepared data.
        ValueError: if the file is empty, damaged, or has more malformed lines than the limit.
        OSError: if the disk is full.

    >>> import tempfile
    >>> from quorem.data.raw import write_raw
    >>> from quorem.data.synthetic import ClickLog
    >>> folder = tempfile.mkdtemp()
    >>> write_raw(ClickLog(cardinalities=(100,) * 26), 70, f"{folder}/train.txt")
    >>> prepare_criteo(f"{folder}/train.txt", f"{folder}/criteo").meta["split"]
    {'train': [0, 60], 'validation': [60, 65], 'test': [65, 70]}
    """
    source, config = Path(raw), config or PrepareConfig()
    malformed = Malformed(str(source), config.max_malformed)
    rows = (parse(block, LAYOUT, malformed) for block in blocks(source, size=block_bytes))
    write(source, Path(out), COLUMNS, rows, malformed, config, overwrite=overwrite, progress=progress)
    return Prepared(out)


def read_features(
    raw: str | os.PathLike[str], malformed: Malformed, block_bytes: int = BLOCK_BYTES
) -> Iterator[ParsedRows]:
    """The rows of a file in Criteo's format, with or without labels, a block at a time, for an ``Encoder``.

    Raises:
        ValueError: if the file is empty, damaged, or has more malformed lines than the limit.
    """
    source, layout = Path(raw), LAYOUT
    for block in blocks(source, size=block_bytes):
        if block.first_line == 1 and block.data.partition(b"\n")[0].count(b"\t") == len(shape.COLUMN_NAMES) - 2:
            layout = TextLayout(shape.COLUMN_NAMES[1:], {name: TYPES[name] for name in shape.COLUMN_NAMES[1:]})
        rows = parse(block, layout, malformed)
        yield rows._replace(frame=rows.frame.select(shape.COLUMN_NAMES[1:]))

"""``quorem prepare criteo``: the Kaggle display advertising file (section 5.2), plain or gzip."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from . import shape
from .columns import Columns
from .config import PrepareConfig
from .folder import Progress
from .malformed import Malformed, ParsedRows
from .prepare import LABEL, write
from .prepared import Prepared
from .text import BLOCK_BYTES, TextFile, TextLayout, parse

TYPES = {name: pl.String if name in shape.CATEGORICAL_NAMES else pl.Int64 for name in shape.COLUMN_NAMES}
COLUMNS = Columns("label", shape.DENSE_NAMES, shape.CATEGORICAL_NAMES, missing=())


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
    rows = read_criteo(TextFile(source, block_bytes), malformed)
    write(source, Path(out), COLUMNS, rows, malformed, config, overwrite=overwrite, progress=progress)
    return Prepared(out)


def read_criteo(text: TextFile, malformed: Malformed) -> Iterator[ParsedRows]:
    """The rows of a file in Criteo's format, a block at a time, for ``write`` or an ``Encoder``.

    Labels are in the column ``LABEL``, which is absent if the lines have no labels. A missing label is 0.

    Raises:
        ValueError: if the file is damaged, or has more malformed lines than the limit.
    """
    is_labelled, label = has_labels(text), pl.col("label")
    names: Sequence[str] = shape.COLUMN_NAMES if is_labelled else shape.COLUMN_NAMES[1:]
    for rows in parse(text.chunks(), TextLayout(names, {name: TYPES[name] for name in names}), malformed):
        if not is_labelled:
            yield rows
            continue
        checked = malformed.filtered(rows, "label", "must be 0 or 1", (label != 0) & (label != 1))
        frame = checked.frame.select(*names[1:], label.fill_null(0).cast(pl.UInt8).alias(LABEL))
        yield checked._replace(frame=frame)


def has_labels(text: TextFile) -> bool:
    """Whether the lines of a file in Criteo's format begin with a label, judged by the first."""
    return text.head.data.partition(b"\n")[0].count(b"\t") != len(shape.COLUMN_NAMES) - 2

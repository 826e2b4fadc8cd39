"""``quorem prepare table``: any CSV or Parquet file with a label, dense and categorical columns."""

import os
from collections.abc import Sequence
from pathlib import Path

from .config import PrepareConfig
from .folder import ProgressCallback
from .infer import choose_columns
from .meta import MISSING, Columns
from .prepare import prepare_columns
from .prepared import Prepared
from .source import open_source
from .text import BLOCK_BYTES


def prepare_table(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    label: str,
    dense: Sequence[str] = (),
    categorical: Sequence[str] = (),
    multi: Sequence[str] = (),
    time: str | None = None,
    positive: str | None = None,
    missing: Sequence[str] = MISSING,
    multi_separator: str = "|",
    separator: str | None = None,
    config: PrepareConfig | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Prepared:
    """Turn a table into memory-mapped arrays, vocabularies and ``meta.json``, as ``prepare_criteo`` does.

    Args:
        file: CSV with a header line (plain or gzip), or Parquet (a name that ends in ``.parquet``).
        out: folder to write; it appears under this name only once it is complete.
        label: column of 0 and 1, or of true and false; with ``positive``, of any values.
        dense: numeric columns.
        categorical: columns of text or integers. If neither this nor ``dense`` is given, ``choose_columns`` decides
            for all columns.
        multi: the columns of ``categorical`` with several values per row: lists, or text that is split. List columns
            of a Parquet file need not be named. A missing list is an empty bag.
        time: column of numbers, dates or times by which the rows are sorted, if they are not, and split.
        positive: the value of ``label`` that is a click, all others being none; or the least one, as in ``">=4"``.
        missing: texts that stand for a missing value, besides the empty one.
        multi_separator: separator between the values of a multi-valued field.
        separator: separator between the fields of a CSV file; None means the first of ``, ; tab |`` that makes
            ``label`` a column.
        config: ids, vocabulary, days, the dense transform and the limit of malformed lines.
        overwrite: replace prepared data in ``out``.
        progress: called with the stage, the fraction of it that is done, and the rows so far.
        block_bytes: bytes of text parsed at a time; changes memory and speed, not the result.

    Raises:
        FileExistsError: if ``out`` exists, and is not prepared data that may be overwritten.
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> rows = ["click,user,price", *(f"{i % 2},u{i % 3},{i}.5" for i in range(70))]
    >>> _ = Path(folder, "clicks.csv").write_text("\\n".join(rows))
    >>> columns = {"label": "click", "categorical": ["user"], "dense": ["price"]}
    >>> prepare_table(f"{folder}/clicks.csv", f"{folder}/clicks", **columns).vocabulary("user")
    [None, 'u0', 'u1', 'u2']
    """
    source = open_source(Path(file), separator, label, block_bytes)
    features = (tuple(dense), tuple(categorical), tuple(multi))
    named = Columns(label, *features, multi_separator, positive, tuple(missing), time)
    columns, _, _ = choose_columns(source, named)
    return prepare_columns(source, out, columns, config or PrepareConfig(), overwrite=overwrite, progress=progress)

"""``quorem prepare table``: any CSV or Parquet file with a label, dense and categorical columns."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from .columns import Columns, choose_columns
from .config import PrepareConfig
from .folder import Progress
from .malformed import Malformed, ParsedRows
from .prepare import LABEL, TIME, write
from .prepared import Prepared
from .source import Source, open_source
from .text import BLOCK_BYTES
from .values import MISSING, category, category_lists, clicks, label_rule, time_numbers


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
    progress: Progress | None = None,
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
        time: column of numbers, dates or times by which the rows are split; rows are sorted if they are not in order.
        positive: the value of ``label`` that is a click, all others being none; or a bound, as in ``">=4"``.
        missing: texts that stand for a missing value, besides the empty one.
        multi_separator: separator between the values of a multi-valued field.
        separator: separator between the fields of a CSV file; None means the first of ``, ; tab |`` that makes
            ``label`` a column.
        config: ids, vocabulary, days, the dense transforms and the limit of malformed lines.
        overwrite: replace prepared data in ``out``.
        progress: called with the stage, the fraction of it that is done, and the rows so far.
        block_bytes: bytes of text parsed at a time; changes memory and speed, not the result.

    Raises:
        FileExistsError: if ``out`` exists and ``overwrite`` is False, or if it is not prepared data.
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.
        OSError: if the disk is full.

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
    named = Columns(label, *features, time, multi_separator, positive, tuple(missing))
    columns = choose_columns(source, named).columns
    return prepare_columns(source, out, columns, config, overwrite=overwrite, progress=progress)


def prepare_columns(
    source: Source,
    out: str | os.PathLike[str],
    columns: Columns,
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """``prepare_table`` with columns that ``choose_columns`` chose."""
    config = config or PrepareConfig()
    malformed = Malformed(str(source.path), config.max_malformed, source.unit)
    rows = _with_clicks(source, columns, read_columns(source, columns, malformed))
    separator = source.separator if source.quoted else ","  # predict recognizes Criteo's format by itself
    write(source.path, Path(out), columns, rows, malformed, config, separator, overwrite=overwrite, progress=progress)
    return Prepared(out)


def _with_clicks(source: Source, columns: Columns, rows: Iterator[ParsedRows]) -> Iterator[ParsedRows]:
    """The same rows; raises ValueError at their end if ``positive`` was given and none is a click."""
    any_click = columns.positive is None
    for batch in rows:
        any_click = any_click or 1 in batch.frame[LABEL]
        yield batch
    if not any_click and columns.label is not None:
        values = source.first_rows([columns.label], 1000)[columns.label].unique(maintain_order=True).to_list()
        shown = ", ".join(map(repr, values[:5])) + ", ..." * (len(values) > 5)
        raise ValueError(
            f"positive ({columns.positive!r}) must be a value of {columns.label}, or a bound such as '>=4' that some of"
            f" its values reach; it has {shown}"
        )


def read_columns(source: Source, columns: Columns, malformed: Malformed) -> Iterator[ParsedRows]:
    """The rows of a table, a block at a time, for ``write`` or an ``Encoder``.

    Numbers become floats, categories text, and bags lists of text. Labels and times are in the columns
    ``LABEL`` and ``TIME``, as numbers.

    Raises:
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.
    """
    for name in columns.dense:
        kind = source.schema.get(name, pl.Int64())
        if source.table is not None and not (kind.is_numeric() or kind == pl.Boolean):
            raise ValueError(f"{name} of {source.path} is {kind} but must be numeric")
    types = {name: pl.Float64 if name in columns.dense else pl.String for name in columns.all}
    for batch in source.rows(types, columns.missing, malformed):
        frame = batch.frame
        typed = [pl.col(name).cast(pl.Float64) for name in columns.dense]
        for name in columns.categorical:
            if name in columns.bags:
                typed.append(category_lists(frame[name], columns.multi_separator, columns.missing))
            elif source.quoted:
                typed.append(category(frame[name], columns.missing))
            else:
                typed.append(pl.col(name))  # without quotes, an empty field is missing already
        if columns.label is not None:
            values = pl.col(columns.label)
            labels = clicks(values, frame.schema[columns.label], columns.positive, columns.missing).alias(LABEL)
            typed.append(pl.col(LABEL))
            batch = batch._replace(frame=batch.frame.with_columns(labels))
            batch = malformed.filtered(batch, columns.label, label_rule(columns.positive), pl.col(LABEL).is_null())
        if columns.time is not None:
            times = time_numbers(columns.time, frame.schema[columns.time]).alias(TIME)
            typed.append(pl.col(TIME))
            batch = batch._replace(frame=batch.frame.with_columns(times))
            is_bad = pl.col(TIME).is_null() | ~pl.col(TIME).is_finite()
            batch = malformed.filtered(batch, columns.time, "must be a number, or an ISO date or time", is_bad)
        yield batch._replace(frame=batch.frame.select(typed))

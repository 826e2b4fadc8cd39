"""``quorem prepare table``: any CSV or Parquet file with a label, dense and categorical columns."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from .. import files
from .columns import Columns, check_present, choose_columns, collected, header, scan
from .folder import Progress
from .ids import category_text, check_category
from .prepare import PrepareConfig, write
from .prepared import Prepared
from .text import BLOCK_BYTES, Malformed, ParsedRows, TextLayout, blocks, parse

PARQUET_ROWS = 1 << 18
TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%d")  # also with T for the space, Z, or an offset


def prepare_table(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    label: str,
    dense: Sequence[str] = (),
    categorical: Sequence[str] = (),
    multi: Sequence[str] = (),
    time: str | None = None,
    multi_separator: str = "|",
    separator: str = ",",
    config: PrepareConfig | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Prepared:
    """Turn a table into memory-mapped arrays, vocabularies and ``meta.json``, as ``prepare_criteo`` does.

    Args:
        file: CSV with a header line (plain or gzip), or Parquet (a name that ends in ``.parquet``).
        out: folder to write; it appears under this name only once it is complete.
        label: column of 0 and 1, or of true and false.
        dense: numeric columns.
        categorical: columns of text or integers; empty text is a missing value. If neither this nor ``dense`` is
            given, ``choose_columns`` decides for all columns.
        multi: the columns of ``categorical`` with several values per row: lists, or text that is split. List columns
            of a Parquet file need not be named. A missing list is an empty bag.
        time: column of numbers, dates or times by which the rows are split; rows are sorted if they are not in order.
        multi_separator: separator between the values of a multi-valued field.
        separator: separator between the fields of a CSV file.
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
    named = Columns(label, tuple(dense), tuple(categorical), tuple(multi), time, separator, multi_separator)
    columns = choose_columns(file, named).columns
    return prepare_columns(file, out, columns, config, overwrite=overwrite, progress=progress, block_bytes=block_bytes)


def prepare_columns(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    columns: Columns,
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Prepared:
    """``prepare_table`` with columns that ``choose_columns`` chose."""
    source, config = Path(file), config or PrepareConfig()
    config = dataclasses.replace(config, transform=config.transform or "signed_log")
    malformed = Malformed(str(source), config.max_malformed, "row" if source.suffix == ".parquet" else "line")
    rows = read_columns(source, columns, malformed, block_bytes)
    write(source, Path(out), columns, rows, malformed, config, overwrite=overwrite, progress=progress)
    return Prepared(out)


def read_columns(
    source: Path, columns: Columns, malformed: Malformed, block_bytes: int = BLOCK_BYTES
) -> Iterator[ParsedRows]:
    """The rows of a CSV or Parquet file, a block at a time, for ``write`` or an ``Encoder``.

    Numbers become floats, categories integers or text, and bags lists of text; empty text becomes null.

    Raises:
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.
    """
    files.check_is_file(source)
    rows = _parquet(source, columns) if source.suffix == ".parquet" else _csv(source, columns, malformed, block_bytes)
    for batch in rows:
        typed = _features(batch.frame, columns)
        if columns.label is not None:
            typed.append(_label(batch.frame.schema[columns.label], columns.label))
        if columns.time is not None:
            typed.append(_time(batch.frame.schema[columns.time], columns.time))
        yield batch._replace(frame=batch.frame.select(typed))


def _csv(path: Path, columns: Columns, malformed: Malformed, block_bytes: int) -> Iterator[ParsedRows]:
    names, _ = header(path, columns.separator, block_bytes)
    check_present(path, columns.all, names)
    types = {name: pl.Float64 if name in columns.dense else pl.String for name in columns.all}
    layout = TextLayout(names, types, columns.separator, quoted=True)
    for block in blocks(path, separator=columns.separator, skip=1, size=block_bytes):
        yield parse(block, layout, malformed)


def _parquet(path: Path, columns: Columns) -> Iterator[ParsedRows]:
    table = scan(path)
    schema = table.collect_schema()
    check_present(path, columns.all, list(schema))
    for name in (*columns.dense, *([] if columns.label is None else [columns.label])):
        if not (schema[name].is_numeric() or schema[name] == pl.Boolean):
            raise ValueError(f"{name} of {path} is {schema[name]} but must be numeric")
    total = collected(table.select(pl.len()), path).item()
    for start in range(0, total, PARQUET_ROWS):
        frame = collected(table.select(columns.all).slice(start, PARQUET_ROWS), path)
        yield ParsedRows(frame, np.arange(start + 1, start + 1 + frame.height), (start + frame.height) / total)


def _features(frame: pl.DataFrame, columns: Columns) -> list[pl.Expr]:
    typed = [pl.col(name).cast(pl.Float64) for name in columns.dense]
    for name in columns.categorical:
        values, dtype = pl.col(name), frame.schema[name]
        if name in columns.bags and isinstance(dtype, pl.List | pl.Array):
            elements = frame[name].explode()
            check_category(elements)
            lists = values.cast(pl.List(elements.dtype))
            typed.append(lists.list.eval(category_text(pl.element(), elements.dtype)))
            continue
        check_category(frame[name])
        text = category_text(values, dtype)
        if name in columns.bags:
            lists = text.str.split(columns.multi_separator)
            typed.append(lists.list.eval(category_text(pl.element(), pl.String())).alias(name))
        else:
            typed.append(values if dtype.is_integer() else text.alias(name))
    return typed


def _label(dtype: pl.DataType, name: str) -> pl.Expr:
    """A label as a float; NaN if it is missing, or neither a number nor true or false."""
    values = pl.col(name)
    if dtype == pl.String:
        text = values.str.strip_chars().str.to_lowercase()
        values = text.replace({"true": "1", "false": "0"})
    return values.cast(pl.Float64, strict=False).fill_null(float("nan"))


def _time(dtype: pl.DataType, name: str) -> pl.Expr:
    """A time as a float: numbers are unchanged, ISO dates and times become microseconds, other text null."""
    values = pl.col(name)
    if dtype in (pl.Categorical, pl.Enum):
        values, dtype = values.cast(pl.String), pl.String()
    if dtype == pl.String:
        number = values.str.strip_chars().cast(pl.Float64, strict=False)
        text = values.str.strip_chars().str.replace("T", " ", literal=True).str.replace("Z$", "")
        local = [text.str.to_datetime(form, time_unit="us", strict=False) for form in TIME_FORMATS]
        zoned = text.str.to_datetime(TIME_FORMATS[0] + "%z", time_unit="us", strict=False).dt.replace_time_zone(None)
        return pl.coalesce(number, *(moment.cast(pl.Int64).cast(pl.Float64) for moment in (*local, zoned))).alias(name)
    if dtype in (pl.Date, pl.Datetime):
        values = values.cast(pl.Datetime("us"))
    elif not (dtype.is_numeric() or dtype.is_temporal() or dtype in (pl.Boolean, pl.Null)):
        raise ValueError(f"{name} is {dtype} but must hold numbers, dates or times")
    return values.to_physical().cast(pl.Float64)

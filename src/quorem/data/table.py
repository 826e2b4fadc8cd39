"""``quorem prepare table``: any CSV or Parquet file with a label, dense and categorical columns."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from .. import files
from . import quoting
from .batches import Prepared
from .folder import Progress
from .ids import category_text, check_category
from .infer import ROWS, Inferred, infer
from .prepare import Columns, PrepareConfig, write
from .text import BLOCK_BYTES, Malformed, ParsedRows, TextBlock, TextLayout, blocks, line_ends, parse, without_head

PARQUET_ROWS = 1 << 18
SEPARATORS = (",", ";", "\t", "|")
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
            given, ``infer_columns`` decides for all columns.
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
    source, config = Path(file), config or PrepareConfig()
    config = dataclasses.replace(config, transform=config.transform or "signed_log")
    if not dense and not categorical:
        names = [name for name in column_names(source, separator) if name not in (label, time)]
        inferred = infer_columns(source, names, separator=separator, multi_separator=multi_separator)
        dense = [column.name for column in inferred if column.kind == "number"]
        categorical = [column.name for column in inferred if column.kind in ("category", "list")]
        multi = [column.name for column in inferred if column.kind == "list"]
        if not categorical:
            raise ValueError(
                f"{source} has no column that looks like categories: name them (categorical=, --categorical)"
            )
    _check_separators(separator, multi_separator)
    if extra := sorted(set(multi) - set(categorical)):
        raise ValueError(f"multi ({', '.join(extra)}) must be among the categorical columns")
    files.check_is_file(source)
    parquet = source.suffix == ".parquet"
    schema = _scan(source).collect_schema() if parquet else {}
    bags = tuple(name for name in categorical if name in multi or schema.get(name) in (pl.List, pl.Array))
    columns = Columns(label, tuple(dense), tuple(categorical), bags, time, separator, multi_separator)
    malformed = Malformed(str(source), config.max_malformed, "row" if parquet else "line")
    if parquet:
        found_rows = _parquet(source, columns.all, (label, *dense))
    else:
        found_rows = _csv(source, columns.all, dense, separator, malformed, block_bytes)
    rows = (batch._replace(frame=_typed(batch.frame, columns, multi_separator)) for batch in found_rows)
    write(source, Path(out), columns, rows, malformed, config, overwrite=overwrite, progress=progress)
    return Prepared(out)


def column_names(file: str | os.PathLike[str], separator: str = ",") -> list[str]:
    """The names of a table's columns.

    Raises:
        ValueError: if the file is empty or damaged.
    """
    source = Path(file)
    files.check_is_file(source)
    if source.suffix == ".parquet":
        return list(_scan(source).collect_schema())
    return _header(source, separator, BLOCK_BYTES)[0]


def infer_columns(
    file: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    separator: str = ",",
    multi_separator: str = "|",
) -> list[Inferred]:
    """Infer the kind of a table's columns from its first rows, at most 100,000.

    Args:
        file: CSV with a header line (plain or gzip), or Parquet.
        names: the columns to infer; all if None.
        separator: separator between the fields of a CSV file.
        multi_separator: separator between the values of a multi-valued field.

    Raises:
        ValueError: if the file is empty or damaged, or has no column of such a name.
    """
    source = Path(file)
    _check_separators(separator, multi_separator)
    names = column_names(source, separator) if names is None else names
    if source.suffix == ".parquet":
        check_present(source, names, column_names(source))
        frame = _collected(_scan(source).select(names).head(ROWS), source)
    else:
        known, head = _header(source, separator, BLOCK_BYTES)
        check_present(source, names, known)
        layout = TextLayout(known, dict.fromkeys(names, pl.String), separator, quoted=True)
        malformed = Malformed(str(source), len(head.data))
        frame = parse(head, layout, malformed).frame.head(ROWS)
        if malformed.count and not frame.height:
            line, reason = malformed.first[0]
            raise ValueError(f"{source} has no line that can be read: line {line}: {reason}")
    return infer(frame, names, multi_separator)


def _check_separators(separator: str, multi_separator: str) -> None:
    for name, value in (("separator", separator), ("multi_separator", multi_separator)):
        if len(value) != 1 or not value.isascii() or value in '"\r\n\0':
            raise ValueError(f"{name} ({value!r}) must be one ASCII character, and no quote or line end")


def _header(path: Path, separator: str, block_bytes: int) -> tuple[list[str], TextBlock]:
    """The names of a CSV file's columns, and its first block without the header line."""
    head = next(blocks(path, separator=separator, size=block_bytes), None)
    if head is None:
        raise ValueError(f"{path} is empty")
    if head.first_line in head.broken:
        raise ValueError(f"{path}: the header has a quote that is not closed, or text after a closing quote")
    end = int(line_ends(head.data, quoted=True)[0]) + 1
    names = [name.decode(errors="replace") for name in quoting.fields(head.data[:end], separator)]
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{path} has more than one column {', '.join(map(repr, repeated[:5]))}")
    return names, without_head(head, 1, separator)


def read_features(
    file: str | os.PathLike[str],
    *,
    dense: Sequence[str],
    categorical: Sequence[str],
    bags: Sequence[str],
    malformed: Malformed,
    separator: str = ",",
    multi_separator: str = "|",
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[ParsedRows]:
    """The rows of a table without labels, a block at a time, for an ``Encoder``; arguments as in ``prepare_table``.

    Raises:
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.
    """
    source = Path(file)
    _check_separators(separator, multi_separator)
    files.check_is_file(source)
    wanted = (*dense, *categorical)
    if source.suffix == ".parquet":
        rows = _parquet(source, wanted, dense)
    else:
        rows = _csv(source, wanted, dense, separator, malformed, block_bytes)
    for batch in rows:
        yield batch._replace(
            frame=batch.frame.select(_features(batch.frame, dense, categorical, bags, multi_separator))
        )


def separator_of(file: str | os.PathLike[str], label: str) -> str:
    """The separator of a CSV file: the first of ``SEPARATORS`` with which ``label`` is a column.

    It is a comma if none is, or if the file is Parquet.
    """
    source = Path(file)
    if source.suffix != ".parquet":
        for separator in SEPARATORS:
            if label in column_names(source, separator):
                return separator
    return SEPARATORS[0]


def _csv(
    path: Path, wanted: Sequence[str], dense: Sequence[str], separator: str, malformed: Malformed, block_bytes: int
) -> Iterator[ParsedRows]:
    names, _ = _header(path, separator, block_bytes)
    check_present(path, wanted, names)
    types = {name: pl.Float64 if name in dense else pl.String for name in wanted}
    layout = TextLayout(names, types, separator, quoted=True)
    for block in blocks(path, separator=separator, skip=1, size=block_bytes):
        yield parse(block, layout, malformed)


def _parquet(path: Path, wanted: Sequence[str], numbers: Sequence[str]) -> Iterator[ParsedRows]:
    table = _scan(path)
    schema = table.collect_schema()
    check_present(path, wanted, list(schema))
    for name in numbers:
        if not (schema[name].is_numeric() or schema[name] == pl.Boolean):
            raise ValueError(f"{name} of {path} is {schema[name]} but must be numeric")
    total = _collected(table.select(pl.len()), path).item()
    for start in range(0, total, PARQUET_ROWS):
        frame = _collected(table.select(wanted).slice(start, PARQUET_ROWS), path)
        yield ParsedRows(frame, np.arange(start + 1, start + 1 + frame.height), (start + frame.height) / total)


def _scan(path: Path) -> pl.LazyFrame:
    try:
        table = pl.scan_parquet(path)
        table.collect_schema()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from None
    return table


def _collected(table: pl.LazyFrame, path: Path) -> pl.DataFrame:
    try:
        return table.collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def check_present(path: Path, wanted: Iterable[str], names: Sequence[str]) -> None:
    """Raise ValueError unless all wanted columns are among the names."""
    if missing := sorted(set(wanted) - set(names)):
        shown = ", ".join(n if n.isprintable() else ascii(n) for n in (name[:40] for name in names[:20]))
        shown += ", ..." * (len(names) > 20)
        raise ValueError(f"{path} has no column {', '.join(missing[:5])}; it has {shown}")


def _typed(frame: pl.DataFrame, columns: Columns, multi_separator: str) -> pl.DataFrame:
    """Cast numbers to floats, categories to integers or text, and bags to lists of text; empty text becomes null."""
    typed = [_label(frame.schema[columns.label], columns.label)]
    typed += _features(frame, columns.dense, columns.categorical, columns.bags, multi_separator)
    if columns.time is not None:
        typed.append(_time(frame.schema[columns.time], columns.time))
    return frame.select(*typed)


def _features(
    frame: pl.DataFrame, dense: Sequence[str], categorical: Sequence[str], bags: Sequence[str], multi_separator: str
) -> list[pl.Expr]:
    typed = [pl.col(name).cast(pl.Float64) for name in dense]
    for name in categorical:
        values, dtype = pl.col(name), frame.schema[name]
        if name in bags and isinstance(dtype, pl.List | pl.Array):
            elements = frame[name].explode()
            check_category(elements)
            lists = values.cast(pl.List(elements.dtype))
            typed.append(lists.list.eval(category_text(pl.element(), elements.dtype)))
            continue
        check_category(frame[name])
        text = category_text(values, dtype)
        if name in bags:
            typed.append(
                text.str.split(multi_separator).list.eval(category_text(pl.element(), pl.String())).alias(name)
            )
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
    """A time as a float: numbers are unchanged, ISO dates and times become microseconds, anything else null."""
    values = pl.col(name)
    if dtype == pl.String:
        number = values.str.strip_chars().cast(pl.Float64, strict=False)
        text = values.str.strip_chars().str.replace("T", " ", literal=True).str.replace("Z$", "")
        local = [text.str.to_datetime(form, time_unit="us", strict=False) for form in TIME_FORMATS]
        zoned = text.str.to_datetime(TIME_FORMATS[0] + "%z", time_unit="us", strict=False).dt.replace_time_zone(None)
        return pl.coalesce(number, *(moment.cast(pl.Int64).cast(pl.Float64) for moment in (*local, zoned))).alias(name)
    if dtype.is_temporal():
        return values.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64)
    return values.cast(pl.Float64, strict=False)

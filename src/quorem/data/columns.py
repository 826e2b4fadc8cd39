"""The columns of a CSV or Parquet file: their names, what they look like, and what each is used for."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import polars as pl

from .. import files
from . import quoting
from .infer import ROWS, Inferred, infer
from .shape import check_names
from .text import BLOCK_BYTES, Malformed, TextBlock, TextLayout, blocks, line_ends, parse, without_head

SEPARATORS = (",", ";", "\t", "|")
BINARY = {b"PAR1\x15": "a Parquet", b"ARROW1\0": "an Arrow"}  # how such files begin


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and what each is used for.

    ``label`` is None if only features are read, and ``time`` is the column by which rows are sorted. ``bags`` are the
    categorical columns with several values per row. ``separator`` separates the fields of a line, ``multi_separator``
    the values of a bag.
    """

    label: str | None
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    bags: tuple[str, ...] = ()
    time: str | None = None
    separator: str = ","
    multi_separator: str = "|"

    def __post_init__(self) -> None:
        """Check names and separators."""
        check_separators(self.separator, self.multi_separator)
        check_names(self.all, "names of columns")

    @property
    def all(self) -> tuple[str, ...]:
        """Every column that is read."""
        return tuple(n for n in (self.label, *self.dense, *self.categorical, self.time) if n is not None)

    @property
    def single(self) -> tuple[str, ...]:
        """The categorical columns with one value per row."""
        return tuple(name for name in self.categorical if name not in self.bags)


class ChosenColumns(NamedTuple):
    """The columns of a table that are used, those of them whose kind was inferred, and those that nothing names."""

    columns: Columns
    inferred: list[Inferred]
    left_out: list[str]


def choose_columns(
    file: str | os.PathLike[str], named: Columns, *, drop: Iterable[str] = (), infer_others: bool = False
) -> ChosenColumns:
    """Choose the features of a table: the named columns and, if asked or if none is named, what others look like.

    Args:
        file: CSV with a header line (plain or gzip), or Parquet.
        named: label and time, and the features that are named.
        drop: columns that are not used.
        infer_others: infer the kind of all other columns, even if some features are named.

    Raises:
        ValueError: if a column is missing, or both named and dropped, or there are no categories.
    """
    source, inferred = Path(file), []
    schema = _schema(source, named.separator)
    if both := sorted({*named.all, *named.bags} & {*drop}):
        raise ValueError(f"drop ({', '.join(both)}) must not name columns that are used")
    taken = {*named.all, *named.bags, *drop}
    check_present(source, taken, list(schema))
    others = [name for name in schema if name not in taken]
    dense, categorical, bags = named.dense, named.categorical, named.bags
    if infer_others or not (dense or categorical):
        separators = {"separator": named.separator, "multi_separator": named.multi_separator}
        inferred = infer_columns(source, others, **separators)
        dense += tuple(column.name for column in inferred if column.kind == "number")
        categorical += tuple(column.name for column in inferred if column.kind in ("category", "list"))
        bags += tuple(column.name for column in inferred if column.kind == "list")
        if not categorical:
            raise ValueError(
                f"{source} has no column that looks like categories: name them (categorical=, --categorical)"
            )
    if not categorical:
        raise ValueError("categorical must name at least one column")
    if extra := sorted(set(bags) - set(categorical)):
        raise ValueError(f"multi ({', '.join(extra)}) must be among the categorical columns")
    bags = tuple(name for name in categorical if name in bags or schema[name] in (pl.List, pl.Array))
    columns = replace(named, dense=dense, categorical=categorical, bags=bags)
    return ChosenColumns(columns, inferred, [] if inferred else others)


def column_names(file: str | os.PathLike[str], separator: str = ",") -> list[str]:
    """The names of a table's columns.

    Raises:
        ValueError: if the file is empty or damaged.
    """
    return list(_schema(Path(file), separator))


def _schema(source: Path, separator: str) -> Mapping[str, pl.DataType]:
    """The names and types of a table's columns; those of a CSV file are text."""
    files.check_is_file(source)
    if source.suffix == ".parquet":
        return scan(source).collect_schema()
    return dict.fromkeys(header(source, separator, BLOCK_BYTES)[0], pl.String())


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
    check_separators(separator, multi_separator)
    names = column_names(source, separator) if names is None else names
    if not names:
        return []
    if source.suffix == ".parquet":
        check_present(source, names, column_names(source))
        frame = collected(scan(source).select(names).head(ROWS), source)
    else:
        known, head = header(source, separator, BLOCK_BYTES)
        check_present(source, names, known)
        layout = TextLayout(known, dict.fromkeys(names, pl.String), separator, quoted=True)
        malformed = Malformed(str(source), len(head.data))
        frame = parse(head, layout, malformed).frame.head(ROWS)
        if malformed.count and not frame.height:
            line, reason = malformed.first[0]
            raise ValueError(f"{source} has no line that can be read: line {line}: {reason}")
    if not frame.height:
        raise ValueError(f"{source} has no rows")
    return infer(frame, names, multi_separator)


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


def check_separators(separator: str, multi_separator: str) -> None:
    """Raise ValueError unless both can separate fields or values."""
    for name, value in (("separator", separator), ("multi_separator", multi_separator)):
        if len(value) != 1 or not value.isascii() or value in '"\r\n\0':
            raise ValueError(f"{name} ({value!r}) must be one ASCII character, and no quote or line end")


def header(path: Path, separator: str, block_bytes: int) -> tuple[list[str], TextBlock]:
    """The names of a CSV file's columns, and its first block without the header line."""
    head = next(blocks(path, separator=separator, size=block_bytes), None)
    if head is None:
        raise ValueError(f"{path} is empty")
    if head.first_line in head.broken:
        raise ValueError(f"{path}: the header has a quote that is not closed, or text after a closing quote")
    for magic, kind in BINARY.items():
        if head.data.startswith(magic):
            raise ValueError(f"{path} is {kind} file, but must be CSV, or Parquet with a name that ends in .parquet")
    end = int(line_ends(head.data, quoted=True)[0]) + 1
    names = [name.decode(errors="replace") for name in quoting.fields(head.data[:end], separator)]
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{path} has more than one column {', '.join(map(repr, repeated[:5]))}")
    return names, without_head(head, 1, separator)


def scan(path: Path) -> pl.LazyFrame:
    """A Parquet file, of which only the schema has been read."""
    try:
        table = pl.scan_parquet(path, glob=False)  # "[", "*" and "?" of a name stand for themselves
        table.collect_schema()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from None
    return table


def collected(table: pl.LazyFrame, path: Path) -> pl.DataFrame:
    """The rows of a part of the Parquet file at ``path``."""
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

"""``quorem prepare table``: any CSV or Parquet file with a label, dense and categorical columns."""

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from .batches import Prepared
from .folder import Progress
from .prepare import Columns, PrepareConfig, write
from .text import BLOCK_BYTES, Layout, Malformed, Rows, blocks, parse

PARQUET_ROWS = 1 << 18


def prepare_table(
    file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    label: str,
    dense: Sequence[str] = (),
    categorical: Sequence[str],
    multi: Sequence[str] = (),
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
        label: column of 0 and 1.
        dense: numeric columns.
        categorical: columns of any text or integers; an empty text is missing.
        multi: those among ``categorical`` with several values a row: lists in Parquet, text to split elsewhere.
            List columns are found without being named. A missing list is an empty bag.
        multi_separator: between the values of a row.
        separator: between the fields of a CSV file.
        config: ids, vocabulary, days, the dense transform and the limit of malformed lines.
        overwrite: replace prepared data of that name.
        progress: called with the stage, the part of it that is done, and the rows so far.
        block_bytes: text parsed at a time; changes memory and speed, not the result.

    Raises:
        FileExistsError: if ``out`` exists and is not to be, or must not be, overwritten.
        ValueError: if a column is missing or has the wrong type, or too many lines are malformed.
        OSError: if the disk is full.
    """
    source, config = Path(file), config or PrepareConfig()
    for name, value in (("separator", separator), ("multi_separator", multi_separator)):
        if len(value) != 1 or not value.isascii():
            raise ValueError(f"{name} ({value!r}) must be one ASCII character")
    extra = sorted(set(multi) - set(categorical))
    if extra:
        raise ValueError(f"multi ({', '.join(extra)}) must be among the categorical columns")
    parquet = source.suffix == ".parquet"
    lists = _list_columns(source) if parquet else []
    bags = tuple(name for name in categorical if name in multi or name in lists)
    columns = Columns(label, tuple(dense), tuple(categorical), bags)
    malformed = Malformed(source.name, config.max_malformed, "row" if parquet else "line")
    found = _parquet(source, columns) if parquet else _csv(source, columns, separator, malformed, block_bytes)
    rows = (batch._replace(frame=_typed(batch.frame, columns, multi_separator)) for batch in found)
    write(source, Path(out), columns, rows, malformed, config, overwrite=overwrite, progress=progress)
    return Prepared(out)


def _csv(path: Path, columns: Columns, separator: str, malformed: Malformed, block_bytes: int) -> Iterator[Rows]:
    head = next(blocks(path, quote='"', size=block_bytes), None)
    if head is None:
        raise ValueError(f"{path} is empty")
    names = next(
        csv.reader(head.data[: 1 << 20].decode(errors="replace").splitlines(keepends=True), delimiter=separator)
    )
    _check_present(path, columns, names)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{path} has more than one column {', '.join(repeated)}")
    numbers = {columns.label, *columns.dense}
    layout = Layout({name: pl.Float64 if name in numbers else pl.String for name in names}, separator, '"')
    for block in blocks(path, quote='"', skip=1, size=block_bytes):
        yield parse(block, layout, malformed)


def _parquet(path: Path, columns: Columns) -> Iterator[Rows]:
    names = [columns.label, *columns.dense, *columns.categorical]
    table = pl.scan_parquet(path)
    schema = table.collect_schema()
    _check_present(path, columns, list(schema))
    for name in (columns.label, *columns.dense):
        if not (schema[name].is_numeric() or schema[name] == pl.Boolean):
            raise ValueError(f"{name} of {path} is {schema[name]} but must be numeric")
    total = table.select(pl.len()).collect().item()
    for start in range(0, total, PARQUET_ROWS):
        frame = table.select(names).slice(start, PARQUET_ROWS).collect()
        yield Rows(frame, np.arange(start + 1, start + 1 + frame.height), (start + frame.height) / total)


def _list_columns(path: Path) -> list[str]:
    return [name for name, dtype in pl.scan_parquet(path).collect_schema().items() if dtype == pl.List]


def _check_present(path: Path, columns: Columns, names: Sequence[str]) -> None:
    missing = [name for name in (columns.label, *columns.dense, *columns.categorical) if name not in names]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}")


def _typed(frame: pl.DataFrame, columns: Columns, multi_separator: str) -> pl.DataFrame:
    """Numbers as floats, categories as integers or text without empty ones, bags as lists of such text."""
    numbers = [pl.col(name).cast(pl.Float64) for name in (columns.label, *columns.dense)]
    categories = []
    for name in columns.categorical:
        values, dtype = pl.col(name), frame.schema[name]
        if name in columns.bags:
            lists = values if dtype == pl.List else values.cast(pl.String).str.split(multi_separator)
            categories.append(lists.list.eval(_text(pl.element())))
        else:
            categories.append(values if dtype.is_integer() else _text(values).alias(name))
    return frame.select(*numbers, *categories)


def _text(values: pl.Expr) -> pl.Expr:
    text = values.cast(pl.String)
    return pl.when(text != "").then(text)

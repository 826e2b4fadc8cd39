"""Which columns of a table are features, and of what kind: those that are named, and what others look like."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import polars as pl

from .meta import MISSING, Columns
from .source import Source
from .values import iso_times

ROWS = 100_000  # rows that are examined
FEW = 32  # whole numbers with at most this many distinct values are categories
NOT_NUMBERS = 0.01  # a column of numbers may have at most this share of other values
LISTS = 0.1  # text is lists if at least this share of values contains a separator
ID_NAME = re.compile(r"(^|[_\W])(id|ids|code|zip)$|[a-z](Id|ID)$", re.IGNORECASE)

Kind = Literal["number", "category", "list", "none"]


class Inferred(NamedTuple):
    """The inferred kind of a column, and the reason."""

    name: str
    kind: Kind
    reason: str


def choose_columns(
    source: Source, named: Columns, *, drop: Iterable[str] = (), infer_others: bool = False
) -> tuple[Columns, list[Inferred], list[str]]:
    """Choose the features of a table: the named columns and, if asked or if none is named, what others look like.

    Returns the columns that are used, the inferred kinds, and the columns that nothing names.
    """
    inferred: list[Inferred] = []
    if both := sorted({*named.all, *named.bags} & {*drop}):
        raise ValueError(f"drop ({', '.join(both)}) must not name columns that are used")
    taken = {*named.all, *named.bags, *drop}
    source.check_present(taken)
    others = [name for name in source.schema if name not in taken]
    dense, bags = named.dense, named.bags
    categorical = tuple(dict.fromkeys(named.categorical + bags))
    if infer_others or not (dense or categorical):
        if others:
            inferred = infer(source.first_rows(others, ROWS), named.multi_separator, named.missing)
        dense += tuple(column.name for column in inferred if column.kind == "number")
        categorical += tuple(column.name for column in inferred if column.kind in ("category", "list"))
        bags += tuple(column.name for column in inferred if column.kind == "list")
    if not categorical:
        raise ValueError(f"{source.path}: categorical (--categorical) must name at least one column")
    bags = tuple(name for name in categorical if name in bags or source.schema[name] in (pl.List, pl.Array))
    columns = replace(named, dense=dense, categorical=categorical, bags=bags)
    return columns, inferred, [] if inferred else others


def infer(frame: pl.DataFrame, multi_separator: str = "|", missing: tuple[str, ...] = MISSING) -> list[Inferred]:
    """Infer the kind of columns from their first rows, which are text (CSV) or typed (Parquet)."""
    return [Inferred(values.name, *_kind(values, multi_separator, missing)) for values in frame]


def _kind(values: pl.Series, multi_separator: str, missing: tuple[str, ...]) -> tuple[Kind, str]:
    dtype = values.dtype
    if not values.name:
        return "none", "it has no name"
    if dtype in (pl.List, pl.Array):
        return "list", "a list"
    if dtype.is_nested() or dtype.is_temporal() or dtype == pl.Binary:
        return "none", f"of type {dtype}"
    if dtype == pl.Boolean:
        return "category", "true or false"
    text = values.drop_nulls().cast(pl.String).str.strip_chars()
    text = text.filter(~text.is_in(["", *missing]))
    if not len(text):
        return "none", f"no value in the first {ROWS:,} rows"
    numbers = text.cast(pl.Float64, strict=False)
    others = text.filter(numbers.is_null())
    found = f", except {len(others):,} of {len(text):,} values, such as {others[0]!r}" if len(others) else ""
    if len(others) <= NOT_NUMBERS * len(text):
        kind, reason = _kind_of_numbers(text.filter(numbers.is_not_null()), values.name)
        if kind == "number" or not found:
            return kind, f"{reason}{found}{': such lines are malformed' * bool(found)}"
    if _are_times(text.head(100)) and _are_times(text):
        return "none", f"times: --time {values.name} splits the rows by them"
    with_separator = text.str.contains(multi_separator, literal=True).mean()
    assert isinstance(with_separator, float)
    if with_separator >= LISTS:
        return "list", f"{with_separator:.0%} of the texts have {multi_separator!r} in them"
    if len(others) < 0.5 * len(text):
        return "category", f"numbers{found}; if that is a missing number: --missing"
    return "category", "text"


def _are_times(text: pl.Series) -> bool:
    return bool(pl.select(iso_times(pl.lit(text)).is_not_null().all()).item())


def _kind_of_numbers(text: pl.Series, name: str) -> tuple[Kind, str]:
    if not text.str.contains(r"^[+-]?\d+$").all():
        return "number", "numbers with fractions"
    if text.str.contains(r"^[+-]?0\d").any():
        return "category", "whole numbers with leading zeros"
    if ID_NAME.search(name):
        return "category", "whole numbers under a name of ids"
    if (distinct := text.n_unique()) <= FEW:
        return "category", f"whole numbers, only {distinct} of them"
    return "number", "whole numbers"

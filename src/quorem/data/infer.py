"""Infer from the first rows of a table whether columns hold numbers, categories or lists of categories."""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import polars as pl

ROWS = 100_000  # rows that are examined
FEW = 32  # whole numbers with at most this many distinct values are categories
LISTS = 0.1  # text is lists if at least this share of values contains a separator
ID_NAME = re.compile(r"(^|[_\W])(id|ids|code|zip)$|[a-z](Id|ID)$", re.IGNORECASE)

Kind = Literal["number", "category", "list", "none"]


class Inferred(NamedTuple):
    """The inferred kind of a column, and the reason."""

    name: str
    kind: Kind
    reason: str


def infer(frame: pl.DataFrame, names: Iterable[str], multi_separator: str = "|") -> list[Inferred]:
    """Infer the kind of columns.

    Args:
        frame: the first rows of the table, as text (CSV) or typed (Parquet).
        names: the columns to infer.
        multi_separator: separator between the values of a list.

    >>> frame = pl.DataFrame({"price": ["2.5", ""], "user_id": ["17", "4"], "tags": ["a|b", "c"]})
    >>> [(column.name, column.kind) for column in infer(frame, frame.columns)]
    [('price', 'number'), ('user_id', 'category'), ('tags', 'list')]
    """
    return [Inferred(name, *_kind(frame[name], multi_separator)) for name in names]


def _kind(values: pl.Series, multi_separator: str) -> tuple[Kind, str]:
    dtype = values.dtype
    if not values.name:
        return "none", "it has no name"
    if dtype in (pl.List, pl.Array):
        return "list", "a list"
    if dtype.is_nested() or dtype.is_temporal() or dtype == pl.Binary:
        return "none", f"of type {dtype}"
    if dtype == pl.Boolean:
        return "category", "true or false"
    values = values.drop_nulls()
    text = values.cast(pl.String).str.strip_chars()
    values = values.filter(text != "")
    text = text.filter(text != "")
    if not len(text):
        return "none", f"no value in the first {ROWS:,} rows"
    numbers = text.cast(pl.Float64, strict=False)
    if numbers.null_count() == 0:
        return _kind_of_numbers(text, values.name)
    with_separator = text.str.contains(multi_separator, literal=True).mean()
    assert isinstance(with_separator, float)
    if with_separator >= LISTS:
        return "list", f"{with_separator:.0%} of the texts have {multi_separator!r} in them"
    if numbers.null_count() < 0.5 * len(text):
        share, other = 1 - numbers.null_count() / len(text), text.filter(numbers.is_null())[0]
        return "category", f"text: {share:.0%} are numbers, but not {other!r}; empty fields are missing numbers"
    if text.n_unique() == len(text) > 1000:
        return "category", "text; no value occurs twice, so it may be no use"
    return "category", "text"


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

"""Infer from the first rows of a table whether columns hold numbers, categories or lists of categories."""

import re
from typing import Literal, NamedTuple

import polars as pl

from .values import MISSING, iso_times

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


def infer(frame: pl.DataFrame, multi_separator: str = "|", missing: tuple[str, ...] = MISSING) -> list[Inferred]:
    """Infer the kind of columns.

    Args:
        frame: the first rows of the columns, as text (CSV) or typed (Parquet).
        multi_separator: separator between the values of a list.
        missing: texts that stand for a missing value.

    >>> frame = pl.DataFrame({"price": ["2.5", "NA"], "user_id": ["17", "4"], "tags": ["a|b", "c"]})
    >>> [(column.name, column.kind) for column in infer(frame)]
    [('price', 'number'), ('user_id', 'category'), ('tags', 'list')]
    """
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
    if numbers.null_count() == 0:
        return _kind_of_numbers(text, values.name)
    if _are_times(text.head(100)) and _are_times(text):
        return "none", f"times: --time {values.name} splits the rows by them"
    with_separator = text.str.contains(multi_separator, literal=True).mean()
    assert isinstance(with_separator, float)
    if with_separator >= LISTS:
        return "list", f"{with_separator:.0%} of the texts have {multi_separator!r} in them"
    if numbers.null_count() < 0.5 * len(text):
        share, other = 1 - numbers.null_count() / len(text), text.filter(numbers.is_null())[0]
        return "category", f"text: {share:.0%} are numbers, but not {other!r}; if that is a missing number: --missing"
    return "category", f"text{_unless_repeated(text)}"


def _unless_repeated(text: pl.Series) -> str:
    return "; no value occurs twice: --drop it?" if text.n_unique() == len(text) > 1000 else ""


def _are_times(text: pl.Series) -> bool:
    return bool(pl.select(iso_times(pl.lit(text)).is_not_null().all()).item())


def _kind_of_numbers(text: pl.Series, name: str) -> tuple[Kind, str]:
    if not text.str.contains(r"^[+-]?\d+$").all():
        return "number", "numbers with fractions"
    if text.str.contains(r"^[+-]?0\d").any():
        return "category", "whole numbers with leading zeros"
    if ID_NAME.search(name):
        return "category", f"whole numbers under a name of ids{_unless_repeated(text)}"
    if (distinct := text.n_unique()) <= FEW:
        return "category", f"whole numbers, only {distinct} of them"
    return "number", "whole numbers"

"""The values of a table's columns as Polars expressions: categories as text, lists of them, labels and times."""

import operator
import re
from collections.abc import Callable
from contextlib import suppress

import polars as pl

LARGEST_WHOLE = 2**53  # from here on a float stands for several integers
MISSING = ("NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "null", "None", "inf", "-inf", "Inf", "-Inf")
TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%d")  # also with T for the space, Z, or an offset
BOUND = re.compile(r"(>=|<=|>|<)\s*([-+]?\d+(?:\.\d*)?)")
COMPARISONS: dict[str, Callable[[pl.Expr, float], pl.Expr]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def category_text(values: pl.Expr, dtype: pl.DataType, missing: tuple[str, ...] = ()) -> pl.Expr:
    """Categories of a scalar ``dtype`` as text; null for null, NaN, empty text and the texts ``missing``.

    Whole numbers are written as integers whatever their type, since integers with missing values often come as floats.

    >>> pl.select(category_text(pl.Series([3.0, 0.5, None, float("nan")]), pl.Float64())).to_series().to_list()
    ['3', '0.5', None, None]
    """
    text = values.cast(pl.String)
    if dtype.is_float():
        is_whole = (values == values.floor()) & (values.abs() < LARGEST_WHOLE)
        text = pl.when(is_whole).then(values.cast(pl.Int64, strict=False).cast(pl.String)).otherwise(text)
        text = pl.when(values.is_not_nan()).then(text)
    return pl.when(~text.is_in(["", *missing])).then(text)


def check_category(values: pl.Series) -> None:
    """Raise ValueError unless the values of a column can be categories, one a row."""
    name, dtype = values.name, values.dtype
    if dtype in (pl.List, pl.Array):
        raise ValueError(f"{name} holds lists but must hold one value a row")
    if dtype.is_nested() or dtype in (pl.Object, pl.Duration):
        raise ValueError(f"{name} is {dtype} but must hold text or numbers")
    if dtype == pl.Binary:
        try:
            values.cast(pl.String)
        except pl.exceptions.ComputeError:
            raise ValueError(f"{name} holds bytes that are not UTF-8") from None


def category(values: pl.Series, missing: tuple[str, ...]) -> pl.Expr:
    """A column with one category a row, as text; raises ValueError if its type cannot be a category."""
    check_category(values)
    return category_text(pl.col(values.name), values.dtype, missing).alias(values.name)


def category_lists(values: pl.Series, separator: str, missing: tuple[str, ...]) -> pl.Expr:
    """A column with several categories a row, as lists of text; text is split."""
    column, dtype = pl.col(values.name), values.dtype
    if isinstance(dtype, pl.List | pl.Array):
        elements = values.explode()
        check_category(elements)
        lists = column.cast(pl.List(elements.dtype))
        return lists.list.eval(category_text(pl.element(), elements.dtype, missing))
    check_category(values)
    lists = category_text(column, dtype, missing).str.split(separator)
    return lists.list.eval(category_text(pl.element(), pl.String(), missing)).alias(values.name)


def label_rule(positive: str | None) -> str:
    """What a label must be if ``clicks`` is to understand it."""
    if positive is None:
        return "must be 0 or 1, or true or false, unless positive= (--positive) says which value is a click"
    return "must be a number"


def clicks(values: pl.Expr, dtype: pl.DataType, positive: str | None, missing: tuple[str, ...] = ()) -> pl.Expr:
    """Labels as 1 for a click and 0 for none; null for a label that is missing or breaks ``label_rule``.

    Args:
        values: the labels.
        dtype: their type.
        positive: the value that is a click, all others being none; or a bound that clicks reach, as in ``">=4"``. None
            means that labels are 0 or 1, or true or false.
        missing: texts that stand for a missing label.

    >>> ratings = pl.Series("rating", ["5", "3.5", "4", "good"])
    >>> pl.select(clicks(pl.lit(ratings), ratings.dtype, ">=4")).to_series().to_list()
    [1, 0, 1, None]
    """
    text = category_text(values, dtype, missing).str.strip_chars()
    if positive is None:
        text = text.str.to_lowercase().replace({"true": "1", "false": "0"})
    numbers = text.cast(pl.Float64, strict=False).fill_nan(None)
    if positive is None:
        return pl.when(numbers.is_in([0.0, 1.0])).then(numbers).cast(pl.UInt8)
    if (bound := BOUND.fullmatch(positive.strip())) is not None:
        return COMPARISONS[bound[1]](numbers, float(bound[2])).cast(pl.UInt8)
    is_equal = text == positive.strip()
    with suppress(ValueError):  # it may be no number
        is_equal = is_equal | (numbers == float(positive)).fill_null(False)
    return is_equal.cast(pl.UInt8)


def time_numbers(name: str, dtype: pl.DataType) -> pl.Expr:
    """A column of times as floats: numbers are unchanged, ISO dates and times become microseconds, other text null."""
    values = pl.col(name)
    if dtype in (pl.Categorical, pl.Enum):
        values, dtype = values.cast(pl.String), pl.String()
    if dtype == pl.String:
        return pl.coalesce(values.str.strip_chars().cast(pl.Float64, strict=False), iso_times(values))
    if dtype in (pl.Date, pl.Datetime):
        values = values.cast(pl.Datetime("us"))
    elif not (dtype.is_numeric() or dtype.is_temporal() or dtype in (pl.Boolean, pl.Null)):
        raise ValueError(f"{name} is {dtype} but must hold numbers, dates or times")
    return values.to_physical().cast(pl.Float64)


def iso_times(text: pl.Expr) -> pl.Expr:
    """ISO dates and times as microseconds; null for other text.

    >>> pl.select(iso_times(pl.Series(["1970-01-01T00:00:01Z", "1970-01-02", "Monday"]))).to_series().to_list()
    [1000000.0, 86400000000.0, None]
    """
    text = text.str.strip_chars().str.replace("T", " ", literal=True).str.replace("Z$", "")
    local = [text.str.to_datetime(form, time_unit="us", strict=False) for form in TIME_FORMATS]
    zoned = [
        text.str.to_datetime(form + "%z", time_unit="us", strict=False).dt.replace_time_zone(None)
        for form in TIME_FORMATS[:2]
    ]
    return pl.coalesce(*(moment.cast(pl.Int64).cast(pl.Float64) for moment in (*local, *zoned)))

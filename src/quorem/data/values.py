"""The values of a table's columns as Polars expressions: numbers, categories as text, lists of them, and labels."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .malformed import Malformed, ParsedRows
from .meta import Columns, Transform

NUMBER = "\nnumber"
LABEL_RULE = "must be 0 or 1, or true or false, unless positive= (--positive) says which value is a click"
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_WHOLE = 2**53  # from here on a float stands for several integers
# Also with T for the space, or Z. Times with an offset become those of UTC.
TIME_FORMATS = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%d", "%Y-%m-%d %H:%M:%S%.f%z", "%Y-%m-%d %H:%M%z")

# "log" is the paper's, which turns numbers below 0 into 0; "signed_log" is the same for numbers of at least 0.
TRANSFORMS: dict[Transform, Callable[[pl.Expr], pl.Expr]] = {
    "log": lambda x: x.clip(0).log1p(),
    "signed_log": lambda x: x.sign() * x.abs().log1p(),
    "none": lambda x: x,
}


def features(
    rows: ParsedRows,
    columns: Columns,
    transforms: Mapping[str, Transform],
    malformed: Malformed,
    keep: Sequence[str] = (),
) -> ParsedRows:
    """The features of some rows: transformed numbers, categories as text, bags as lists of text; ``keep`` come first.

    A missing number becomes 0. Rows with a number that is none, or that float32 cannot represent, are added to
    ``malformed``.
    """
    for name in columns.dense:
        rows = _with_number(rows, name, transforms[name], columns.missing, malformed)
    numbers = (TRANSFORMS[transforms[name]](finite(name).fill_null(0)).cast(pl.Float32) for name in columns.dense)
    categories = (category(rows.frame[name], columns) for name in columns.categorical)
    return rows._replace(frame=rows.frame.select(*keep, *numbers, *categories))


def _with_number(
    rows: ParsedRows, name: str, transform: Transform, missing: tuple[str, ...], malformed: Malformed
) -> ParsedRows:
    """The rows with a column of numbers, which may be text as in a CSV file, as floats."""
    column, dtype = pl.col(name), rows.frame.schema[name]
    if dtype == pl.String:
        text = column.str.strip_chars(" ")
        text = pl.when(~text.is_in(["", *missing])).then(text)
        rows = rows._replace(frame=rows.frame.with_columns(text.cast(pl.Float64, strict=False).alias(NUMBER)))
        is_bad = pl.col(NUMBER).is_null() & text.is_not_null()
        rows, column = malformed.filtered(rows, name, "must be a number", is_bad), pl.col(NUMBER)
    elif not (dtype.is_numeric() or dtype in (pl.Boolean, pl.Null)):
        raise ValueError(f"{name} is {dtype} but must be numeric")
    rows = rows._replace(frame=rows.frame.with_columns(column.cast(pl.Float64).alias(name)))
    if transform == "none":
        is_large, rule = finite(name).abs() > LARGEST_FLOAT32, f"must be at most {LARGEST_FLOAT32:.4g}, as float32"
        rows = malformed.filtered(rows, name, rule, is_large)
    return rows


def finite(name: str) -> pl.Expr:
    """A column of floats, in which NaN and infinity are missing."""
    return pl.when(pl.col(name).is_finite()).then(pl.col(name))


def dense(frame: pl.DataFrame, names: Sequence[str]) -> NDArray[np.float32]:
    """The numbers that ``features`` gave, as an array ``[N, F]``."""
    return frame.select(names).to_numpy(order="c") if names else np.empty((frame.height, 0), np.float32)


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


def category(values: pl.Series, columns: Columns) -> pl.Expr:
    """A categorical column as text, or as lists of text if it is one of ``columns.bags``, whose text is split.

    It raises ValueError if the type of the column cannot be a category.
    """
    column, dtype, is_bag = pl.col(values.name), values.dtype, values.name in columns.bags
    if is_bag and isinstance(dtype, pl.List | pl.Array):
        elements = values.explode()
        check_category(elements)
        lists = column.cast(pl.List(elements.dtype))
        return lists.list.eval(category_text(pl.element(), elements.dtype, columns.missing))
    check_category(values)
    text = category_text(column, dtype, columns.missing).alias(values.name)
    if not is_bag:
        return text
    return text.str.split(columns.multi_separator).list.eval(category_text(pl.element(), pl.String(), columns.missing))


def flat(lists: pl.Series) -> pl.Series:
    """The values of all lists, one after another."""
    return lists.filter(lists.list.len() > 0).explode()


def lengths(lists: pl.Series) -> NDArray[np.uint32]:
    """The length of each list; 0 for null."""
    return lists.list.len().fill_null(0).to_numpy()


def offsets_of(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Where each list of ``flat`` begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def clicks(values: pl.Expr, dtype: pl.DataType, positive: str | None, missing: tuple[str, ...] = ()) -> pl.Expr:
    """Labels as 1 for a click and 0 for none; null for a label that is missing or is none of these.

    ``positive`` is the value that is a click, all others being none; or the least one that is, as in ``">=4"``. None
    means that labels are 0 or 1, or true or false.
    """
    text = category_text(values, dtype, missing).str.strip_chars()
    if positive is None:
        numbers = text.str.to_lowercase().replace({"true": "1", "false": "0"}).cast(pl.Float64, strict=False)
        return pl.when(numbers.is_in([0.0, 1.0])).then(numbers).cast(pl.UInt8)
    if positive.startswith(">="):
        try:
            least = float(positive.removeprefix(">="))
        except ValueError:
            raise ValueError(f"positive ({positive!r}) must be a value of the label, or a bound as '>=4'") from None
        return (text.cast(pl.Float64, strict=False).fill_nan(None) >= least).cast(pl.UInt8)
    return (text == positive.strip()).cast(pl.UInt8)


def times(values: pl.Series) -> pl.Expr:
    """A column of times as floats: numbers are unchanged, ISO dates and times become microseconds, other text null."""
    column, dtype = pl.col(values.name), values.dtype
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = column.cast(pl.String)
        return pl.coalesce(text.str.strip_chars().cast(pl.Float64, strict=False), iso_times(text))
    if not (dtype.is_numeric() or dtype.is_temporal()):
        raise ValueError(f"{values.name} is {dtype} but must hold numbers, dates or times")
    if dtype in (pl.Date, pl.Datetime):
        column = column.cast(pl.Datetime("us"))
    return column.to_physical().cast(pl.Float64)


def iso_times(text: pl.Expr) -> pl.Expr:
    """ISO dates and times as microseconds; null for other text.

    >>> pl.select(iso_times(pl.Series(["1970-01-01T00:00:01Z", "1970-01-02", "Monday"]))).to_series().to_list()
    [1000000.0, 86400000000.0, None]
    """
    text = text.str.strip_chars().str.replace("T", " ", literal=True).str.replace("Z$", "")
    moments = (text.str.to_datetime(form, time_unit="us", strict=False) for form in TIME_FORMATS)
    return pl.coalesce(*(moment.cast(pl.Int64).cast(pl.Float64) for moment in moments))

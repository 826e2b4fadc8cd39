"""Which columns of a table are used, and for what: those that are named, and what others look like."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import polars as pl

from .source import Source, check_separator
from .values import MISSING, iso_times

ROWS = 100_000  # rows that are examined
FEW = 32  # whole numbers with at most this many distinct values are categories
LISTS = 0.1  # text is lists if at least this share of values contains a separator
ID_NAME = re.compile(r"(^|[_\W])(id|ids|code|zip)$|[a-z](Id|ID)$", re.IGNORECASE)

Kind = Literal["number", "category", "list", "none"]


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and what each is used for.

    ``label`` is None if only features are read, and ``time`` is the column by which rows are sorted. ``bags`` are the
    categorical columns with several values per row, separated by ``multi_separator``. ``positive`` says which values of
    the label are a click (``values.Label``). Fields and values that are one of ``missing`` are missing, as empty ones.
    """

    label: str | None
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    bags: tuple[str, ...] = ()
    time: str | None = None
    multi_separator: str = "|"
    positive: str | None = None
    missing: tuple[str, ...] = MISSING

    def __post_init__(self) -> None:
        """Check names and separator."""
        check_separator("multi_separator", self.multi_separator)
        counts = Counter(self.all)
        if wrong := sorted(name for name, count in counts.items() if not name or "\n" in name or count > 1):
            names = ", ".join(map(repr, wrong))
            raise ValueError(f"names of columns ({names}) must be unique, not empty, and of one line")

    @property
    def all(self) -> tuple[str, ...]:
        """Every column that is read."""
        return tuple(n for n in (self.label, *self.dense, *self.categorical, self.time) if n is not None)

    @property
    def single(self) -> tuple[str, ...]:
        """The categorical columns with one value per row."""
        return tuple(name for name in self.categorical if name not in self.bags)


class Inferred(NamedTuple):
    """The inferred kind of a column, and the reason."""

    name: str
    kind: Kind
    reason: str


class ChosenColumns(NamedTuple):
    """The columns of a table that are used, those of them whose kind was inferred, and those that nothing names."""

    columns: Columns
    inferred: list[Inferred]
    left_out: list[str]


def choose_columns(
    source: Source, named: Columns, *, drop: Iterable[str] = (), infer_others: bool = False
) -> ChosenColumns:
    """Choose the features of a table: the named columns and, if asked or if none is named, what others look like.

    Args:
        source: the table.
        named: label and time, and the features that are named.
        drop: columns that are not used.
        infer_others: infer the kind of all other columns, even if some features are named.

    Raises:
        ValueError: if a column is missing, or both named and dropped, or there are no categories.
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
            raise ValueError(
                f"{source.path} has no column that looks like categories: name them (categorical=, --categorical)"
            )
    if not categorical:
        raise ValueError("categorical must name at least one column")
    bags = tuple(name for name in categorical if name in bags or source.schema[name] in (pl.List, pl.Array))
    columns = replace(named, dense=dense, categorical=categorical, bags=bags)
    return ChosenColumns(columns, inferred, [] if inferred else others)


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

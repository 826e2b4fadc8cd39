"""Which columns of a table are used, and for what: those that are named, and what others look like."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from .infer import ROWS, Inferred, infer
from .source import Source, check_separator
from .values import MISSING


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
    dense, categorical, bags = named.dense, named.categorical, named.bags
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
    if extra := sorted(set(bags) - set(categorical)):
        raise ValueError(f"multi ({', '.join(extra)}) must be among the categorical columns")
    bags = tuple(name for name in categorical if name in bags or source.schema[name] in (pl.List, pl.Array))
    columns = replace(named, dense=dense, categorical=categorical, bags=bags)
    return ChosenColumns(columns, inferred, [] if inferred else others)

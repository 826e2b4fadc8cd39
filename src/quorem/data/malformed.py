"""Malformed lines and rows of a file: counted, shown with the reason, and left out."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

SHOWN_LINES = 5
SHOWN_CHARACTERS = 40


class ParsedRows(NamedTuple):
    """Parsed rows, the number of each one's line or row in the file, and the fraction of the file read so far."""

    frame: pl.DataFrame
    numbers: NDArray[np.int64]
    done: float


@dataclass
class Malformed:
    """The number of lines left out, and the first of them with the reasons."""

    source: str  # the file, for messages
    limit: int | None  # so many may be left out; with one more, ``add`` raises; None: none may
    unit: str = "line"  # what is numbered from 1: "line" or "row"
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, reason: str) -> None:
        """Add a malformed line; raises ValueError if there are now more than ``limit``."""
        if self.limit is None:
            raise ValueError(f"{self.unit} {number} of {self.source}: {reason}")
        self.count += 1
        self.first = sorted([*self.first, (number, reason)])[:SHOWN_LINES]
        if self.count > self.limit:
            lines = f"{self.count} malformed {self.unit}{'s' * (self.count != 1)} so far"
            rule = f"more than the {self.limit} that may be left out (max_malformed=, --max-malformed)"
            shown, earlier = [], ""
            for number, reason in self.first:  # a rule that several values in turn break is written once
                value, _, broken = reason.partition(") ")
                shown.append(f"{self.unit} {number}: " + (f"{value})" if broken and broken == earlier else reason))
                earlier = broken
            more = ", ..." * (self.count > len(self.first))
            raise ValueError(f"{self.source} has {lines}, {rule}: {'; '.join(shown)}{more}")

    def filtered(self, rows: ParsedRows, column: str, rule: str, is_bad: pl.Expr) -> ParsedRows:
        """The rows for which ``is_bad`` does not hold; the others are added: ``column`` breaks ``rule`` there."""
        bad = rows.frame.select(is_bad.fill_null(False)).to_series()
        if not bad.any():
            return rows
        for number, value in zip(rows.numbers[bad.to_numpy()].tolist(), rows.frame[column].filter(bad), strict=True):
            text = repr(value)
            text = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
            self.add(number, f"{column} is missing" if value is None else f"{column} ({text}) {rule}")
        return ParsedRows(rows.frame.filter(~bad), rows.numbers[~bad.to_numpy()], rows.done)

"""A CSV or Parquet file, opened once: its columns, its first rows, and all rows in blocks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from ..files import atomic as files
from .malformed import Malformed, ParsedRows
from .text import BLOCK_BYTES, TextFile, TextLayout, parse

SEPARATORS = (",", ";", "\t", "|")
BINARY = {b"PAR1\x15": "a Parquet", b"ARROW1\0": "an Arrow"}  # how such files begin
PARQUET_ROWS = 1 << 18


@dataclass(frozen=True)
class Source:
    """An open file.

    ``schema`` has the columns and their types; those of a text file are text. A text file has ``text``, a Parquet file
    ``table``. Fields of a text file may be ``quoted``, and its first ``header_lines`` are no rows.
    """

    path: Path
    schema: Mapping[str, pl.DataType]
    separator: str = ","
    text: TextFile | None = None
    table: pl.LazyFrame | None = None
    header_lines: int = 0
    quoted: bool = True

    @property
    def unit(self) -> str:
        """What is numbered in messages."""
        return "row" if self.text is None else "line"

    def check_present(self, wanted: Iterable[str]) -> None:
        """Raise ValueError unless the file has all wanted columns."""
        if missing := sorted(set(wanted) - set(self.schema)):
            names = list(self.schema)
            shown = ", ".join(n if n.isprintable() else ascii(n) for n in (name[:40] for name in names[:20]))
            shown += ", ..." * (len(names) > 20)
            raise ValueError(f"{self.path} has no column {', '.join(missing[:5])}; it has {shown}")

    def first_rows(self, names: Sequence[str], limit: int) -> pl.DataFrame:
        """At most ``limit`` of the first rows; those of a text file as text, from its first block."""
        if self.table is not None:
            with _naming(self.path):
                frame = self.table.select(names).head(limit).collect()
        else:
            assert self.text is not None
            malformed = Malformed(str(self.path), len(self.text.head.data))
            layout = self._layout(dict.fromkeys(names, pl.String), ())
            parts = parse([self.text.head], layout, malformed, self.header_lines)
            frame = pl.concat([pl.DataFrame(schema=dict(layout.types)), *(part.frame for part in parts)]).head(limit)
            if malformed.count and not frame.height:
                line, reason = malformed.first[0]
                raise ValueError(f"{self.path} has no line that can be read: line {line}: {reason}")
        if not frame.height:
            raise ValueError(f"{self.path} has no rows")
        return frame

    def rows(
        self, types: Mapping[str, type[pl.DataType]], missing: tuple[str, ...], malformed: Malformed
    ) -> Iterator[ParsedRows]:
        """All rows in blocks; those of a text file can be read only once.

        Args:
            types: the columns that are read, with the types that the fields of a text file have.
            missing: fields of a text file that stand for a missing value, besides empty ones.
            malformed: where malformed lines are counted.
        """
        self.check_present(types)
        if self.text is not None:
            yield from parse(self.text.chunks(), self._layout(types, missing), malformed, self.header_lines)
            return
        assert self.table is not None
        with _naming(self.path):
            total = self.table.select(pl.len()).collect().item()
            for start in range(0, total, PARQUET_ROWS):
                frame = self.table.select(*types).slice(start, PARQUET_ROWS).collect()
                stop = start + frame.height
                yield ParsedRows(frame, np.arange(start + 1, stop + 1), stop / total)

    def _layout(self, types: Mapping[str, type[pl.DataType]], missing: tuple[str, ...]) -> TextLayout:
        return TextLayout(list(self.schema), types, self.separator, quoted=self.quoted, missing=missing)


def open_source(path: Path, separator: str | None = None, label: str | None = None, size: int = BLOCK_BYTES) -> Source:
    """Open a CSV file with a header line (plain or gzip), or a Parquet file (a name that ends in ``.parquet``).

    Args:
        path: the file.
        separator: separator between the fields of a CSV file; None means the first of ``, ; tab |`` with which
            ``label`` is a column, or if none is, the one that makes the most columns.
        label: name of a column.
        size: bytes of text that are parsed at a time.

    Raises:
        ValueError: if the file is empty, damaged or of another kind.
    """
    files.check_is_file(path)
    if path.suffix == ".parquet":
        with _naming(path):
            table = pl.scan_parquet(path, glob=False)  # "[", "*" and "?" of a name stand for themselves
            return Source(path, table.collect_schema(), separator or SEPARATORS[0], table=table)
    text = TextFile(path, size)
    for magic, kind in BINARY.items():
        if text.head.data.startswith(magic):
            raise ValueError(f"{path} is {kind} file, but must be CSV, or Parquet with a name that ends in .parquet")
    if separator is None:
        headers = {separator: _header(text, separator) for separator in SEPARATORS}
        most = max(SEPARATORS, key=lambda separator: max(len(headers[separator]), 1))
        separator = next((separator for separator in SEPARATORS if label in headers[separator]), most)
    check_separator("separator", separator)
    names, header_lines = text.header(separator)
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{path} has more than one column {', '.join(map(repr, repeated[:5]))}")
    return Source(path, dict.fromkeys(names, pl.String()), separator, text, header_lines=header_lines)


def _header(text: TextFile, separator: str) -> list[str]:
    try:
        return text.header(separator)[0]
    except ValueError:  # quotes that make no sense with this separator
        return []


def check_separator(name: str, value: str) -> None:
    """Raise ValueError unless ``value`` can separate fields or values."""
    if len(value) != 1 or not value.isascii() or value in '"\r\n\0':
        raise ValueError(f"{name} ({value!r}) must be one ASCII character, and no quote or line end")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of Polars become ValueErrors that name the Parquet file."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from None

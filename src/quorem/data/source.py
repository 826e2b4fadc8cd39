"""A CSV or Parquet file, opened once: its columns, its first rows, and all rows in blocks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from ..checks import shown_names
from ..files import atomic as files
from . import values
from .malformed import Malformed, ParsedRows
from .meta import Columns, Transform, check_separator
from .text import BLOCK_BYTES, TextFile, TextLayout, parse

SEPARATORS = (",", ";", "\t", "|")
PARQUET_ROWS = 1 << 18
LABEL, TIME = "\nlabel", "\ntime"  # rows have labels, as 0 and 1, and times, as floats, under these names


@dataclass(frozen=True)
class Source:
    """An open file: text, or a Parquet table.

    ``schema`` has the columns and their types; those of a text file are text. ``is_csv`` says whether a text file has a
    header line, and fields that may be quoted.
    """

    path: Path
    schema: Mapping[str, pl.DataType]
    content: TextFile | pl.LazyFrame
    separator: str = ","
    is_csv: bool = True

    @property
    def unit(self) -> str:
        """What is numbered in messages."""
        return "line" if isinstance(self.content, TextFile) else "row"

    def check_present(self, wanted: Iterable[str]) -> None:
        """Raise ValueError unless the file has all wanted columns."""
        if missing := sorted(set(wanted) - set(self.schema)):
            names = list(self.schema)
            shown = ", ".join(n if n.isprintable() else ascii(n) for n in (name[:40] for name in names[:20]))
            shown += ", ..." * (len(names) > 20)
            raise ValueError(f"{self.path} has no column {shown_names(missing)}; it has {shown}")

    def first_rows(self, names: Sequence[str], limit: int) -> pl.DataFrame:
        """At most ``limit`` of the first rows; those of a text file as text, from its first block."""
        if isinstance(self.content, TextFile):
            head = self.content.head
            malformed = Malformed(str(self.path), len(head))
            layout = TextLayout(list(self.schema), names, self.separator, self.is_csv)
            rows = parse([(head, 1.0)], layout, malformed, has_header=self.is_csv)
            frame = pl.concat([part.frame for part in rows]).head(limit)
            if malformed.count and not frame.height:
                line, reason = malformed.first[0]
                raise ValueError(f"{self.path} has no line that can be read: line {line}: {reason}")
        else:
            with _naming(self.path):
                frame = self.content.select(names).head(limit).collect()
        if not frame.height:
            raise ValueError(f"{self.path} has no rows")
        return frame

    def rows(self, columns: Columns, transforms: Mapping[str, Transform], malformed: Malformed) -> Iterator[ParsedRows]:
        """All well-formed rows in blocks; those of a text file can be read only once.

        They are as ``values.features`` gives them, with labels and times in ``LABEL`` and ``TIME``.
        """
        self.check_present(columns.all)
        for batch in self._blocks(columns, malformed):
            if columns.label is not None:
                label, dtype = pl.col(columns.label), batch.frame.schema[columns.label]
                clicks = values.clicks(label, dtype, columns.positive, columns.missing)
                batch = batch._replace(frame=batch.frame.with_columns(clicks.alias(LABEL)))
                rule = values.LABEL_RULE if columns.positive is None else "must be a number"
                batch = malformed.filtered(batch, columns.label, rule, pl.col(LABEL).is_null())
            if columns.time is not None:
                times = values.times(batch.frame[columns.time]).alias(TIME)
                batch = batch._replace(frame=batch.frame.with_columns(times))
                rule, is_bad = "must be a number, or an ISO date or time", ~pl.col(TIME).is_finite().fill_null(False)
                batch = malformed.filtered(batch, columns.time, rule, is_bad)
            keep = [name for name in (LABEL, TIME) if name in batch.frame]
            yield values.features(batch, columns, transforms, malformed, keep)

    def _blocks(self, columns: Columns, malformed: Malformed) -> Iterator[ParsedRows]:
        if isinstance(self.content, TextFile):
            layout = TextLayout(list(self.schema), columns.all, self.separator, self.is_csv, columns.missing)
            yield from parse(self.content.chunks(), layout, malformed, has_header=self.is_csv)
            return
        with _naming(self.path):
            total = self.content.select(pl.len()).collect().item()
            for start in range(0, total, PARQUET_ROWS):
                frame = self.content.select(columns.all).slice(start, PARQUET_ROWS).collect()
                stop = start + frame.height
                yield ParsedRows(frame, np.arange(start + 1, stop + 1), stop / total)


def open_source(
    path: Path,
    separator: str | None = None,
    column: str | None = None,
    size: int = BLOCK_BYTES,
    usual: str | None = None,
) -> Source:
    """Open a CSV file with a header line (plain or gzip), or a Parquet file (a name that ends in ``.parquet``).

    Without a separator, that of a CSV file is the first of ``usual`` and ``, ; tab |`` with which ``column`` is one; if
    none is, ``usual``, or the one that makes the most columns. ``size`` bytes of text are parsed at a time.
    """
    files.check_is_file(path)
    if path.suffix == ".parquet":
        with _naming(path):
            table = pl.scan_parquet(path, glob=False)  # "[", "*" and "?" of a name stand for themselves
            return Source(path, table.collect_schema(), table, separator or SEPARATORS[0])
    text = TextFile(path, size)
    if text.head.startswith(b"PAR1"):
        raise ValueError(f"{path} is a Parquet file: its name must end in .parquet")
    if separator is None:
        first_line = text.head.partition(b"\n")[0].decode(errors="replace")
        tried = SEPARATORS if usual is None else (usual, *SEPARATORS)
        columns = {each: [name.strip('\r"') for name in first_line.split(each)] for each in tried}
        most = max(tried, key=lambda each: len(columns[each]))
        separator = next((each for each in tried if column in columns[each]), usual or most)
    check_separator("separator", separator)
    names = text.header(separator)
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"{path} has more than one column {', '.join(map(repr, repeated[:5]))}")
    return Source(path, dict.fromkeys(names, pl.String()), text, separator)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of Polars become ValueErrors that name the Parquet file."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ValueError(f"{path} is not a Parquet file, or damaged: {error}") from None

"""Delimited text, parsed by Polars in blocks of whole lines; malformed lines are counted and left out, never repaired.

Polars reads a line with too few fields as one with missing values, and stops at other malformed lines without naming
them. So a block goes straight to Polars only if a count of its separators and quotes shows that every line is whole.
Any other block is read line by line with the ``csv`` module, which tells the malformed lines from the others.
"""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..files import atomic as files
from .batches import ahead
from .malformed import Malformed, ParsedRows

BLOCK_BYTES = 1 << 24
MOST_QUOTED = csv.field_size_limit()  # most characters of a quoted field; a longer one counts as not closed
NEWLINE, RETURN, QUOTE = b'\n\r"'
BAD_QUOTES = "a quote that is not closed, or text after a closing quote"


class Chunk(NamedTuple):
    """Whole lines of a file, and the fraction of the file read so far."""

    data: bytes
    done: float
    is_cut: bool = False  # the file ends without a line break; one is added


@dataclass(frozen=True)
class TextLayout:
    """The columns of a text file, the types of those that are wanted, and how fields are written."""

    names: Sequence[str]
    types: Mapping[str, type[pl.DataType]]
    separator: str = "\t"
    quoted: bool = False
    missing: tuple[str, ...] = ()  # fields that stand for a missing value, besides empty ones


class TextFile:
    """A plain or gzip file, which is read once; its first lines are in ``head`` from the start.

    Args:
        path: the file.
        size: bytes of text in a chunk.

    Raises:
        ValueError: if it is not a file, the gzip stream is damaged or cut off, or a line is longer than two chunks.
    """

    def __init__(self, path: Path, size: int = BLOCK_BYTES) -> None:
        files.check_is_file(path)
        self.path = path
        self._rest = ahead(_chunks(path, size))
        self.head = next(self._rest, Chunk(b"", 1.0))

    def chunks(self) -> Iterator[Chunk]:
        """All chunks; the next one is read ahead. Only the first call gives those after ``head``."""
        return chain([self.head] if self.head.data else [], self._rest)

    def header(self, separator: str) -> tuple[list[str], int]:
        """The fields of the first row of a file with quoted fields, and the number of lines that they take."""
        lines = io.TextIOWrapper(io.BytesIO(self.head.data), "utf-8", "replace", newline="\n")
        reader = csv.reader(lines, delimiter=separator, strict=True)
        try:
            names = next(reader, None)
        except csv.Error:
            raise ValueError(f"{self.path}: the header has {BAD_QUOTES}") from None
        if names is None:
            raise ValueError(f"{self.path} is empty")
        return names or [""], reader.line_num


def _chunks(path: Path, size: int) -> Iterator[Chunk]:
    num_bytes = 0
    with open(path, "rb") as file:
        total = max(os.fstat(file.fileno()).st_size, 1)
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        text = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            while data := text.read(size) + (last := text.readline(2 * size)):  # no line is cut in two
                if len(last) == 2 * size and not last.endswith(b"\n"):
                    raise ValueError(f"{path} has a line of more than {2 * size:,} bytes: this is not a text file")
                is_cut = not data.endswith(b"\n")
                plain = data if num_bytes else data.removeprefix(b"\xef\xbb\xbf")
                yield Chunk(plain + b"\n" if is_cut else plain, min(file.tell() / total, 1.0), is_cut)
                num_bytes += len(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path}: the gzip stream is damaged or cut off after {num_bytes:,} bytes of text: {error}"
            ) from None


def parse(chunks: Iterable[Chunk], layout: TextLayout, malformed: Malformed, skip: int = 0) -> Iterator[ParsedRows]:
    """Parse the well-formed lines of a file, a chunk at a time; the others are added to ``malformed``.

    A line is malformed if it has the wrong number of fields, a NUL byte, bytes that are not UTF-8, quotes that are not
    closed, or a field that is not of its column's type. Both line ends, ``\\n`` and ``\\r\\n``, are accepted. An empty
    field is a missing value. The first ``skip`` lines are not parsed.

    >>> chunk = Chunk(b'1,"a\\nb"\\n2\\n3,19" screen\\n', 1.0)
    >>> layout, malformed = TextLayout(["x", "y"], {"x": pl.Int64, "y": pl.String}, ",", quoted=True), Malformed("", 9)
    >>> [(rows.frame.rows(), rows.numbers.tolist()) for rows in parse([chunk], layout, malformed)], malformed.first
    ([([(1, 'a\\nb'), (3, '19" screen')], [1, 4])], [(3, '1 field where 2 are expected')])
    """
    line, rest, chunk = 1 + skip, b"", Chunk(b"", 1.0)
    for chunk in chunks:
        data = rest + chunk.data.split(b"\n", skip)[-1] if skip or rest else chunk.data
        skip = 0
        rows, rest = _parse(data, line, chunk, layout, malformed, is_end=False)
        line += _count(data, NEWLINE) - _count(rest, NEWLINE)
        yield rows
    if rest:
        yield _parse(rest, line, chunk, layout, malformed, is_end=True)[0]


def _parse(
    data: bytes, line: int, chunk: Chunk, layout: TextLayout, malformed: Malformed, *, is_end: bool
) -> tuple[ParsedRows, bytes]:
    """The rows in lines of text, of which the first has the number ``line``; and the text of a row that goes on."""
    whole = None if b"\0" in data else _whole_rows(data, line, layout)
    if whole is not None and not (is_end and whole.rest):
        try:
            frame = _read(whole.data, layout)
            if frame.height == len(whole.numbers):
                return ParsedRows(frame, whole.numbers, chunk.done), whole.rest
        except pl.exceptions.PolarsError:
            pass  # a field is not of its column's type, or not UTF-8
    return _parse_lines(data, line, chunk, layout, malformed, is_end=is_end)


class WholeRows(NamedTuple):
    """The text of whole rows, the number of each one's first line, and the text of a row that goes on after it."""

    data: bytes
    numbers: NDArray[np.int64]
    rest: bytes


def _whole_rows(data: bytes, line: int, layout: TextLayout) -> WholeRows | None:
    """The rows of lines of text, if all have the right number of fields; None if not, or if a quote is out of place.

    The number of all separators shows it: Polars itself refuses rows with too many fields.
    """
    num_separators, rest = len(layout.names) - 1, b""
    if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
        return None
    if not (layout.quoted and b'"' in data):
        num_lines = _count(data, NEWLINE)
        if _count(data, ord(layout.separator)) != num_separators * num_lines:
            return None
        return WholeRows(data, np.arange(line, line + num_lines), rest)
    array = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(array == QUOTE)
    if not _quotes_are_in_place(array, quotes, ord(layout.separator)):
        return None
    is_plain = ~np.logical_xor.accumulate(array == QUOTE)  # an odd quote opens a field, the next one closes it
    is_newline = array == NEWLINE
    ends = np.flatnonzero(is_newline & is_plain)
    end = int(ends[-1]) + 1 if len(ends) else 0
    data, rest = data[:end], data[end:]
    if len(rest) > MOST_QUOTED:
        return None
    if np.count_nonzero((array[:end] == ord(layout.separator)) & is_plain[:end]) != num_separators * len(ends):
        return None
    breaks = np.flatnonzero(is_newline[:end])
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    return WholeRows(data, line + np.searchsorted(breaks, starts), rest)


def _quotes_are_in_place(array: NDArray[np.uint8], quotes: NDArray[np.int64], separator: int) -> bool:
    """Whether every odd quote starts a field and every even one ends it; the text ends with a line break."""
    opening, closing = quotes[0::2], quotes[1::2]  # a doubled quote closes and opens again
    if (closing - opening[: len(closing)] > MOST_QUOTED).any():
        return False
    is_border = np.zeros(256, bool)
    is_border[[separator, NEWLINE, QUOTE]] = True
    after = array[closing + 1]
    ends_line = (after == RETURN) & (array[np.minimum(closing + 2, len(array) - 1)] == NEWLINE)
    return bool(is_border[array[opening - 1]].all() and (is_border[after] | ends_line).all())


def _read(data: bytes, layout: TextLayout) -> pl.DataFrame:
    if not data:
        return pl.DataFrame(schema=dict(layout.types))
    frame = pl.read_csv(
        data,
        has_header=False,
        schema={name: layout.types.get(name, pl.String) for name in layout.names},
        separator=layout.separator,
        quote_char='"' if layout.quoted else None,
        null_values=list(layout.missing) or None,
    )
    return frame.select(*layout.types)


def _parse_lines(
    data: bytes, first: int, chunk: Chunk, layout: TextLayout, malformed: Malformed, *, is_end: bool
) -> tuple[ParsedRows, bytes]:
    """As ``_parse``, by the ``csv`` module. After a malformed line it starts again with the next one."""
    text = io.StringIO(data.decode(errors="surrogateescape"), newline="\n")  # a carriage return alone ends no line
    lines = text.readlines()
    rows: list[list[str]] = []
    numbers: list[int] = []
    row_start = 0
    quoting: Any = csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE
    while row_start < len(lines):
        start = row_start
        remaining = (lines[k] for k in range(start, len(lines)))
        reader = csv.reader(remaining, delimiter=layout.separator, quoting=quoting, strict=True)
        try:
            for fields in reader:
                row = fields or [""]  # an empty line
                number, row_start = first + row_start, start + reader.line_num
                is_last = chunk.is_cut and row_start == len(lines)
                if (flaw := _flaw(row, len(layout.names), is_last)) is not None:
                    malformed.add(number, flaw)
                else:
                    rows.append(row)
                    numbers.append(number)
        except csv.Error as error:
            is_at_end = start + reader.line_num == len(lines) and not is_end
            if is_at_end and layout.quoted and sum(map(len, lines[row_start:])) <= MOST_QUOTED:
                break  # the row may go on in the next chunk
            malformed.add(
                first + row_start, "a carriage return inside a line" if "new-line" in str(error) else BAD_QUOTES
            )
            row_start += 1
    rest = "".join(lines[row_start:]).encode(errors="surrogateescape")
    position = {name: k for k, name in enumerate(layout.names)}
    values = {name: [row[position[name]] for row in rows] for name in layout.types}
    frame = pl.DataFrame(values, schema=dict.fromkeys(layout.types, pl.String))
    return _typed(ParsedRows(frame, np.array(numbers, np.int64), chunk.done), layout, malformed), rest


def _flaw(row: list[str], num_fields: int, is_cut: bool) -> str | None:
    """What is wrong with the fields of a line; None if nothing is."""
    if len(row) != num_fields:
        end = ", and the file ends inside the line" if is_cut else ""
        return f"{len(row)} field{'s' * (len(row) != 1)} where {num_fields} are expected{end}"
    text = "".join(row)
    if "\0" in text:
        return "a NUL byte"
    return None if text.isascii() or not any("\udc80" <= c <= "\udcff" for c in text) else "not UTF-8"


def _typed(rows: ParsedRows, layout: TextLayout, malformed: Malformed) -> ParsedRows:
    """The rows whose fields all have their columns' types; the others are added to ``malformed``."""
    is_missing = pl.all().is_in(["", *layout.missing])
    rows = rows._replace(frame=rows.frame.select(pl.when(~is_missing).then(pl.all())))
    for name, dtype in layout.types.items():
        if dtype != pl.String:
            values = pl.col(name).str.strip_chars(" ").cast(dtype, strict=False)
            rule = f"must be {'an integer' if dtype.is_integer() else 'a number'}"
            rows = malformed.filtered(rows, name, rule, values.is_null() & pl.col(name).is_not_null())
            rows = rows._replace(frame=rows.frame.with_columns(values))
    return rows


def _count(data: bytes, byte: int) -> int:
    # In pieces that fit in the cache; several times faster than bytes.count for a frequent byte.
    array, step = np.frombuffer(data, np.uint8), 1 << 18
    return sum(int(np.count_nonzero(array[first : first + step] == byte)) for first in range(0, len(array), step))

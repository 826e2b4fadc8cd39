"""Delimited text, parsed by Polars in blocks of whole lines; malformed lines are counted and left out, never repaired.

Polars reads a line with too few fields as one with missing values, and stops at other malformed lines without naming
them. So a block goes straight to Polars only if it has no quotes and a count of its separators shows that every line is
whole. Any other block is first split into rows by Python's ``csv``; a quoted field may go on over several lines.
"""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl

from ..files import atomic as files
from .batches import ahead
from .malformed import Malformed, ParsedRows

BLOCK_BYTES = 1 << 24
MOST_QUOTED = 1 << 17  # most bytes of a row with line breaks; in a longer one, a quote counts as not closed
MOST_BLANK = 1 << 17  # most bytes of blank lines at the end that are ignored
BAD_QUOTES = "a quote that is not closed, or text after a closing quote"

Chunk = tuple[bytes, float]  # whole lines of a file, and the fraction of the file read so far


@dataclass(frozen=True)
class TextLayout:
    """The columns of a text file, those of them that are wanted, and how fields are written."""

    names: Sequence[str]
    wanted: Sequence[str]
    separator: str = "\t"
    quoted: bool = False
    missing: tuple[str, ...] = ()  # fields that stand for a missing value, besides empty ones


class TextFile:
    """A plain or gzip file, read once in chunks of ``size`` bytes; its first lines are in ``head`` from the start."""

    def __init__(self, path: Path, size: int = BLOCK_BYTES) -> None:
        files.check_is_file(path)
        self.path = path
        self._rest = ahead(_chunks(path, size))
        self._first = next(self._rest, (b"", 1.0))
        self.head = self._first[0]

    def chunks(self) -> Iterator[Chunk]:
        """All chunks; the next one is read ahead. Only the first call gives those after ``head``."""
        return chain([self._first] if self.head else [], self._rest)

    def header(self, separator: str) -> list[str]:
        """The fields of the first line; raises ValueError if its quotes make no sense."""
        if not self.head:
            raise ValueError(f"{self.path} is empty")
        try:
            return _row([self.head.partition(b"\n")[0]], 0, separator, quoted=True)[0]
        except (ValueError, EOFError) as error:
            raise ValueError(f"{self.path}: line 1: {error}") from None


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
                plain = data if num_bytes else data.removeprefix(b"\xef\xbb\xbf")
                yield plain if plain.endswith(b"\n") else plain + b"\n", min(file.tell() / total, 1.0)
                num_bytes += len(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            where = f"after {num_bytes:,} bytes of text"
            raise ValueError(f"{path}: the gzip stream is damaged or cut off {where}: {error}") from None


def parse(
    chunks: Iterable[Chunk], layout: TextLayout, malformed: Malformed, *, has_header: bool = False
) -> Iterator[ParsedRows]:
    """Parse the well-formed lines of a file, a chunk at a time; the others are added to ``malformed``.

    A line is malformed if it has the wrong number of fields, a NUL byte, bytes that are not UTF-8, quotes that are not
    closed. Both line ends, ``\\n`` and ``\\r\\n``, are accepted. An empty field is a missing value. Blank lines at the
    end of a file of several columns are no rows.
    """
    line, rest, done = 1, b"", 1.0
    for data, done in chunks:
        if has_header and line == 1:
            data, line = data.partition(b"\n")[2], 2
        data = rest + data
        stop = _without_blank_end(data, layout)
        rows, rest = _parse(data[:stop], line, done, layout, malformed, is_end=False)
        rest += data[stop:]
        line += data.count(b"\n") - rest.count(b"\n")
        yield rows
    if stop := _without_blank_end(rest, layout):
        yield _parse(rest[:stop], line, done, layout, malformed, is_end=True)[0]


def _without_blank_end(data: bytes, layout: TextLayout) -> int:
    """The length of some lines without the few blank ones at their end, which may be at the end of the file."""
    text = data.rstrip(b"\r\n")
    length = data.index(b"\n", len(text)) + 1 if text else 0
    is_missing_value = len(layout.names) == 1
    return len(data) if is_missing_value or len(data) - length > MOST_BLANK else length


def _parse(
    data: bytes, line: int, done: float, layout: TextLayout, malformed: Malformed, *, is_end: bool
) -> tuple[ParsedRows, bytes]:
    """The rows in lines of text, of which the first has the number ``line``; and the lines of a row that goes on."""
    if _is_whole(data, layout):
        with suppress(pl.exceptions.PolarsError):  # a line has too many fields, or is not UTF-8
            frame, num_lines = _read(data, layout), data.count(b"\n")
            if frame.height == num_lines:
                return ParsedRows(frame, np.arange(line, line + num_lines), done), b""
    whole, numbers, expected = io.StringIO(), [], len(layout.names)
    writer = csv.writer(whole, delimiter=layout.separator, quoting=csv.QUOTE_ALL, lineterminator="\n")
    lines, start = io.BytesIO(data).readlines(), 0
    while start < len(lines):
        num_lines = 1
        try:
            fields, num_lines = _row(lines, start, layout.separator, quoted=layout.quoted)
            if (count := len(fields)) != expected:
                raise ValueError(f"{count} field{'s' * (count != 1)} where {expected} are expected")
            writer.writerow(fields)
            numbers.append(line + start)
        except (ValueError, EOFError) as error:
            if isinstance(error, EOFError) and not is_end:
                break
            malformed.add(line + start, str(error))
        start += num_lines
    frame = _read(whole.getvalue().encode(), layout, quoted=True)
    return ParsedRows(frame, np.array(numbers, np.int64), done), b"".join(lines[start:])


def _is_whole(data: bytes, layout: TextLayout) -> bool:
    """Whether no field is quoted, and the lines have as many separators as they should have together."""
    if b"\0" in data or data.count(b"\r") != data.count(b"\r\n") or (layout.quoted and b'"' in data):
        return False
    return data.count(layout.separator.encode()) == (len(layout.names) - 1) * data.count(b"\n")


def _row(lines: Sequence[bytes], start: int, separator: str, *, quoted: bool) -> tuple[list[str], int]:
    """The fields of the row that begins on a line, and its number of lines.

    ValueError says why the line is malformed; EOFError says that a quote is open where the text ends.
    """
    text = _text(lines[start])
    if not quoted or '"' not in text:
        return text.rstrip("\r\n").split(separator), 1
    try:
        reader = csv.reader(_texts(lines, start), delimiter=separator, strict=True)
        return next(reader), reader.line_num
    except (csv.Error, ValueError):
        raise ValueError(BAD_QUOTES) from None


def _texts(lines: Sequence[bytes], start: int) -> Iterator[str]:
    """The lines of which a row may consist; after the last one, EOFError."""
    size = 0
    for line in range(start, len(lines)):
        size += len(lines[line])
        if size > MOST_QUOTED and line > start:
            raise ValueError(BAD_QUOTES)
        yield _text(lines[line])
    raise EOFError(BAD_QUOTES)


def _text(line: bytes) -> str:
    """A line as text, with its end; ValueError says why it is none."""
    if b"\0" in line:
        raise ValueError("a NUL byte")
    if b"\r" in line.removesuffix(b"\n").removesuffix(b"\r"):
        raise ValueError("a carriage return inside a line")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def _read(data: bytes, layout: TextLayout, *, quoted: bool = False) -> pl.DataFrame:
    """The wanted columns of whole lines, as text; ``quoted`` if all fields are."""
    if not data:
        return pl.DataFrame(schema=dict.fromkeys(layout.wanted, pl.String))
    frame = pl.read_csv(
        data,
        has_header=False,
        schema=dict.fromkeys(layout.names, pl.String),
        separator=layout.separator,
        quote_char='"' if quoted else None,
        null_values=list(layout.missing) or None,
    ).select(layout.wanted)
    return frame.select(pl.when(~pl.all().is_in(["", *layout.missing])).then(pl.all())) if quoted else frame

"""Delimited text, parsed by Polars in blocks of whole lines; malformed lines are counted and left out, never repaired.

Polars reads a line with too few fields as one with missing values, and stops at other malformed lines without naming
them. So a block goes straight to Polars only if a count of its separators shows that every line is whole. Any other
block is first split into rows by a regular expression, which tells the malformed lines from the others.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from ..files import atomic as files
from .batches import ahead
from .malformed import Malformed, ParsedRows

BLOCK_BYTES = 1 << 24
MOST_QUOTED = 1 << 17  # most bytes of a row with line breaks; in a longer one, a quote counts as not closed
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
        if not self.head.data:
            raise ValueError(f"{self.path} is empty")
        row = _row_pattern(separator, 1, quoted=True).match(self.head.data)
        if row is None or row.lastgroup not in ("whole", "other"):
            raise ValueError(f"{self.path}: the header has {BAD_QUOTES}")
        return [name.decode(errors="replace") for name in _fields(row[0], separator)], row[0].count(b"\n")


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
        line += _count(data, b"\n") - rest.count(b"\n")
        yield rows
    if rest:
        yield _parse(rest, line, chunk, layout, malformed, is_end=True)[0]


def _parse(
    data: bytes, line: int, chunk: Chunk, layout: TextLayout, malformed: Malformed, *, is_end: bool
) -> tuple[ParsedRows, bytes]:
    """The rows in lines of text, of which the first has the number ``line``; and the text of a row that goes on."""
    if _is_whole(data, layout):
        with suppress(pl.exceptions.PolarsError):  # a line has too many fields, or a field another type; or not UTF-8
            frame, num_lines = _read(data, layout, layout.types), _count(data, b"\n")
            if frame.height == num_lines:
                return ParsedRows(frame, np.arange(line, line + num_lines), chunk.done), b""
    rows: list[bytes] = []
    numbers: list[int] = []
    start, num_fields = 0, len(layout.names)
    pattern, is_text = _row_pattern(layout.separator, num_fields, quoted=layout.quoted), _text_flaw(data) is None
    while start < len(data):
        match = pattern.match(data, start)
        assert match is not None
        kind, row, flaw = match.lastgroup, match[0], None
        if kind == "open" and len(row) <= MOST_QUOTED and not is_end:
            break
        if kind == "open" or (len(row) > MOST_QUOTED and row.count(b"\n") > 1):
            kind, row = "broken", data[start : data.index(b"\n", start) + 1]
        start += len(row)
        num_lines = row.count(b"\n")
        if kind == "broken":
            flaw = "a carriage return inside a line" if b"\r" in row[:-2] else BAD_QUOTES
        elif kind == "other":
            fields = _fields(row, layout.separator) if layout.quoted else row.split(layout.separator.encode())
            end = ", and the file ends inside the line" if chunk.is_cut and start == len(data) else ""
            if len(fields) != num_fields:
                flaw = f"{len(fields)} field{'s' * (len(fields) != 1)} where {num_fields} are expected{end}"
            row = _quoted(fields, layout.separator)
        if flaw is None and not is_text:
            flaw = _text_flaw(row)
        if flaw is None:
            rows.append(row)
            numbers.append(line)
        else:
            malformed.add(line, flaw)
        line += num_lines
    frame = _read(b"".join(rows), layout, dict.fromkeys(layout.types, pl.String))
    parsed = ParsedRows(frame, np.array(numbers, np.int64), chunk.done)
    return _typed(parsed, layout, malformed), data[start:]


def _is_whole(data: bytes, layout: TextLayout) -> bool:
    """Whether no field is quoted, and the lines have as many separators as they should have together."""
    if b"\0" in data or data.count(b"\r") != data.count(b"\r\n") or (layout.quoted and b'"' in data):
        return False
    return _count(data, layout.separator.encode()) == (len(layout.names) - 1) * _count(data, b"\n")


def _row_pattern(separator: str, num_fields: int, *, quoted: bool) -> re.Pattern[bytes]:
    """Matches a row of text, as one of four groups.

    ``whole`` is a row with the right number of fields, which Polars can read; ``other`` has another number of fields,
    or a quote inside a field that does not begin with one; ``open`` has a quote that is not closed before the text
    ends; ``broken`` is any other line.
    """
    stop = re.escape(separator.encode())
    text = rb'"[^"]*+(?:""[^"]*+)*+'
    clean, field = rb'(?:%b"|[^"%b\r\n]*+)' % (text, stop), rb'(?:%b"|(?!")[^%b\r\n]*+)' % (text, stop)
    if not quoted:
        clean = field = rb"[^%b\r\n]*+" % stop
    groups = {
        "whole": rb"(?:%b%b){%d}+%b\r?\n" % (clean, stop, num_fields - 1, clean),
        "other": rb"(?:%b%b)*+%b\r?\n" % (field, stop, field),
        "open": rb"(?:%b%b)*+%b\Z" % (field, stop, text),
        "broken": rb"[^\n]*+\n",
    }
    return re.compile(b"|".join(b"(?P<%b>%b)" % (name.encode(), group) for name, group in groups.items()))


def _fields(row: bytes, separator: str) -> list[bytes]:
    """The fields of a row with quoted fields, without their quotes."""
    stop = re.escape(separator.encode())
    pattern = rb'(?:"([^"]*+(?:""[^"]*+)*+)"|([^%b\r\n]*+))(?:%b|\r?\n)' % (stop, stop)
    return [quoted.replace(b'""', b'"') or plain for quoted, plain in re.findall(pattern, row)]


def _quoted(fields: Sequence[bytes], separator: str) -> bytes:
    """A row of fields that are all quoted."""
    return separator.encode().join(b'"%b"' % field.replace(b'"', b'""') for field in fields) + b"\n"


def _text_flaw(data: bytes) -> str | None:
    """Why bytes are not text; None if they are."""
    if b"\0" in data:
        return "a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _read(data: bytes, layout: TextLayout, types: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    if not data:
        return pl.DataFrame(schema=dict(types))
    frame = pl.read_csv(
        data,
        has_header=False,
        schema={name: types.get(name, pl.String) for name in layout.names},
        separator=layout.separator,
        quote_char='"' if layout.quoted else None,
        null_values=list(layout.missing) or None,
    )
    return frame.select(*types)


def _typed(rows: ParsedRows, layout: TextLayout, malformed: Malformed) -> ParsedRows:
    """The rows whose fields all have their columns' types; the others are added to ``malformed``."""
    is_missing = pl.all().is_in(["", *layout.missing])
    rows = rows._replace(frame=rows.frame.select(pl.when(~is_missing).then(pl.all())))
    for name, dtype in layout.types.items():
        if dtype != pl.String:
            values = pl.col(name).str.strip_chars(" ").cast(dtype, strict=False)
            rows = malformed.filtered(rows, name, "must be a number", values.is_null() & pl.col(name).is_not_null())
            rows = rows._replace(frame=rows.frame.with_columns(values))
    return rows


def _count(data: bytes, byte: bytes) -> int:
    # In pieces that fit in the cache; several times faster than bytes.count for a frequent byte.
    array, step = np.frombuffer(data, np.uint8), 1 << 18
    return sum(int(np.count_nonzero(array[first : first + step] == ord(byte))) for first in range(0, len(array), step))

"""Delimited text, parsed in blocks of whole lines; malformed lines are counted and left out, never repaired.

Polars parses each block. It would read a line with too few fields as one with missing values. So a block is passed to
it directly only if the number of separators shows that every line is complete; otherwise malformed lines are removed
first.
"""

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .. import files
from . import quoting
from .ahead import ahead
from .quoting import NEWLINE

BLOCK_BYTES = 1 << 24
SHOWN = 5


@dataclass
class Malformed:
    """The number of lines left out, and the first of them with the reasons.

    Args:
        source: the file, for messages.
        limit: number of malformed lines that are tolerated; with one more, ``add`` raises.
        unit: what is numbered, ``"line"`` or ``"row"``, from 1.
    """

    source: str
    limit: int
    unit: str = "line"
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, numbers: NDArray[np.int64], reasons: list[str]) -> None:
        """Add malformed lines.

        Raises:
            ValueError: if there are now more than ``limit``.
        """
        self.count += len(numbers)
        examples = zip(numbers[:SHOWN].tolist(), reasons[:SHOWN], strict=True)
        self.first = sorted([*self.first, *examples])[:SHOWN]
        if self.count > self.limit:
            shown = "; ".join(f"{self.unit} {number}: {reason}" for number, reason in self.first)
            more = ", ..." if self.count > len(self.first) else ""
            raise ValueError(
                f"{self.source} has {self.count} malformed {self.unit}s so far,"
                f" more than max_malformed ({self.limit}): {shown}{more}"
            )

    def filtered(self, rows: "ParsedRows", reasons: Mapping[str, pl.Expr]) -> "ParsedRows":
        """The rows for which no condition holds; the others are added, each for its reason.

        Raises:
            ValueError: if there are more than ``limit``.
        """
        frame, numbers, done = rows
        for reason, condition in reasons.items():
            bad = frame.select(condition.fill_null(False)).to_series()
            if bad.any():
                self.add(numbers[bad.to_numpy()], [reason] * min(int(bad.sum()), SHOWN))
                frame, numbers = frame.filter(~bad), numbers[~bad.to_numpy()]
        return ParsedRows(frame, numbers, done)


class TextBlock(NamedTuple):
    """Whole lines of a file, the first one's number, the number of line breaks, and the fraction of the file read."""

    data: bytes
    first_line: int
    num_breaks: int
    done: float
    cut: bool  # the file ends without a line break
    broken: tuple[int, ...] = ()  # numbers of lines that were blanked because their quotes are wrong


class ParsedRows(NamedTuple):
    """Parsed rows, the number of each one's line or row in the file, and the fraction of the file read so far."""

    frame: pl.DataFrame
    numbers: NDArray[np.int64]
    done: float


@dataclass(frozen=True)
class TextLayout:
    """The columns of a text file, the types of those that are wanted, the separator, and whether fields are quoted."""

    names: Sequence[str]
    types: Mapping[str, type[pl.DataType]]
    separator: str = "\t"
    quoted: bool = False


def blocks(path: Path, *, separator: str | None = None, skip: int = 0, size: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Blocks of about ``size`` bytes of a plain or gzip file, cut at line ends; the next block is read ahead.

    Args:
        path: the file.
        separator: separator of a file with quoted fields, whose quotes ``quoting.cut`` handles; None if no field is
            quoted.
        skip: number of lines to skip at the start.
        size: bytes per block.

    Raises:
        ValueError: if it is not a file, if the gzip stream is damaged or cut off, or a line is longer than a block.
    """
    files.check_is_file(path)
    line, rest = 1, b""
    most = 2 * (size if separator is None else max(size, quoting.MOST_QUOTED))
    with open(path, "rb") as file:
        chunks = ahead(_chunks(file, size))
        while True:
            try:
                done, chunk = next(chunks, (1.0, None))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}: the gzip stream is damaged or cut off after line {line}: {error}") from None
            if chunk is None:
                break
            if line == 1 and not rest:
                chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            cut = _cut(rest, chunk, separator)
            if not cut.rows and len(cut.rest) > most:
                raise ValueError(f"{path}: line {line} is longer than {most:,} bytes: this is not a text file")
            block, rest = _block(cut, line, done, is_cut=False), cut.rest
            line += block.num_breaks
            if block.data:
                yield without_head(block, skip, separator)
                skip = 0
    if rest:
        is_cut = not rest.endswith(b"\n")
        cut = _cut(rest, b"\n" * is_cut, separator, is_end=True)
        yield without_head(_block(cut, line, 1.0, is_cut=is_cut), skip, separator)


def _block(cut: quoting.Cut, line: int, done: float, *, is_cut: bool) -> TextBlock:
    broken = tuple(line + number for number in cut.broken)
    return TextBlock(cut.rows, line, _count(cut.rows, NEWLINE), done, is_cut, broken)


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[float, bytes]]:
    """Pieces of the text, each with the fraction of the file read so far."""
    total = max(os.fstat(file.fileno()).st_size, 1)
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    text = gzip.GzipFile(fileobj=file) if is_packed else file
    while data := text.read(size) + text.readline(2 * size):  # up to a line end, so that no line is split
        yield min(file.tell() / total, 1.0), data


def without_head(block: TextBlock, skip: int, separator: str | None) -> TextBlock:
    """The block without its first ``skip`` lines; ``separator`` as in ``blocks``."""
    if skip == 0:
        return block
    ends = line_ends(block.data, separator is not None)
    end = int(ends[min(skip, len(ends)) - 1]) + 1
    breaks = _count(block.data[:end], NEWLINE)
    return block._replace(
        data=block.data[end:], first_line=block.first_line + breaks, num_breaks=block.num_breaks - breaks
    )


def parse(block: TextBlock, layout: TextLayout, malformed: Malformed) -> ParsedRows:
    """Parse the well-formed lines of a block; the others are added to ``malformed``.

    A line is malformed if it has the wrong number of fields, a NUL byte, bytes that are not UTF-8, quotes that are not
    closed, or a field that is not of its column's type. Both line ends, ``\\n`` and ``\\r\\n``, are accepted. An empty
    field is a missing value.
    """
    if not block.broken and b"\0" not in block.data and _all_whole(block, layout):
        with suppress(pl.exceptions.PolarsError):
            frame = _read(block.data, layout.types, layout)
            numbers = _line_numbers(block, line_ends(block.data, layout.quoted), layout.quoted)
            if frame.height == len(numbers):
                return ParsedRows(frame, numbers, block.done)
    return _parse_lines(block, layout, malformed)


def _all_whole(block: TextBlock, layout: TextLayout) -> bool:
    """Whether all lines have the right number of fields, assuming that none has too many, which Polars refuses."""
    if not (layout.quoted and b'"' in block.data):
        return _count(block.data, ord(layout.separator)) == (len(layout.names) - 1) * block.num_breaks
    ends = line_ends(block.data, layout.quoted)
    return bool((_num_fields(block.data, ends, layout) == len(layout.names)).all())


def _parse_lines(block: TextBlock, layout: TextLayout, malformed: Malformed) -> ParsedRows:
    ends = line_ends(block.data, layout.quoted)
    numbers = _line_numbers(block, ends, layout.quoted)
    fields, expected = _num_fields(block.data, ends, layout), len(layout.names)
    data = np.frombuffer(block.data, np.uint8)
    flaws = {
        "a quote that is not closed, or text after a closing quote": np.isin(numbers, block.broken),
        f"where {expected} fields are expected": fields != expected,
        "a NUL byte": _has_any(np.flatnonzero(data == 0), ends),
        "not UTF-8": _has_any(_not_utf8(block.data, ends), ends),
    }

    def reason(i: int) -> str:
        text = next(flaw for flaw, has in flaws.items() if has[i])
        if text.startswith("where"):
            text = f"{fields[i]} fields {text.replace('fields ', '')}"
            if block.cut and i == len(ends) - 1:
                text += ", and the file ends inside the line"
        return text

    bad = np.any(list(flaws.values()), axis=0)
    first_bad = np.flatnonzero(bad)[:SHOWN].tolist()
    malformed.add(numbers[bad], [reason(i) for i in first_bad])
    kept = data[np.repeat(~bad, np.diff(ends, prepend=-1))].tobytes()
    return _typed(_read(kept, dict.fromkeys(layout.types, pl.String), layout), numbers[~bad], layout, malformed, block)


def _typed(
    text: pl.DataFrame, numbers: NDArray[np.int64], layout: TextLayout, malformed: Malformed, block: TextBlock
) -> ParsedRows:
    """The rows whose fields all have their columns' types; the others are added to ``malformed``."""
    frame, reasons = text, np.full(len(numbers), "", object)
    for name, dtype in layout.types.items():
        if dtype != pl.String:
            column = text[name].str.strip_chars_start(" ").cast(dtype, strict=False)
            frame = frame.with_columns(column)
            what = "an integer" if dtype.is_integer() else "a number"
            wrong = (column.is_null() & text[name].is_not_null()).to_numpy()
            reasons[wrong & (reasons == "")] = f"{name} is not {what}"
    bad = reasons != ""
    malformed.add(numbers[bad], reasons[bad][:SHOWN].tolist())
    return ParsedRows(frame.filter(pl.Series(~bad)), numbers[~bad], block.done)


def _read(data: bytes, types: Mapping[str, type[pl.DataType]], layout: TextLayout) -> pl.DataFrame:
    if not data:
        return pl.DataFrame(schema=dict(types))
    frame = pl.read_csv(
        data,
        has_header=False,
        schema={name: types.get(name, pl.String) for name in layout.names},
        separator=layout.separator,
        quote_char='"' if layout.quoted else None,
    )
    return frame.select(*types)


def _num_fields(data: bytes, ends: NDArray[np.int64], layout: TextLayout) -> NDArray[np.int64]:
    """Number of fields of each line."""
    array = np.frombuffer(data, np.uint8)
    separators = np.flatnonzero(array == ord(layout.separator))
    if layout.quoted:
        separators = quoting.outside(separators, np.flatnonzero(array == quoting.QUOTE))
    return np.diff(np.searchsorted(separators, ends), prepend=0) + 1


def _line_numbers(block: TextBlock, ends: NDArray[np.int64], quoted: bool) -> NDArray[np.int64]:
    """The number of each line; if quoted fields contain line breaks, that of the row's first line."""
    if len(ends) == block.num_breaks:
        return np.arange(block.first_line, block.first_line + block.num_breaks)
    breaks = np.flatnonzero(np.frombuffer(block.data, np.uint8) == NEWLINE)
    return block.first_line + np.searchsorted(breaks, np.concatenate([[0], ends[:-1] + 1]))


def line_ends(data: bytes, quoted: bool) -> NDArray[np.int64]:
    """The positions of line ends; in regular text with quotes, line breaks within quotes do not count."""
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == NEWLINE)
    return quoting.outside(ends, np.flatnonzero(array == quoting.QUOTE)) if quoted else ends


def _has_any(positions: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which lines contain one of the positions."""
    has = np.zeros(len(ends), bool)
    has[np.searchsorted(ends, positions)] = True
    return has


def _not_utf8(data: bytes, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The position of the first wrong byte of each line that is not UTF-8."""
    positions: list[int] = []
    start = 0
    while True:
        try:
            str(memoryview(data)[start:], "utf-8")
            return np.array(positions, np.int64)
        except UnicodeDecodeError as error:
            positions.append(start + error.start)
            start = int(ends[np.searchsorted(ends, positions[-1])]) + 1


def _cut(rest: bytes, chunk: bytes, separator: str | None, *, is_end: bool = False) -> quoting.Cut:
    """The whole lines of ``rest + chunk``, and the remaining text."""
    if separator is not None and (b'"' in rest or b'"' in chunk):
        return quoting.cut(rest + chunk, separator, is_end=is_end)
    end = chunk.rfind(b"\n") + 1
    if end == len(chunk) and not rest:
        return quoting.Cut(chunk, b"")
    if end == 0:
        return quoting.Cut(b"", rest + chunk)
    return quoting.Cut(b"".join((rest, memoryview(chunk)[:end])), chunk[end:])


def _count(data: bytes, byte: int) -> int:
    # In pieces that fit in the cache; several times faster than bytes.count for a frequent byte.
    array, step = np.frombuffer(data, np.uint8), 1 << 18
    return sum(int(np.count_nonzero(array[first : first + step] == byte)) for first in range(0, len(array), step))

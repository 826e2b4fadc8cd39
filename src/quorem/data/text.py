"""Delimited text in blocks of whole lines; malformed lines are counted and left out, never guessed at.

Polars parses each block. It reads a line with too few fields as one with missing values, so a block is handed
to it only where the number of separators says that every line is whole; a block with a flaw is taken apart
line by line.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

NEWLINE = ord("\n")
BLOCK_BYTES = 1 << 24
SHOWN = 5

T = TypeVar("T")


@dataclass
class Malformed:
    """Count of the lines left out, and where the first ones are.

    Args:
        source: name of the file, for messages.
        limit: the run stops when there are more.
        unit: what the numbers count, ``"line"`` or ``"row"``, from 1.
    """

    source: str
    limit: int
    unit: str = "line"
    count: int = 0
    first: list[tuple[int, str]] = field(default_factory=list)

    def add(self, numbers: NDArray[np.int64], reasons: list[str]) -> None:
        """Note malformed lines.

        Raises:
            ValueError: if there are now more than ``limit``.
        """
        self.count += len(numbers)
        found = zip(numbers[:SHOWN].tolist(), reasons[:SHOWN], strict=True)
        self.first = sorted([*self.first, *found])[:SHOWN]
        if self.count > self.limit:
            shown = "; ".join(f"{self.unit} {number}: {reason}" for number, reason in self.first)
            more = ", ..." if self.count > len(self.first) else ""
            raise ValueError(
                f"{self.source} has {self.count} malformed {self.unit}s so far,"
                f" more than max_malformed ({self.limit}): {shown}{more}"
            )


class Block(NamedTuple):
    """Whole lines of a file, the number of the first one, their line breaks, and the part of the file read so far."""

    data: bytes
    first_line: int
    num_breaks: int
    done: float
    cut: bool  # the file ends without a line break


class Rows(NamedTuple):
    """Parsed rows, the number of the line or row each came from, and the part of the file read so far."""

    frame: pl.DataFrame
    numbers: NDArray[np.int64]
    done: float


@dataclass(frozen=True)
class Layout:
    """Columns of a text file with their types, and how fields are set apart."""

    columns: Mapping[str, type[pl.DataType]]
    separator: str = "\t"
    quote: str | None = None


def blocks(path: Path, *, quote: str | None = None, skip: int = 0, size: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of about ``size`` bytes of a plain or gzip file, cut at line ends; the next is read ahead.

    Args:
        path: the file.
        quote: a line break between two of these characters does not end a line.
        skip: lines to leave out at the start.
        size: bytes of a block.

    Raises:
        ValueError: if the gzip stream is damaged or cut off, or a line is longer than a block.
    """
    line, rest = 1, b""
    with open(path, "rb") as file:
        chunks = ahead(_chunks(file, size))
        while True:
            try:
                done, chunk = next(chunks, (1.0, None))
            except (EOFError, zlib.error) as error:
                raise ValueError(f"{path}: the gzip stream is damaged or cut off after line {line}: {error}") from None
            if chunk is None:
                break
            if line == 1 and not rest:
                chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            data, rest = _cut(rest, chunk, quote)
            if not data and len(rest) > 2 * size:
                raise ValueError(f"{path}: line {line} is longer than {2 * size:,} bytes: this is not a text file")
            block = Block(data, line, _count(data, NEWLINE), done, cut=False)
            line += block.num_breaks
            if block.data:
                yield _without_head(block, skip, quote)
                skip = 0
    if rest:
        rest += b"\n"
        yield _without_head(Block(rest, line, _count(rest, NEWLINE), 1.0, cut=True), skip, quote)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in another thread while the one before is used."""
    packed = ((item,) for item in items)
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, packed, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, packed, None)
            yield item[0]


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[float, bytes]]:
    """Pieces of the text, each with the part of the file read so far."""
    total = max(os.fstat(file.fileno()).st_size, 1)
    gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not gzip:
        end = 0
        while end < total:
            start = file.seek(end + size)
            end = start + len(file.readline(2 * size))  # up to a line end, so that nothing has to be joined
            file.seek(start - size)
            if not (data := file.read(end - start + size)):
                return
            yield min(end / total, 1.0), data
        return
    member, whole, parts = zlib.decompressobj(wbits=31), False, []
    while data := file.read(1 << 20):
        while data:
            whole = False
            parts.append(member.decompress(data))
            data = b""
            if member.eof:
                data, member, whole = member.unused_data.lstrip(b"\0"), zlib.decompressobj(wbits=31), True
        if sum(map(len, parts)) >= size:
            yield min(file.tell() / total, 1.0), b"".join(parts)
            parts = []
    yield 1.0, b"".join(parts)
    if not whole:
        raise EOFError("the end of the stream is missing")


def _without_head(block: Block, skip: int, quote: str | None) -> Block:
    if skip == 0:
        return block
    ends = _line_ends(np.frombuffer(block.data, np.uint8), quote)
    end = int(ends[min(skip, len(ends)) - 1]) + 1
    breaks = _count(block.data[:end], NEWLINE)
    return Block(block.data[end:], block.first_line + breaks, block.num_breaks - breaks, block.done, block.cut)


def parse(block: Block, layout: Layout, malformed: Malformed) -> Rows:
    """The block's well-formed lines; the others go to ``malformed``.

    A line is malformed if it has another number of fields, a NUL byte, bytes that are not UTF-8, or a field that
    is not of its column's type. Both line ends, ``\\n`` and ``\\r\\n``, are accepted; an empty field is missing.
    """
    if b"\0" not in block.data and _all_whole(block, layout):
        with suppress(pl.exceptions.PolarsError):
            frame = _read(block.data, layout.columns, layout)
            numbers = _line_numbers(block, layout.quote)
            if frame.height == len(numbers):
                return Rows(frame, numbers, block.done)
    return _parse_lines(block, layout, malformed)


def _all_whole(block: Block, layout: Layout) -> bool:
    """Whether all lines have the right number of fields, provided that none has too many (which Polars refuses)."""
    if not _has_quotes(block.data, layout.quote):
        return _count(block.data, ord(layout.separator)) == (len(layout.columns) - 1) * block.num_breaks
    return bool((_num_fields(np.frombuffer(block.data, np.uint8), layout) == len(layout.columns)).all())


def _parse_lines(block: Block, layout: Layout, malformed: Malformed) -> Rows:
    data = np.frombuffer(block.data, np.uint8)
    numbers, fields = _line_numbers(block, layout.quote), _num_fields(data, layout)
    ends = (_line_ends(data, layout.quote) + 1).tolist()
    lines = [block.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    reasons: dict[int, str] = {}
    expected = len(layout.columns)
    for i, (line, count) in enumerate(zip(lines, fields.tolist(), strict=True)):
        if count != expected:
            reasons[i] = f"{count} fields where {expected} are expected"
            if block.cut and i == len(lines) - 1:
                reasons[i] += ", and the file ends inside the line"
        elif b"\0" in line:
            reasons[i] = "a NUL byte"
        elif not _is_utf8(line):
            reasons[i] = "not UTF-8"
    kept = np.array([i for i in range(len(lines)) if i not in reasons], np.int64)
    text = _read(b"".join(lines[i] for i in kept), dict.fromkeys(layout.columns, pl.String), layout)
    frame = text
    for name, dtype in layout.columns.items():
        if dtype != pl.String:
            column = text[name].str.strip_chars_start(" ").cast(dtype, strict=False)
            frame = frame.with_columns(column)
            what = "an integer" if dtype.is_integer() else "a number"
            for i in kept[(column.is_null() & text[name].is_not_null()).to_numpy()]:
                reasons.setdefault(int(i), f"{name} is not {what}")
    bad = np.array(sorted(reasons), np.int64)
    malformed.add(numbers[bad], [reasons[int(i)] for i in bad])
    whole = ~np.isin(kept, bad)
    return Rows(frame.filter(pl.Series(whole)), numbers[kept[whole]], block.done)


def _read(data: bytes, columns: Mapping[str, type[pl.DataType]], layout: Layout) -> pl.DataFrame:
    if not data:
        return pl.DataFrame(schema=dict(columns))
    return pl.read_csv(
        data, has_header=False, schema=dict(columns), separator=layout.separator, quote_char=layout.quote
    )


def _num_fields(data: NDArray[np.uint8], layout: Layout) -> NDArray[np.int64]:
    """Number of fields of each line."""
    separators = np.flatnonzero((data == ord(layout.separator)) & _outside_quotes(data, layout.quote))
    before = np.searchsorted(separators, _line_ends(data, layout.quote))
    return np.diff(before, prepend=0) + 1


def _line_numbers(block: Block, quote: str | None) -> NDArray[np.int64]:
    """Number of each line; of its first one, where a quoted field has line breaks."""
    if not _has_quotes(block.data, quote):
        return np.arange(block.first_line, block.first_line + block.num_breaks)
    data = np.frombuffer(block.data, np.uint8)
    starts = np.concatenate([[0], _line_ends(data, quote)[:-1] + 1])
    return block.first_line + np.searchsorted(np.flatnonzero(data == NEWLINE), starts)


def _line_ends(data: NDArray[np.uint8], quote: str | None) -> NDArray[np.int64]:
    return np.flatnonzero((data == NEWLINE) & _outside_quotes(data, quote))


def _cut(rest: bytes, chunk: bytes, quote: str | None) -> tuple[bytes, bytes]:
    """The whole lines of ``rest`` and ``chunk`` together, and what is left."""
    if _has_quotes(rest, quote) or _has_quotes(chunk, quote):
        both = rest + chunk
        ends = _line_ends(np.frombuffer(both, np.uint8), quote)
        end = int(ends[-1]) + 1 if len(ends) else 0
        return both[:end], both[end:]
    end = chunk.rfind(b"\n") + 1
    if end == len(chunk) and not rest:
        return chunk, b""
    if end == 0:
        return b"", rest + chunk
    return b"".join((rest, memoryview(chunk)[:end])), chunk[end:]


def _has_quotes(data: bytes, quote: str | None) -> bool:
    return quote is not None and quote.encode() in data


def _outside_quotes(data: NDArray[np.uint8], quote: str | None) -> NDArray[np.bool_] | bool:
    # A doubled quote inside a quoted field toggles twice, so the parity still holds after it.
    return True if quote is None else np.cumsum(data == ord(quote)) % 2 == 0


def _count(data: bytes, byte: int, step: int = 1 << 18) -> int:
    # In pieces that stay in the cache, several times faster than bytes.count for a frequent byte.
    array = np.frombuffer(data, np.uint8)
    return sum(int(np.count_nonzero(array[at : at + step] == byte)) for at in range(0, len(array), step))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True

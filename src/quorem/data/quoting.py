"""Quotes in CSV text: which line breaks end a row, and what a stray quote means.

A quote at the start of a field opens a quoted field. Inside it, two quotes mean one, and a quote before a separator or
a line end closes it. Any other quote is stray: a character of an unquoted field (``19" monitor``). Text without stray
quotes is *regular*: the text between an odd quote and the next even quote is quoted. NumPy finds such text quickly,
and Polars reads it the same way. Other text is made regular row by row: fields with stray quotes are quoted. A line
that is not a row, because a field is not closed or continues after its closing quote, is blanked and reported.
"""

import re
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEWLINE = ord("\n")
RETURN = ord("\r")
QUOTE = ord('"')
MOST_QUOTED = 1 << 16  # most bytes between two quotes; beyond that, a quote counts as not closed


class Cut(NamedTuple):
    """Whole rows of a text, the remaining text, and which lines (from 0) were not rows and are blanked."""

    rows: bytes
    rest: bytes
    broken: tuple[int, ...] = ()


def cut(text: bytes, separator: str, *, is_end: bool = False) -> Cut:
    """Cut regular whole rows off the start of a text that begins with a row.

    Args:
        text: CSV text.
        separator: one ASCII character.
        is_end: whether this is the end of the file; the text must end with a line break, and ``rest`` is empty.

    >>> cut(b'1,"a\\nb"\\n2,19" screen\\n3,"c', ",")
    Cut(rows=b'1,"a\\nb"\\n2,"19"" screen"\\n', rest=b'3,"c', broken=())
    >>> cut(b'1,"a\\n2,b\\n', ",", is_end=True)
    Cut(rows=b'\\n2,b\\n', rest=b'', broken=(0,))
    """
    data = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(data == QUOTE)
    if _is_regular(data, quotes, ord(separator)):
        is_open = len(quotes) % 2 == 1
        if not is_open or (not is_end and len(data) - quotes[-1] - 1 <= MOST_QUOTED):
            ends = outside(np.flatnonzero(data == NEWLINE), quotes)
            end = int(ends[-1]) + 1 if len(ends) else 0
            return Cut(text[:end], text[end:])
    return _cut_rows(text, separator, is_end)


def fields(row: bytes, separator: str) -> list[bytes]:
    """The fields of one row, without quotes; the row must end with a line break.

    >>> fields(b'a,"b ""c"" d",e\\r\\n', ",")
    [b'a', b'b "c" d', b'e']
    """
    texts = []
    for text, end in _patterns(separator)[1].findall(row):
        if text.startswith(b'"'):
            texts.append(text[1:-1].replace(b'""', b'"'))
        else:
            texts.append(text.removesuffix(b"\r") if end == b"\n" else text)
    return texts


def outside(positions: NDArray[np.int64], quotes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions in regular text that are not quoted, which have an even number of quotes before them."""
    return positions[np.searchsorted(quotes, positions) % 2 == 0] if len(quotes) else positions


def _is_regular(data: NDArray[np.uint8], quotes: NDArray[np.int64], separator: int) -> bool:
    opening, closing = quotes[0::2], quotes[1::2]  # a doubled quote closes and opens again
    if (closing - opening[: len(closing)] - 1 > MOST_QUOTED).any():
        return False
    ended = np.concatenate([data, np.array([NEWLINE, NEWLINE], np.uint8)]) if len(quotes) else data
    before = np.where(opening == 0, NEWLINE, ended[opening - 1])
    after = np.where(ended[closing + 1] == RETURN, ended[closing + 2], ended[closing + 1])
    is_doubled = ended[closing + 1] == QUOTE
    return bool(
        np.isin(before, [separator, NEWLINE, QUOTE]).all()
        and (is_doubled | (after == NEWLINE) | (ended[closing + 1] == separator)).all()
    )


def _cut_rows(text: bytes, separator: str, is_end: bool) -> Cut:
    row, field, start_of_row = _patterns(separator)
    rows, broken = [], []
    start = line = 0
    while start < len(text):
        match = row.match(text, start)
        if match is not None:
            piece = match.group()
            rows.append(_regular(piece, field) if b'"' in piece else piece)
            line += piece.count(b"\n")
            start = match.end()
        elif (end := text.find(b"\n", start)) < 0 or (not is_end and start_of_row.fullmatch(text, start)):
            break  # more text is needed to tell
        else:
            rows.append(b"\n")
            broken.append(line)
            line, start = line + 1, end + 1
    return Cut(b"".join(rows), text[start:], tuple(broken))


@cache
def _patterns(separator: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes]]:
    """Patterns of a row, of a field with its end, and of the start of a row; none can match a text in two ways.

    Groups are repeated by ``*``, not ``*+``: Python before 3.11.5 matches groups wrongly after ``*+``.
    """
    end = re.escape(separator).encode()
    opened = rb'"[^"]{0,%d}+(?:""[^"]{0,%d}+)*' % (MOST_QUOTED, MOST_QUOTED)
    quoted = opened + rb'"(?=' + end + rb"|\r?\n)"
    plain = rb'(?!")[^' + end + rb"\n]*+"
    field = rb"(?:" + quoted + rb"|" + plain + rb")"
    row = field + rb"(?:" + end + field + rb")*\r?\n"
    start_of_row = rb"(?:" + field + end + rb")*(?:" + opened + rb'(?:"\r?)?|' + plain + rb")"
    return re.compile(row), re.compile(rb"(" + field + rb")(" + end + rb"|\r?\n)"), re.compile(start_of_row)


def _regular(row: bytes, field: re.Pattern[bytes]) -> bytes:
    """A row in which fields with stray quotes are quoted."""
    pieces = []
    for text, end in field.findall(row):
        if b'"' in text and not text.startswith(b'"'):
            if end == b"\n" and text.endswith(b"\r"):
                text, end = text[:-1], b"\r\n"
            text = b'"' + text.replace(b'"', b'""') + b'"'
        pieces.append(text + end)
    return b"".join(pieces)

"""Quotes in CSV text, against a reader that goes character by character."""

import io
import itertools

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from quorem.data import quoting
from quorem.data.quoting import NEWLINE, QUOTE, cut, fields, outside


def read(text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """Rows, and the numbers of the lines that are none: the rules of ``quoting``, one character after another."""
    rows, broken, start, line = [], [], 0, 0
    while start < len(text):
        row, end = read_row(text, start, separator)
        if row is None:
            broken.append(line)
            end = text.index("\n", start) + 1
        else:
            rows.append(row)
        line += text.count("\n", start, end)
        start = end
    return rows, broken


def read_row(text: str, at: int, separator: str) -> tuple[list[str] | None, int]:
    row = []
    while True:
        field = ""
        if text[at : at + 1] == '"':
            at += 1
            while True:
                if at >= len(text):
                    return None, at
                if text[at] != '"':
                    field += text[at]
                elif text[at + 1 : at + 2] == '"':
                    field += '"'
                    at += 1
                else:
                    at += 1
                    break
                at += 1
            if text[at : at + 2] == "\r\n":
                at += 1
        else:
            while text[at] not in (separator, "\n"):
                field += text[at]
                at += 1
            if text[at] == "\n":
                field = field.removesuffix("\r")
        row.append(field)
        if text[at] == "\n":
            return row, at + 1
        if text[at] != separator:
            return None, at
        at += 1


texts = st.lists(st.sampled_from(["a", " ", ",", ",", "\n", "\n", "\r\n", '"', '"']), max_size=30).map(
    lambda pieces: "".join(pieces) + "\n"
)


def rows_of(data: bytes) -> list[bytes]:
    array = np.frombuffer(data, np.uint8)
    ends = outside(np.flatnonzero(array == NEWLINE), np.flatnonzero(array == QUOTE)) + 1
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def by_polars(row: bytes) -> list[str]:
    """By Polars, as the preparation reads regular rows."""
    columns = read_row(row.decode(), 0, ",")[0]
    frame = pl.read_csv(io.BytesIO(row), has_header=False, schema={f"{k}": pl.String for k in range(len(columns))})
    return [value or "" for value in frame.row(0)] if frame.height else [""]


@settings(max_examples=500)
@given(texts)
def test_rows_are_those_of_a_reader_that_goes_character_by_character(text):
    rows, broken = read(text, ",")
    made = cut(text.encode(), ",", is_end=True)
    assert (made.rest, list(made.broken)) == (b"", broken)
    regular, again = read(made.rows.decode(), ",")
    assert (regular, again) == (sorted_in(rows, broken, text), [])
    assert [read_row(row.decode(), 0, ",")[0] for row in rows_of(made.rows)] == regular
    assert [by_polars(row) for row in rows_of(made.rows)] == regular
    assert [[field.decode() for field in fields(row, ",")] for row in rows_of(made.rows)] == regular


def sorted_in(rows: list[list[str]], broken: list[int], text: str) -> list[list[str]]:
    """The rows with an empty one at each broken line."""
    merged, line, left = [], 0, list(rows)
    start = 0
    while start < len(text):
        if line in broken:
            merged.append([""])
            end = text.index("\n", start) + 1
        else:
            merged.append(left.pop(0))
            end = read_row(text, start, ",")[1]
        line += text.count("\n", start, end)
        start = end
    return merged


@settings(max_examples=300)
@given(texts, st.lists(st.integers(0, 40), max_size=5))
def test_the_same_rows_are_cut_from_a_text_that_comes_in_pieces(text, places):
    whole, rest, rows, broken, lines = text.encode(), b"", b"", [], 0
    bounds = [0, *sorted(min(place, len(whole)) for place in places), len(whole)]
    for start, stop in itertools.pairwise(bounds):
        made = cut(rest + whole[start:stop], ",")
        rows, rest = rows + made.rows, made.rest
        broken += [lines + line for line in made.broken]
        lines += made.rows.count(b"\n")
    made = cut(rest, ",", is_end=True)
    assert (rows + made.rows, made.rest) == cut(whole, ",", is_end=True)[:2]
    assert (*broken, *(lines + line for line in made.broken)) == cut(whole, ",", is_end=True).broken


@pytest.mark.parametrize("separator", [",", "|", "^", "]", "-", "\\", "\t", "."])
def test_any_separator(separator):
    text = f'1{separator}19" screen{separator}"x{separator}y"\n'.encode()
    row = f'1{separator}"19"" screen"{separator}"x{separator}y"\n'.encode()
    assert cut(text, separator) == (row, b"", ())


def test_a_quote_that_is_not_closed_is_found_out_after_a_while(monkeypatch):
    monkeypatch.setattr(quoting, "MOST_QUOTED", 10)
    quoting._patterns.cache_clear()
    try:
        assert cut(b'1,"23456789\n1', ",") == (b"", b'1,"23456789\n1', ())
        assert cut(b'1,"23456789\n12', ",") == (b"\n", b"12", (0,))
        for end in (b'"\n', b'"\n2,3" x\n'):  # regular, and not
            assert cut(b'1,"123456789\n' + end, ",").broken == ()
            assert cut(b'1,"123456789\n1' + end, ",").broken[:1] == (0,)
    finally:
        quoting._patterns.cache_clear()


def test_many_broken_lines_take_time_in_their_number():
    """Would take hours if each looked through all lines after it."""
    assert cut(b'1,"a\n' * 100_000, ",", is_end=True).broken == tuple(range(100_000))

"""Blocks of quoted CSV text, against a reader that goes character by character."""

import itertools
from unittest.mock import patch

import pytest

pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')

from hypothesis import given, settings
from hypothesis import strategies as st

from quorem.data import malformed as module
from quorem.data.malformed import Malformed
from quorem.data.text import BAD_QUOTES, TextLayout, parse

NAMES = ["a", "b", "c"]
LAYOUT = TextLayout(NAMES, NAMES, ",", quoted=True)


def read(text: str) -> tuple[list[tuple[int, list[str]]], list[int]]:
    """Rows with the numbers of their lines, and the lines that are none or have another number of fields."""
    rows, bad, start, line = [], [], 0, 1
    if not text.strip("\r\n"):
        return [], []
    text = text.rstrip("\r\n") + "\n"  # blank lines at the end are no rows
    while start < len(text):
        row, end = read_row(text, start)
        if row is None:
            end = text.index("\n", start) + 1
        if row is None or len(row) != len(NAMES):
            bad.append(line)
        else:
            rows.append((line, row))
        line += text.count("\n", start, end)
        start = end
    return rows, bad


def read_row(text: str, at: int) -> tuple[list[str] | None, int]:
    """A quote at the start of a field opens it, one before a separator or a line end closes it, others are text."""
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
            while text[at] not in ",\n":
                field += text[at]
                at += 1
            if text[at] == "\n":
                field = field.removesuffix("\r")
        row.append(field)
        if text[at] == "\n":
            return row, at + 1
        if text[at] != ",":
            return None, at
        at += 1


def parsed(chunks: list[bytes], layout: TextLayout = LAYOUT) -> tuple[list[tuple[int, list[str]]], list[int]]:
    malformed, rows = Malformed("it", 10**6), []
    with patch.object(module, "SHOWN_LINES", 10**6):
        for part in parse([(data, 1.0) for data in chunks], layout, malformed):
            texts = [["" if value is None else value for value in row] for row in part.frame.rows()]
            rows += zip(part.numbers.tolist(), texts, strict=True)
    return rows, sorted(line for line, _ in malformed.first)


pieces = st.sampled_from(["a", " ", ",", ",", "\n", "\n", "\r\n", '"', '"', '"b,\nc"', "1,2,3\n", '"",'])
texts = st.lists(pieces, max_size=30).map(lambda parts: "".join(parts) + "\n")


@settings(max_examples=500)
@given(texts)
def test_rows_are_those_of_a_reader_that_goes_character_by_character(text):
    assert parsed([text.encode()]) == read(text)


@settings(max_examples=300)
@given(texts, st.lists(st.integers(0, 10), max_size=4))
def test_the_same_rows_are_read_from_a_text_that_comes_in_chunks(text, cuts):
    lines = text.encode().splitlines(keepends=True)
    bounds = [0, *sorted(min(cut, len(lines)) for cut in cuts), len(lines)]
    chunks = [b"".join(lines[start:stop]) for start, stop in itertools.pairwise(bounds)]
    assert parsed([chunk for chunk in chunks if chunk]) == read(text)


@pytest.mark.parametrize("separator", [",", "|", "^", "]", "-", "\\", "\t", "."])
def test_any_separator(separator):
    text = f'1{separator}19" screen{separator}"x{separator}y"\n'.encode()
    layout = TextLayout(NAMES, NAMES, separator, quoted=True)
    assert parsed([text], layout) == ([(1, ["1", '19" screen', f"x{separator}y"])], [])


@pytest.mark.parametrize("end", [b"\n", b"\r\n\r\n\n"])
@pytest.mark.parametrize("cut", [6, 7])
def test_blank_lines_at_the_end_of_a_file_are_no_rows(end, cut):
    """Others are malformed, also where a chunk ends; in one column a blank line is a missing value."""
    text = b"1,2,3\n\n4,5,6\n" + end
    assert parsed([text]) == parsed([text[:cut], text[cut:]]) == ([(1, ["1", "2", "3"]), (3, ["4", "5", "6"])], [2])
    column = TextLayout(["a"], ["a"], ",", quoted=True)
    assert parsed([b"1\n\n"], column) == ([(1, ["1"]), (2, [""])], [])


def test_a_quote_that_is_not_closed_costs_one_line_however_long_the_file_is():
    """The rows after it are read, although it might have been closed in a later chunk."""
    row = b"1,2,3\n" * 30_000
    malformed = Malformed("it", 9)
    rows = list(parse([(b'1,2,"3\n' + row, 0.5), (row, 1.0)], LAYOUT, malformed))
    assert malformed.first == [(1, BAD_QUOTES)]
    assert sum(part.frame.height for part in rows) == 60_000
    assert rows[-1].numbers[-1] == 60_001


def test_many_broken_lines_take_time_in_their_number():
    """Would take hours if each looked through all lines after it."""
    malformed = Malformed("it", 10**6)
    list(parse([(b'1,"a\n' * 100_000, 1.0)], LAYOUT, malformed))
    assert malformed.count == 100_000

"""Ids for the values of a categorical column: 0 for NULL, others by frequency, by first appearance, or raw hashes.

A column is kept in scratch files, one group of rows after another: the group's words, which are its distinct values, a
null first and then in order of first appearance; and the code of each value, the position of its word. So memory holds
the text of one group at a time, and finally the words of all groups and a number for each value of a column.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..paper.hashing import hash_strings
from .config import PrepareConfig
from .folder import file_name

NULL = 0  # the id of a missing value, in every feature
HASHED_TOKENS = 1 << 20  # at a time


class Numbered(NamedTuple):
    """Ids of NULL and of each token, in order of first appearance; training counts and tokens, in order of id.

    Raw ids have no tokens; ``raw`` has the ids that ``counts`` counts, in ascending order.
    """

    ids: NDArray[Any]
    counts: NDArray[np.int64]
    tokens: pl.Series | None = None
    raw: NDArray[np.int64] | None = None


class Column:
    """One column of text.

    Args:
        name: name of the column.
        folder: folder for the scratch files.
        id_dtype: dtype of the ids.
    """

    def __init__(self, name: str, folder: Path, id_dtype: type[np.integer[Any]]) -> None:
        self.name, self.folder, self.id_dtype = name, folder, id_dtype
        self.num_words: list[int] = []  # per group
        self._ids_file = folder / f"{file_name(name)}.ids"

    def add(self, parts: Sequence[pl.Series]) -> None:
        """Write a group of values, given as parts in order, to scratch files."""
        codes, tokens = by_appearance(pl.concat(parts))
        words = pl.concat([pl.Series("word", [None], dtype=pl.String), tokens.alias("word")])
        self._save(len(self.num_words), "words", words)
        self._save(len(self.num_words), "codes", pl.Series(codes.astype(np.min_scalar_type(len(words)))))
        self.num_words.append(len(words))

    def number(self, num_train: int, config: PrepareConfig, order: NDArray[np.int64] | None = None) -> Numbered:
        """Give all values their ids, in another order if one is given; the first ``num_train`` are in training."""
        groups = range(len(self.num_words))
        number_of_word, tokens = by_appearance(pl.concat([self._load(group, "words") for group in groups]))
        numbers = np.split(number_of_word, np.cumsum(self.num_words)[:-1])
        values = np.concatenate([numbers[group][self._load(group, "codes").to_numpy()] for group in groups])
        if order is not None:
            values = values[order]
            first = np.zeros(len(tokens) + 1, np.int64)
            first[values[::-1]] = np.arange(len(values), 0, -1)  # of several, the last that is written stays
            by_first = np.argsort(first[1:])
            tokens, place = tokens.gather(by_first), np.zeros(len(first), np.int32)
            place[by_first + 1] = np.arange(1, len(first))
            values = place[values]
        numbered = number(tokens, np.bincount(values[:num_train], minlength=len(tokens) + 1), config)
        self._ids_file.write_bytes(numbered.ids[values].data)
        return numbered

    def ids(self, start: int = 0, count: int = -1) -> NDArray[Any]:
        """The ids of ``count`` values from ``start`` on, by default of all; ``number`` must have been called."""
        return np.fromfile(self._ids_file, self.id_dtype, count, offset=start * np.dtype(self.id_dtype).itemsize)

    def _load(self, group: int, what: str) -> pl.Series:
        with open(self._file(group, what), "rb") as file:  # Polars takes "[" and "*" in a path for a pattern
            return pl.read_ipc(file).to_series()

    def _save(self, group: int, what: str, values: pl.Series) -> None:
        values.to_frame(what).write_ipc(self._file(group, what))

    def _file(self, group: int, what: str) -> Path:
        return self.folder / f"{file_name(self.name)}.{group:06}.{what}"


def number(tokens: pl.Series, counts: NDArray[np.int64], config: PrepareConfig) -> Numbered:
    """Ids for tokens, which are in order of first appearance; ``counts`` are those of NULL and each token in training.

    >>> numbered = number(pl.Series(["b", "a", "c"]), np.array([1, 1, 2, 0]), PrepareConfig(vocabulary="train"))
    >>> numbered.ids.tolist(), numbered.counts.tolist(), numbered.tokens.to_list()  # "a" is the more frequent
    ([0, 3, 2, 1], [1, 0, 2, 1], ['a', 'b'])
    """
    if config.ids == "raw":
        parts = (tokens[start : start + HASHED_TOKENS] for start in range(0, len(tokens), HASHED_TOKENS))
        hashed = np.concatenate([[NULL], *map(raw_ids, parts)])
        distinct, position = np.unique(hashed[counts > 0], return_inverse=True)
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, position, counts[counts > 0])
        return Numbered(hashed, total, raw=distinct)
    # Tokens that occur only in later days appear last, so a training vocabulary is a prefix.
    known = int(np.count_nonzero(counts[1:])) if config.vocabulary == "train" else len(tokens)
    order = np.arange(known)
    if config.ids == "frequency":
        order = np.argsort(-counts[1 : known + 1], kind="stable")
    first = config.first_token
    ids = np.full(len(tokens) + 1, 1, np.int32)
    ids[NULL] = NULL
    ids[order + 1] = np.arange(first, first + known)
    ordered = np.zeros(first + known, np.int64)
    ordered[NULL] = counts[NULL]
    ordered[first:] = counts[order + 1]
    return Numbered(ids, ordered, tokens.gather(order))


def raw_ids(words: pl.Series) -> NDArray[np.int64]:
    """The raw id of each word: its ``hash_strings``, or ``NULL`` if it is missing.

    >>> raw_ids(pl.Series(["", "a", None])).tolist() == [*hash_strings(["", "a"]).tolist(), 0]
    True
    """
    ids: NDArray[np.int64] = hash_strings(words.fill_null("").to_list()).numpy()
    ids[words.is_null().to_numpy()] = NULL
    return ids


def by_appearance(values: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Codes from 1 in order of first appearance, 0 for missing values; and the distinct values in that order.

    >>> codes, tokens = by_appearance(pl.Series(["b", None, "a", "b"]))
    >>> codes.tolist(), tokens.to_list()
    ([1, 0, 2, 1], ['b', 'a'])
    """
    frame = values.alias("value").to_frame().with_row_index("row")
    first = frame.select(pl.col("row").min().over("value")).to_series()
    is_first = (first.to_numpy() == np.arange(len(first))) & values.is_not_null().to_numpy()
    codes = np.cumsum(is_first, dtype=np.int32)[first.to_numpy()]
    codes[values.is_null().to_numpy()] = NULL
    return codes, values.filter(pl.Series(is_first))


def write_vocabulary(path: Path, tokens: pl.Series) -> None:
    """Write one token per line in order of id; backslash, line feed and carriage return are escaped by a backslash."""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        tokens = tokens.str.replace_all(plain, escaped, literal=True)
    with open(path, "wb") as file:
        tokens.to_frame("token").write_csv(file, include_header=False, quote_style="never")

"""Ids for the values of one column: 0 for NULL, others by frequency, by first appearance, by hash, or raw hashes."""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..paper.hashing import hash_strings
from .config import PrepareConfig

NULL = 0  # the id of a missing value, in every feature


class Numbered(NamedTuple):
    """Ids of NULL and of each token, in order of first appearance; training counts and tokens, in order of id."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    tokens: pl.Series | None


def number(tokens: pl.Series, counts: NDArray[np.int64], config: PrepareConfig) -> Numbered:
    """Ids for tokens, which are in order of first appearance; ``counts`` are those of NULL and each token in training.

    >>> numbered = number(pl.Series(["b", "a", "c"]), np.array([1, 1, 2, 0]), PrepareConfig(vocabulary="train"))
    >>> numbered.ids.tolist(), numbered.counts.tolist(), numbered.tokens.to_list()  # "a" is the more frequent
    ([0, 3, 2, 1], [1, 0, 2, 1], ['a', 'b'])
    """
    if config.ids == "hash":
        assert config.buckets is not None
        ids = np.concatenate([[NULL], 1 + crc32(tokens) % config.buckets]).astype(np.int32)
        shared = np.zeros(config.buckets + 1, np.int64)
        np.add.at(shared, ids, counts)
        return Numbered(ids, shared, None)
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


def crc32(tokens: pl.Series) -> NDArray[np.int64]:
    """The CRC-32 of each token's UTF-8 bytes, a hash that is available in every language."""
    return np.array([zlib.crc32(token.encode()) for token in tokens], np.int64)


def write_vocabulary(path: Path, tokens: pl.Series) -> None:
    """Write one token per line in order of id; backslash, line feed and carriage return are escaped by a backslash."""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
        tokens = tokens.str.replace_all(plain, escaped, literal=True)
    with open(path, "wb") as file:
        tokens.to_frame("token").write_csv(file, include_header=False, quote_style="never")

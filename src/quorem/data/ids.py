"""Ids for the values of one column: 0 for NULL, others by frequency, by first appearance, by hash, or raw hashes."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ..paper.hashing import hash_strings

NULL = 0  # the id of a missing value, in every feature
RAW_BITS = 40  # default of ``id_bits``
STEP = 1 << 20  # tokens that are converted to text at a time


@dataclass(frozen=True, kw_only=True)
class IdConfig:
    """How tokens are given ids.

    Args:
        ids: ``"frequency"`` (by falling frequency in the training days, ties in order of first appearance; tokens that
            occur only in later days come last), ``"appearance"`` (in order of first appearance, as in the public
            reference code), ``"hash"`` (``1 + crc32(token) % buckets``) or ``"raw"`` (``hash_strings`` of each token as
            text: 64-bit integers without a vocabulary, for ``Table(raw_ids=True)``).
        vocabulary: ``"all"`` has the tokens of all days; ``"train"`` has those of the training days, and all others
            share id 1.
        buckets: number of hashed ids per feature, with ``ids="hash"``.
        id_bits: with ``ids="raw"``, tables have ``2 ** id_bits`` ids; 40 if None.

    Raises:
        ValueError: if a value is unknown, or options contradict each other.

    >>> IdConfig(ids="hash", buckets=1000).vocabulary
    'all'
    """

    ids: Literal["appearance", "frequency", "hash", "raw"] = "frequency"
    vocabulary: Literal["all", "train"] = "all"
    buckets: int | None = None
    id_bits: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.ids not in ("frequency", "appearance", "hash", "raw"):
            raise ValueError(f"ids ({self.ids!r}) must be 'frequency', 'appearance', 'hash' or 'raw'")
        if self.vocabulary not in ("all", "train"):
            raise ValueError(f"vocabulary ({self.vocabulary!r}) must be 'all' or 'train'")
        if (self.ids == "hash") != (self.buckets is not None):
            raise ValueError(f"buckets ({self.buckets}) must be given with ids='hash', and only then")
        if self.buckets is not None and not 1 <= self.buckets < 2**31 - 1:
            raise ValueError(f"buckets ({self.buckets}) must be in [1, 2**31 - 1)")
        if self.id_bits is not None and (self.ids != "raw" or not 32 <= self.id_bits <= 62):
            raise ValueError(f"id_bits ({self.id_bits}) must be in [32, 62], and given with ids='raw' only")
        if self.ids in ("hash", "raw") and self.vocabulary == "train":
            raise ValueError(f"vocabulary ('train') must be 'all' with ids={self.ids!r}, which knows no unknown token")

    @property
    def id_space(self) -> int:
        """Number of ids that a table of raw ids has."""
        return int(2 ** (RAW_BITS if self.id_bits is None else self.id_bits))

    @property
    def first_token(self) -> int:
        """The id of the first token. NULL and, with a training vocabulary, the unknown token come before it."""
        return 2 if self.vocabulary == "train" else 1


class Numbered(NamedTuple):
    """Ids of NULL and of each token, in order of first appearance; training counts and tokens, in order of id."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    tokens: pl.Series | None


def number(tokens: pl.Series, counts: NDArray[np.int64], config: IdConfig) -> Numbered:
    """Ids for tokens, which are in order of first appearance; ``counts`` are those of NULL and each token in training.

    >>> numbered = number(pl.Series(["b", "a", "c"]), np.array([1, 1, 2, 0]), IdConfig(vocabulary="train"))
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
    """The raw id of each word: ``hash_strings`` of the word as text, or ``NULL`` if it is missing.

    >>> raw_ids(pl.Series(["", "a", None])).tolist() == [*hash_strings(["", "a"]).tolist(), 0]
    True
    """
    ids: NDArray[np.int64] = hash_strings(as_text(words).fill_null("").to_list()).numpy()
    ids[words.is_null().to_numpy()] = NULL
    return ids


def by_appearance(values: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Ids from 1 in order of first appearance, 0 for missing values; and the distinct values in that order.

    >>> ids, tokens = by_appearance(pl.Series(["b", None, "a", "b"]))
    >>> ids.tolist(), tokens.to_list()
    ([1, 0, 2, 1], ['b', 'a'])
    """
    frame = pl.DataFrame({"value": values}).lazy().with_row_index("row")
    first = frame.select(pl.col("row").min().over("value")).collect().to_series()
    is_first = first.to_numpy() == np.arange(len(first), dtype=np.uint32)
    missing = values.is_null().arg_max() if values.null_count() else None
    if missing is not None:
        is_first[missing] = False
    rank = np.cumsum(is_first, dtype=np.int32)
    if missing is not None:
        rank[missing] = NULL
    return pl.Series(rank).gather(first).to_numpy(), values.filter(pl.Series(is_first))


def count_ids(ids: NDArray[np.int32], size: int) -> NDArray[np.int64]:
    """How often each of ``size`` ids occurs; counted in parts, because NumPy first widens the ids to int64.

    >>> count_ids(np.array([1, 0, 1], np.int32), 3).tolist()
    [1, 2, 0]
    """
    counts = np.zeros(size, np.int64)
    step = max(4 * size, 1 << 18)
    for start in range(0, len(ids), step):
        counts += np.bincount(ids[start : start + step], minlength=size)
    return counts


def packed(tokens: pl.Series) -> pl.Series:
    """Tokens as one UInt64 each if all have eight bytes, as Criteo's do; otherwise unchanged.

    >>> packed(pl.Series(["0000000a", None])).dtype, packed(pl.Series(["0000000a", "b"])).dtype
    (UInt64, String)
    """
    numbers = tokens.cast(pl.Binary).bin.reinterpret(dtype=pl.UInt64, endianness="little")  # null unless 8 bytes
    return numbers if numbers.null_count() == tokens.null_count() else tokens


def crc32(tokens: pl.Series) -> NDArray[np.int64]:
    """The CRC-32 of each token's UTF-8 bytes, a hash that is available in every language."""
    hashes = np.empty(len(tokens), np.int64)
    for start in range(0, len(tokens), STEP):
        hashes[start : start + STEP] = [zlib.crc32(t.encode()) for t in as_text(tokens[start : start + STEP]).to_list()]
    return hashes


def joined(parts: Sequence[pl.Series]) -> pl.Series:
    """The parts of one column as one series, converted to text if their types differ."""
    if len({part.dtype for part in parts}) > 1:
        parts = [as_text(part) for part in parts]
    return pl.concat(parts)


def as_text(tokens: pl.Series) -> pl.Series:
    """Tokens as text, whether they are text, integers or ``packed``.

    >>> as_text(packed(pl.Series(["0000000a", None]))).to_list()
    ['0000000a', None]
    """
    if tokens.dtype != pl.UInt64:
        return tokens.cast(pl.String)
    data = tokens.fill_null(0).to_numpy().astype("<u8").tobytes()
    present = tokens.is_not_null().to_list()
    text = [data[8 * i : 8 * i + 8].decode() if is_present else None for i, is_present in enumerate(present)]
    return pl.Series(tokens.name, text, dtype=pl.String)


def write_vocabulary(path: Path, tokens: pl.Series) -> None:
    """Write one token per line in order of id; backslash, line feed and carriage return are escaped by a backslash."""
    with open(path, "wb") as file:
        for start in range(0, len(tokens), STEP):
            part = tokens[start : start + STEP]
            if part.dtype == pl.UInt64:
                lines = np.full((len(part), 9), ord("\n"), np.uint8)
                lines[:, :8] = part.to_numpy().astype("<u8").view(np.uint8).reshape(-1, 8)
                data = lines.tobytes()
                if b"\\" not in data and b"\r" not in data and data.count(b"\n") == len(part):
                    file.write(data)
                    continue
            text = as_text(part)
            for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
                text = text.str.replace_all(plain, escaped, literal=True)
            file.write("".join(line + "\n" for line in text.to_list()).encode())

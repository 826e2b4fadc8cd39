"""From the values of one column to ids: NULL is 0, then by first appearance, by frequency or by hash."""

import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .tokens import hex_digits

NULL = 0  # the id of a missing value, in every feature
U = np.uint64
ZEROS, ONES = 0x3030303030303030, U(0x0101010101010101)


@dataclass(frozen=True, kw_only=True)
class IdConfig:
    """How ids are given.

    Args:
        ids: ``"appearance"`` (as the public reference code does, so low ids are frequent ids), ``"frequency"``
            (most frequent over the training days first) or ``"hash"`` (``1 + crc32(token) % buckets``).
        vocabulary: ``"all"`` days, or ``"train"``: tokens that only later days have share id 1.
        buckets: number of hashed ids of each feature.

    Raises:
        ValueError: if a value is unknown or the options do not go together.
    """

    ids: str = "appearance"
    vocabulary: str = "all"
    buckets: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        if self.ids not in ("appearance", "frequency", "hash"):
            raise ValueError(f"ids ({self.ids!r}) must be 'appearance', 'frequency' or 'hash'")
        if self.vocabulary not in ("all", "train"):
            raise ValueError(f"vocabulary ({self.vocabulary!r}) must be 'all' or 'train'")
        if (self.ids == "hash") != (self.buckets is not None):
            raise ValueError(f"buckets ({self.buckets}) must be given with ids='hash', and only then")
        if self.buckets is not None and not 1 <= self.buckets < 2**31 - 1:
            raise ValueError(f"buckets ({self.buckets}) must be in [1, 2**31 - 1)")
        if self.ids == "hash" and self.vocabulary == "train":
            raise ValueError("vocabulary ('train') must be 'all' with ids='hash', which knows no unknown token")

    @property
    def first_token(self) -> int:
        """The id of the first token: after NULL and, with a training vocabulary, the unknown token."""
        return 2 if self.vocabulary == "train" else 1

    def to_dict(self) -> dict[str, object]:
        """The options as JSON holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Encoded:
    """One feature: the id of each value, how often each id occurs in training, and the tokens in order of id."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int64]
    tokens: pl.Series | None


def encode(values: pl.Series, num_train: int, config: IdConfig) -> Encoded:
    """Ids of a column, whose first ``num_train`` values are those of the training days.

    >>> encoded = encode(pl.Series(["b", None, "a", "b", "c"]), 4, IdConfig(vocabulary="train"))
    >>> encoded.ids.tolist(), encoded.counts.tolist(), encoded.tokens.to_list()
    ([2, 0, 3, 2, 1], [1, 0, 2, 1], ['b', 'a'])
    """
    ids, tokens = by_appearance(values)
    counts = np.bincount(ids[:num_train], minlength=len(tokens) + 1)
    if config.ids == "hash":
        assert config.buckets is not None
        new = np.concatenate([[NULL], 1 + crc32(tokens) % config.buckets]).astype(np.int32)
        ids = new[ids]
        return Encoded(ids, np.bincount(ids[:num_train], minlength=config.buckets + 1), None)
    # Tokens that only later days have come last by appearance: a training vocabulary is a prefix.
    known = int(np.count_nonzero(counts[1:])) if config.vocabulary == "train" else len(tokens)
    order = np.arange(known)
    if config.ids == "frequency":
        order = np.argsort(-counts[1 : known + 1], kind="stable")
    first = config.first_token
    new = np.full(len(tokens) + 1, 1, np.int32)
    new[NULL] = NULL
    new[order + 1] = np.arange(first, first + known)
    kept_counts = np.zeros(first + known, np.int64)
    kept_counts[NULL] = counts[NULL]
    kept_counts[first:] = counts[order + 1]
    if config.vocabulary == "train" or config.ids == "frequency":
        ids = new[ids]
    return Encoded(ids, kept_counts, tokens.gather(order) if config.ids == "frequency" else tokens[:known])


def by_appearance(values: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Ids from 1 in order of first appearance, 0 where a value is missing; and the distinct values in that order.

    >>> ids, tokens = by_appearance(pl.Series(["b", None, "a", "b"]))
    >>> ids.tolist(), tokens.to_list()
    ([1, 0, 2, 1], ['b', 'a'])
    """
    frame = pl.DataFrame({"value": values}).lazy().with_row_index("row")
    first = frame.select(pl.col("row").min().over("value")).collect()["row"].to_numpy()
    is_first = (first == np.arange(len(first), dtype=first.dtype)) & values.is_not_null().to_numpy()
    ids = np.cumsum(is_first, dtype=np.int32)[first]
    if values.null_count():
        ids[values.is_null().to_numpy()] = NULL
    return ids, values.filter(pl.Series(is_first))


def hex_or_text(tokens: pl.Series) -> pl.Series:
    """Tokens of eight lower-case hex digits as UInt32, a quarter of their size; others unchanged.

    >>> hex_or_text(pl.Series(["0000000a", None])).to_list(), hex_or_text(pl.Series(["A", "0000000a"])).to_list()
    ([10, None], ['A', '0000000a'])
    """
    as_bytes = tokens.cast(pl.Binary).bin.reinterpret(dtype=pl.UInt64, endianness="little")  # null unless 8 bytes
    if as_bytes.null_count() != tokens.null_count():
        return tokens
    # All eight characters at once, a byte each: '0' is 0x30, 'a' is 0x61, so bit 6 tells letters from digits.
    characters = as_bytes.fill_null(ZEROS).to_numpy()
    letter = (characters >> U(6)) & ONES
    digit = (characters & U(0x0F0F0F0F0F0F0F0F)) + letter * U(9)
    spelled = digit + letter * U(ord("a") - 10 - ord("0")) + U(ZEROS)
    beyond = (digit & U(0xF0F0F0F0F0F0F0F0)) | (((digit + U(0x0606060606060606)) >> U(4)) & ONES) ^ letter
    if beyond.any() or (spelled != characters).any():
        return tokens
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        digit = ((digit << U(shift)) | (digit >> U(2 * shift))) & U(mask)
    numbers = pl.Series(tokens.name, digit.astype(np.uint32))
    return numbers if as_bytes.null_count() == 0 else numbers.set(tokens.is_null(), None)


def to_hex(numbers: pl.Series) -> pl.Series:
    """The tokens that ``hex_or_text`` made numbers of.

    >>> to_hex(pl.Series([10, None], dtype=pl.UInt32)).to_list()
    ['0000000a', None]
    """
    text = pl.Series(numbers.name, hex_digits(numbers.fill_null(0).to_numpy()).view("S8").ravel().astype("U8"))
    return pl.select(pl.when(numbers.is_not_null()).then(text)).to_series().alias(numbers.name)


def crc32(tokens: pl.Series, step: int = 1 << 20) -> NDArray[np.int64]:
    """The CRC-32 of each token's UTF-8 bytes: a hash that any language has."""
    hashes = np.empty(len(tokens), np.int64)
    for start in range(0, len(tokens), step):
        hashes[start : start + step] = [zlib.crc32(t.encode()) for t in as_text(tokens[start : start + step]).to_list()]
    return hashes


def as_text(tokens: pl.Series) -> pl.Series:
    """Tokens as they are written: hex digits, or the value's text."""
    return to_hex(tokens) if tokens.dtype == pl.UInt32 else tokens.cast(pl.String)


def write_vocabulary(path: Path, tokens: pl.Series, step: int = 1 << 20) -> None:
    """One token a line in order of id; backslash, line feed and carriage return are escaped with a backslash."""
    with open(path, "wb") as file:
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            if part.dtype == pl.UInt32:
                digits = np.full((len(part), 9), ord("\n"), np.uint8)
                digits[:, :8] = hex_digits(part.to_numpy())
                file.write(digits.tobytes())
                continue
            text = part.cast(pl.String)
            for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r")):
                text = text.str.replace_all(plain, escaped, literal=True)
            file.write("".join(line + "\n" for line in text.to_list()).encode())

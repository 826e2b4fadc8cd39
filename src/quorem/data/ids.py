"""Ids for the values of a categorical column: 0 for NULL, others by frequency or by first appearance.

A column is kept in scratch files, one group of rows after another: the group's words, which are its distinct values, a
null first and then in order of first appearance; and the code of each value, the position of its word. So memory holds
the text of one group at a time, and finally the words of all groups and a number for each value of a column.
"""

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .config import PrepareConfig
from .folder import Folder, bag_file, file_name
from .values import flat, lengths, offsets_of

NULL = 0  # the id of a missing value, in every feature


class Column:
    """One categorical column of ``folder``, with its scratch files; the values of a bag count one by one."""

    def __init__(self, folder: Folder, name: str, *, is_bag: bool) -> None:
        self.name, self._folder = name, folder
        self._stem = f"{folder.partial}/scratch/{file_name(name)}"
        self._lengths = folder.array(f"{self._stem}.lengths.npy", np.uint32) if is_bag else None
        self._group: list[pl.Series] = []  # values that are not in scratch files yet
        self._num_words: list[int] = []  # per group

    def add(self, values: pl.Series) -> None:
        """Add the values of some rows, or lists of them, to the next group."""
        if self._lengths is not None:
            self._lengths.append(lengths(values))
            values = flat(values)
        self._group.append(values)

    def write_group(self) -> None:
        """Write the values that were added since the last group to scratch files."""
        codes, tokens = by_appearance(pl.concat(self._group))
        words = pl.concat([pl.Series("word", [None], dtype=pl.String), tokens.alias("word")])
        group = len(self._num_words)
        words.to_frame().write_ipc(self._file(group, "words"))
        pl.DataFrame({"code": codes.astype(np.min_scalar_type(len(words)))}).write_ipc(self._file(group, "codes"))
        self._num_words.append(len(words))
        self._group.clear()

    def number(self, num_train: int, config: PrepareConfig, order: NDArray[np.int64] | None) -> int:
        """Give all values their ids; write these, their counts, the vocabulary and the bags. Returns the cardinality.

        Rows are put in another ``order`` if one is given; then the first ``num_train`` are in training.
        """
        if self._lengths is not None:  # from numbers of rows to numbers of values
            sizes = np.load(self._lengths.path)
            offsets = offsets_of(sizes)
            if order is not None:
                starts, sizes = offsets[:-1][order], sizes[order]
                offsets = offsets_of(sizes)
                order = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
            num_train = int(offsets[num_train])
            self._folder.save(bag_file(self.name, "offsets"), offsets)
        groups = range(len(self._num_words))
        number_of_word, tokens = by_appearance(pl.concat([self._load(group, "words") for group in groups]))
        numbers = np.split(number_of_word, np.cumsum(self._num_words)[:-1])
        values = np.concatenate([numbers[group][self._load(group, "codes").to_numpy()] for group in groups])
        if order is not None:  # the order of first appearance changes too
            values, first = by_appearance(pl.Series(values[order]).replace(NULL, None))
            tokens = tokens.gather(first - 1)
        ids, counts, tokens = number(tokens, np.bincount(values[:num_train], minlength=len(tokens) + 1), config)
        ids = ids[values]
        if self._lengths is None:
            ids.tofile(f"{self._stem}.ids")
        else:
            self._folder.save(bag_file(self.name, "values"), ids)
        self._folder.save_counts(self.name, counts)
        write_vocabulary(self._folder.partial / "vocabulary" / f"{file_name(self.name)}.txt", tokens)
        return len(counts)

    def ids(self, start: int, count: int) -> NDArray[np.int32]:
        """The ids of ``count`` rows from ``start`` on; ``number`` must have been called, and rows have no bags."""
        return np.fromfile(f"{self._stem}.ids", np.int32, count, offset=4 * start)

    def _load(self, group: int, what: str) -> pl.Series:
        with open(self._file(group, what), "rb") as file:  # Polars takes "[" and "*" in a path for a pattern
            return pl.read_ipc(file).to_series()

    def _file(self, group: int, what: str) -> str:
        return f"{self._stem}.{group:06}.{what}"


def number(
    tokens: pl.Series, counts: NDArray[np.int64], config: PrepareConfig
) -> tuple[NDArray[np.int32], NDArray[np.int64], pl.Series]:
    """The ids of NULL and of each token, in order of first appearance; the counts and the tokens, in order of id.

    ``tokens`` are in order of first appearance; ``counts`` has NULL and each token, in training.
    """
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
    return ids, ordered, tokens.gather(order)


def by_appearance(values: pl.Series) -> tuple[NDArray[np.int32], pl.Series]:
    """Codes from 1 in order of first appearance, 0 for missing values; and the distinct values in that order."""
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
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        tokens.to_frame("token").write_csv(file, include_header=False, quote_style="never")

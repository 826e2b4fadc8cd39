"""A categorical column under construction, kept in scratch files, one group of rows after another.

For each group, two files are written. One holds the group's words: its distinct values, a null first and then in order
of first appearance. The other holds the code of each value: the position of its word. Memory holds one group at a time,
however long the file is, and finally the words of all groups. After the last group, the words of all groups are given
ids together, and the ids of a group's values are looked up by their codes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from .folder import file_name
from .ids import IdConfig, by_appearance, count_ids, joined, number, raw_ids

CODES = (np.uint8, np.uint16, np.uint32)


class Column:
    """One column.

    Args:
        name: name of the column.
        folder: folder for the scratch files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, folder / file_name(name)
        self.num_values: list[int] = []  # per group
        self.num_words: list[int] = []

    def add(self, parts: Sequence[pl.Series]) -> None:
        """Write a group of values, given as parts in order, to scratch files."""
        codes, tokens = by_appearance(joined(parts))
        counts = count_ids(codes, len(tokens) + 1)
        words = pl.concat([pl.Series("word", [None], dtype=tokens.dtype), tokens.alias("word")])
        group = len(self.num_values)
        pl.DataFrame([words, pl.Series("count", counts)]).write_ipc(self._file(group, "words"))
        with open(self._file(group, "codes"), "wb") as file:
            file.write(codes.astype(self._dtype(len(words))).data)
        self.num_values.append(len(codes))
        self.num_words.append(len(words))

    def number(self, num_train: int, config: IdConfig) -> tuple[NDArray[np.int64], pl.Series | None]:
        """Give the words of all groups their ids; the first ``num_train`` values belong to the training days.

        Returns:
            How often each id occurs in the training days, and the token of each id; None for hashed ids.
        """
        groups = self._groups()
        word, tokens = by_appearance(joined([group["word"] for group in groups]))
        total = np.zeros(len(tokens) + 1, np.int64)
        np.add.at(total, word, self._training_counts(groups, num_train))
        ids, counts, tokens_of_ids = number(tokens, total, config)
        self._write_ids(ids[word])
        return counts, tokens_of_ids

    def number_raw(self, num_train: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the words of each group their raw ids; returns the sorted ids of the training days, and their counts."""
        groups = self._groups()
        counts = self._training_counts(groups, num_train)
        ids = np.concatenate([raw_ids(group["word"]) for group in groups])
        self._write_ids(ids)
        distinct, position = np.unique(ids[counts > 0], return_inverse=True)
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, position, counts[counts > 0])
        return distinct, total

    def _groups(self) -> list[pl.DataFrame]:
        """The words and counts of each group."""
        groups = []
        for group in range(len(self.num_words)):
            with open(self._file(group, "words"), "rb") as file:  # Polars takes "[" and "*" in a path for a pattern
                groups.append(pl.read_ipc(file))
        return groups

    def _training_counts(self, groups: Sequence[pl.DataFrame], num_train: int) -> NDArray[np.int64]:
        """How often each word of each group occurs in the first ``num_train`` values."""
        counts = [group["count"].to_numpy() for group in groups]
        for group, start in enumerate(np.cumsum([0, *self.num_values[:-1]]).tolist()):
            if start + self.num_values[group] > num_train:
                codes = self.codes(group)[: max(num_train - start, 0)]
                counts[group] = count_ids(codes, self.num_words[group])
        return np.concatenate(counts)

    def _write_ids(self, ids: NDArray[np.int32] | NDArray[np.int64]) -> None:
        self.id_dtype = ids.dtype
        with open(self.path.with_name(self.path.name + ".ids"), "wb") as file:
            file.write(ids.data)

    def reordered(self, order: NDArray[np.int64], folder: Path) -> "Column":
        """A column with the same values in another order, written to scratch files in ``folder``."""
        word, tokens = by_appearance(joined([group["word"] for group in self._groups()]))
        first = np.cumsum([0, *self.num_words])
        values = np.concatenate([word[start:][self.codes(g)] for g, start in enumerate(first[:-1].tolist())])[order]
        column = Column(self.name, folder)
        for start, size in zip(np.cumsum([0, *self.num_values]).tolist(), self.num_values, strict=False):
            positions = pl.Series(values[start : start + size], dtype=pl.Int64) - 1
            column.add([tokens.gather(positions.replace(-1, None))])
        return column

    def codes(self, group: int) -> NDArray[Any]:
        """The code of each value of a group."""
        return np.fromfile(self._file(group, "codes"), self._dtype(self.num_words[group]))

    def ids_of_words(self, group: int) -> NDArray[Any]:
        """The id of each word of a group; ``number`` or ``number_raw`` must have been called."""
        path, first = self.path.with_name(self.path.name + ".ids"), sum(self.num_words[:group])
        return np.fromfile(path, self.id_dtype, self.num_words[group], offset=self.id_dtype.itemsize * first)

    def _file(self, group: int, what: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{group:06}.{what}")

    def _dtype(self, num_words: int) -> type[np.unsignedinteger[Any]]:
        return next(dtype for dtype in CODES if num_words <= 1 << 8 * dtype().itemsize)

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

from .config import PrepareConfig
from .folder import ArrayFile, file_name
from .ids import by_appearance, number, raw_ids


class Column:
    """One column of text.

    Args:
        name: name of the column.
        folder: folder for the scratch files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.num_values: list[int] = []  # per group
        self.num_words: list[int] = []

    def add(self, parts: Sequence[pl.Series]) -> None:
        """Write a group of values, given as parts in order, to scratch files."""
        codes, tokens = by_appearance(pl.concat(parts))
        words = pl.concat([pl.Series("word", [None], dtype=pl.String), tokens.alias("word")])
        group = len(self.num_values)
        counts = pl.Series("count", np.bincount(codes, minlength=len(words)))
        pl.DataFrame([words, counts]).write_ipc(self._file(group, "words"))
        self._save(group, "codes", codes.astype(np.min_scalar_type(len(words))))
        self.num_values.append(len(codes))
        self.num_words.append(len(words))

    def number(self, num_train: int, config: PrepareConfig) -> tuple[NDArray[np.int64], pl.Series | None]:
        """Give the words of all groups their ids; the first ``num_train`` values belong to the training days.

        Returns:
            How often each id occurs in the training days, and the token of each id; None for hashed ids.
        """
        groups = self._groups()
        word, tokens = by_appearance(pl.concat([group["word"] for group in groups]))
        total = np.zeros(len(tokens) + 1, np.int64)
        np.add.at(total, word, self._training_counts(groups, num_train))
        ids, counts, tokens_of_ids = number(tokens, total, config)
        self._save_ids(ids[word])
        return counts, tokens_of_ids

    def number_raw(self, num_train: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give the words of each group their raw ids; returns the sorted ids of the training days, and their counts."""
        groups = self._groups()
        counts = self._training_counts(groups, num_train)
        ids = np.concatenate([raw_ids(group["word"]) for group in groups])
        self._save_ids(ids)
        distinct, position = np.unique(ids[counts > 0], return_inverse=True)
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, position, counts[counts > 0])
        return distinct, total

    def ids(self, group: int) -> NDArray[Any]:
        """The id of each value of a group; ``number`` or ``number_raw`` must have been called."""
        ids: NDArray[Any] = np.load(self._file(group, "ids"))
        return ids[self._codes(group)]

    def reordered(self, order: NDArray[np.int64], folder: Path) -> "Column":
        """A column with the same values in another order, written to scratch files in ``folder``."""
        word, tokens = by_appearance(pl.concat([group["word"] for group in self._groups()]))
        word_of_group = np.split(word, np.cumsum(self.num_words)[:-1])
        values = np.concatenate([words[self._codes(group)] for group, words in enumerate(word_of_group)])[order]
        column = Column(self.name, folder)
        for part in np.split(values, np.cumsum(self.num_values)[:-1]):
            positions = pl.Series(part, dtype=pl.Int64) - 1
            column.add([tokens.gather(positions.replace(-1, None))])
        return column

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
                codes = self._codes(group)[: max(num_train - start, 0)]
                counts[group] = np.bincount(codes, minlength=self.num_words[group])
        return np.concatenate(counts)

    def _codes(self, group: int) -> NDArray[Any]:
        codes: NDArray[Any] = np.load(self._file(group, "codes"))
        return codes

    def _save_ids(self, ids: NDArray[Any]) -> None:
        """Write the ids of the words of all groups."""
        for group, part in enumerate(np.split(ids, np.cumsum(self.num_words)[:-1])):
            self._save(group, "ids", part)

    def _save(self, group: int, what: str, values: NDArray[Any]) -> None:
        array = ArrayFile(self._file(group, what), values.dtype)  # np.save does not say that the disk is full
        array.append(values)
        array.close()

    def _file(self, group: int, what: str) -> Path:
        return self.folder / f"{file_name(self.name)}.{group:06}.{what}"

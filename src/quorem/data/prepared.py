"""Prepared data as tensors: memory-mapped and split by days. Needs only torch and NumPy."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..files import atomic as files
from .batches import Bags, Batch
from .folder import bag_file, bytes_of, checksums_of, file_name
from .meta import read_meta


class Prepared:
    """A folder of prepared data, memory-mapped.

    Opening it reads ``meta.json``, the sizes of the arrays, and the offsets of bags. The arrays are compared with their
    checksums the first time that ``split`` is called; ``verify`` checks every file.

    Args:
        path: the folder that ``quorem prepare`` or ``quorem synthesize`` wrote.

    Raises:
        FileNotFoundError: if there is no such folder or one of its files is missing.
        ValueError: if it is not prepared data, or a file does not have the size that follows from ``meta.json``.

    >>> import tempfile
    >>> from quorem.data import ClickLog, synthesize
    >>> path = tempfile.mkdtemp() + "/log"
    >>> _ = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=2), 70, path)
    >>> batch = next(Prepared(path).split("train").batches(4))
    >>> batch.labels.shape, batch.dense.shape, batch.ids.shape
    (torch.Size([4]), torch.Size([4, 2]), torch.Size([4, 2]))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.meta = read_meta(self.path)
        columns = self.meta.columns
        self.num_rows, self.cardinalities = self.meta.num_rows, self.meta.cardinalities
        self.dense_names, self.names = list(columns.dense), list(columns.categorical)
        self._arrays: dict[str, NDArray[Any]] = {}  # those with all rows, by file
        self._is_checked = False
        n, single = self.num_rows, len(columns.single)
        labels = self._rows("labels.npy", (n,), np.uint8)
        dense = self._rows("dense.npy", (n, len(self.dense_names)), np.float32)
        ids = self._rows("categorical.npy", (n, single), np.int32)
        bags = {}
        for name in columns.bags:
            offsets = self._rows(bag_file(name, "offsets"), (n + 1,), np.int64).numpy()
            if offsets[0] != 0 or (np.diff(offsets) < 0).any():
                raise ValueError(f"{self.path / bag_file(name, 'offsets')} is damaged: offsets must rise from 0")
            values = self._rows(bag_file(name, "values"), (int(offsets[-1]),), np.int32)
            bags[name] = Bags(values, torch.from_numpy(offsets))
        self.all = Batch(labels, dense, ids, bags)

    def split(self, name: str) -> Batch:
        """The rows of ``"train"``, ``"validation"`` or ``"test"``, as views; the arrays are checked first.

        Raises:
            ValueError: if there is no split of that name, or a file is damaged.
        """
        if name not in self.meta.split:
            raise ValueError(f"split ({name!r}) must be one of {', '.join(map(repr, self.meta.split))}")
        self.check()
        return self.all.rows(*self.meta.split[name])

    def check(self) -> None:
        """Compare the arrays of all rows with their checksums, unless done before."""
        if not self._is_checked:
            for file, array in self._arrays.items():
                self._compare(file, bytes_of(array))
            self._is_checked = True

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file is damaged.
        """
        self.check()
        for name in self.names:
            self.frequencies(name)
        for file in self.meta.checksums:
            if not file.endswith(".npy"):
                self._bytes(file)

    def checksums(self) -> dict[str, str]:
        """The checksums of all rows, by file."""
        return {Path(file).name: self.meta.checksums.get(file, "") for file in self._arrays}

    def frequencies(self, name: str) -> NDArray[np.int64]:
        """How often each id of a feature occurs in the training rows."""
        self._check_name(name)
        file, size = f"counts/{file_name(name)}.npy", self.cardinalities[self.names.index(name)]
        counts = self._map(file, (size,), np.uint8, np.uint16, np.uint32, np.uint64)
        self._compare(file, bytes_of(counts))
        return counts.astype(np.int64)

    def unseen(self, split: str) -> dict[str, int]:
        """How many values of a split do not occur in the training rows, by feature; without features that have none.

        A missing value is not counted.
        """
        rows, counts = self.split(split), {}
        columns = iter(rows.ids.numpy().T)
        for name in self.names:
            ids = rows.bags[name].values.numpy() if name in rows.bags else next(columns)
            counts[name] = int(np.count_nonzero((self.frequencies(name)[ids] == 0) & (ids != 0)))
        return {name: count for name, count in counts.items() if count}

    def vocabulary(self, name: str) -> list[str | None]:
        """The token of each id of a feature; None for the NULL id and the unknown id.

        Raises:
            ValueError: if there is no feature of that name, or its ids are synthetic.
        """
        return [*[None] * (self.meta.first_token_id or 0), *tokens_of(self.vocabulary_text(name))]

    def vocabulary_text(self, name: str) -> bytes:
        """The contents of a feature's vocabulary file: one token per line in order of id, escaped."""
        self._check_name(name)
        if not self.meta.has_vocabularies:
            raise ValueError(f"{self.path} has no vocabulary: its ids are made up")
        return self._bytes(f"vocabulary/{file_name(name)}.txt")

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"name ({name!r}) must be one of the categorical features {', '.join(self.names)}")

    def _compare(self, file: str, data: memoryview) -> None:
        """Raise ValueError unless the bytes of a file have the checksums of ``meta.json``."""
        if checksums_of(data) != self.meta.checksums.get(file):
            reason = "it is damaged, or was replaced while in use; prepare it again"
            raise ValueError(f"{self.path / file} differs from its checksum: {reason}")

    def _bytes(self, file: str) -> bytes:
        """All bytes of a file, compared with its checksums."""
        files.check_is_file(self.path / file)
        data = (self.path / file).read_bytes()
        self._compare(file, memoryview(data))
        return data

    def _rows(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> torch.Tensor:
        """Map an array that holds all rows."""
        array = self._map(name, shape, dtype)
        self._arrays[name] = array
        return torch.from_numpy(array)

    def _map(self, name: str, shape: tuple[int, ...], *dtypes: type[np.generic]) -> NDArray[Any]:
        """Map an array of the folder, which must have the given shape and one of the dtypes."""
        path = self.path / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: prepare the data again")
        files.check_is_file(path)
        try:
            array = np.lib.format.open_memmap(path, mode="c")  # torch wants writable memory; the file does not change
        except OSError:
            raise
        except Exception as error:  # NumPy parses the header as Python, so any exception is possible
            raise ValueError(f"{path} is damaged or cut off ({path.stat().st_size:,} bytes): {error}") from None
        if array.shape != shape or array.dtype not in map(np.dtype, dtypes) or not array.flags.c_contiguous:
            expected = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
            raise ValueError(f"{path} is {array.dtype} {array.shape} but meta.json says {expected} {shape}")
        return array


def tokens_of(text: bytes) -> list[str]:
    """The tokens in the bytes of a vocabulary file, in order of id: ``write_vocabulary`` escapes some characters."""
    plain = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
    lines = text.decode().split("\n")[:-1]
    return [re.sub(r"\\.", lambda escaped: plain[escaped[0]], line) if "\\" in line else line for line in lines]

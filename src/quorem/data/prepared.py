"""Prepared data as tensors: memory-mapped and split by days. Needs only torch and NumPy."""

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..files import atomic as files
from .batches import Bags, Batch
from .checksums import CheckedArray, checked_bytes
from .folder import file_name, offsets_file
from .meta import is_raw, read_meta

COUNT_DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64, np.int64)


class Prepared:
    """A folder of prepared data, memory-mapped.

    Opening it reads ``meta.json``, the sizes of the arrays, and the offsets of bags. Other blocks are compared with
    their checksums the first time that ``split`` or ``check`` needs their rows; ``verify`` checks every file.

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
        self.num_rows: int = self.meta["num_rows"]
        self.dense_names: list[str] = self.meta["dense"]
        self.names: list[str] = self.meta["categorical"]
        self.cardinalities: list[int] = self.meta["cardinalities"]
        self.has_raw_ids = is_raw(self.meta["config"])
        id_dtype = np.int64 if self.has_raw_ids else np.int32
        n, single = self.num_rows, len(self.names) - len(self.meta["bags"])
        labels = self._map("labels.npy", (n,), np.uint8)
        dense = self._map("dense.npy", (n, len(self.dense_names)), np.float32)
        ids = self._map("categorical.npy", (n, single), id_dtype)
        self._by_row = [labels, dense, ids]
        self._bags: dict[str, tuple[CheckedArray, CheckedArray]] = {}  # values and offsets
        for name in self.meta["bags"]:
            offsets = self._map(offsets_file(name), (n + 1,), np.int64)
            offsets.check(0, n + 1)
            if offsets.array[0] != 0 or (np.diff(offsets.array) < 0).any():
                raise ValueError(f"{offsets.path} is damaged: offsets must rise from 0")
            values = self._map(f"bags/{file_name(name)}.values.npy", (int(offsets.array[-1]),), id_dtype)
            self._bags[name] = values, offsets
        bags = {name: Bags(values.tensor, offsets.tensor) for name, (values, offsets) in self._bags.items()}
        self.all = Batch(labels.tensor, dense.tensor, ids.tensor, bags)

    def split(self, name: str, *, check: bool = True) -> Batch:
        """The rows of ``"train"``, ``"validation"`` or ``"test"``, as views; they are compared with their checksums.

        Raises:
            ValueError: if there is no split of that name, or a file is damaged.
        """
        if name not in self.meta["split"]:
            raise ValueError(f"split ({name!r}) must be one of {', '.join(map(repr, self.meta['split']))}")
        start, stop = self.meta["split"][name]
        if check:
            self.check(start, stop)
        return self.all.rows(start, stop)

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks that contain rows ``[start, stop)`` with their checksums, unless done before."""
        for array in self._by_row:
            array.check(start, stop)
        for values, offsets in self._bags.values():
            values.check(int(offsets.array[start]), int(offsets.array[stop]))

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file is damaged.
        """
        self.check(0, self.num_rows)
        for name in self.names:
            self.raw_counts(name) if self.has_raw_ids else self.frequencies(name)
        for file, checksums in self.meta["checksums"].items():
            if not file.endswith(".npy"):
                checked_bytes(self.path / file, checksums)

    def checksums(self) -> dict[str, str]:
        """The checksums of all rows, by file."""
        arrays = [*self._by_row, *(array for pair in self._bags.values() for array in pair)]
        return {array.path.name: array.checksums for array in arrays}

    def frequencies(self, name: str) -> NDArray[np.int64]:
        """How often each id of a feature occurs in the training rows; not for raw ids."""
        self._check_name(name)
        if self.has_raw_ids:
            raise ValueError(f"{self.path} has raw ids, which raw_counts counts: frequencies needs a vocabulary")
        size = self.cardinalities[self.names.index(name)]
        return self._whole(f"counts/{file_name(name)}.npy", size, *COUNT_DTYPES).astype(np.int64)

    def raw_counts(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The raw ids of a feature in the training rows, in ascending order, and how often each occurs."""
        self._check_name(name)
        if not self.has_raw_ids:
            raise ValueError(f"{self.path} has no raw ids: they are {self.meta['config'].get('ids', 'made up')}")
        counts = self._whole(f"counts/{file_name(name)}.npy", None, *COUNT_DTYPES).astype(np.int64)
        return self._whole(f"raw_ids/{file_name(name)}.npy", len(counts), np.int64), counts

    def unseen(self, split: str) -> dict[str, int]:
        """How many values of a split do not occur in the training rows, by feature; without features that have none.

        A missing value is not counted.
        """
        rows, counts = self.split(split), {}
        columns = iter(rows.ids.numpy().T)
        for name in self.names:
            ids = rows.bags[name].values.numpy() if name in rows.bags else next(columns)
            if self.has_raw_ids:
                is_unseen = np.isin(ids, self.raw_counts(name)[0], invert=True)
            else:
                is_unseen = self.frequencies(name)[ids] == 0
            counts[name] = int(np.count_nonzero(is_unseen & (ids != 0)))
        return {name: count for name, count in counts.items() if count}

    def vocabulary(self, name: str) -> list[str | None]:
        """The token of each id of a feature; None for the NULL id and the unknown id.

        Raises:
            ValueError: if there is no feature of that name, or its ids are hashed, raw or synthetic.
        """
        tokens = tokens_of(self.vocabulary_text(name))
        return [*[None] * self.meta["first_token_id"], *tokens]

    def vocabulary_text(self, name: str) -> bytes:
        """The contents of a feature's vocabulary file: one token per line in order of id, escaped."""
        self._check_name(name)
        if self.meta["first_token_id"] is None:
            raise ValueError(f"{self.path} has no vocabulary: its ids are {self.meta['config'].get('ids', 'made up')}")
        file = f"vocabulary/{file_name(name)}.txt"
        return checked_bytes(self.path / file, self._recorded(file))

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"name ({name!r}) must be one of the categorical features {', '.join(self.names)}")

    def _recorded(self, file: str) -> str:
        """The checksums of a file from ``meta.json``."""
        if file not in self.meta["checksums"]:
            raise ValueError(f"{self.path / 'meta.json'} is damaged: it has no checksum of {file}")
        return str(self.meta["checksums"][file])

    def _whole(self, name: str, size: int | None, *dtypes: type[np.generic]) -> NDArray[Any]:
        """All of an array of the folder, compared with its checksums; of any size if ``size`` is None."""
        array = self._map(name, None if size is None else (size,), *dtypes)
        array.check(0, len(array.array))
        return array.array

    def _map(self, name: str, shape: tuple[int, ...] | None, *dtypes: type[np.generic]) -> CheckedArray:
        """Map an array of the folder, which must have the given shape and one of the dtypes; None is any length."""
        path = self.path / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: prepare the data again")
        files.check_is_file(path)
        array = _mapped(path)
        shape = (array.size,) if shape is None else shape
        if array.shape != shape or array.dtype not in map(np.dtype, dtypes) or not array.flags.c_contiguous:
            expected = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
            raise ValueError(f"{path} is {array.dtype} {array.shape} but meta.json says {expected} {shape}")
        return CheckedArray(path, array, self._recorded(name))


def _mapped(path: Path) -> NDArray[Any]:
    """The array in a file, mapped copy-on-write: torch wants writable memory, and the file must not change.

    Unlike ``np.load`` it keeps no file open: a process may have only about a thousand open files.

    Raises:
        ValueError: if the file is damaged.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            np.lib.format.read_magic(file)
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            start = file.tell()
        if size - start != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{size - start:,} bytes where {dtype} {shape} are to be")
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()[start:]
        return data.view(dtype).reshape(shape, order="F" if fortran else "C")
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python, so any exception is possible
        raise ValueError(f"{path} is damaged or cut off ({size:,} bytes): {error}") from None


def tokens_of(text: bytes) -> list[str]:
    """The tokens in the bytes of a vocabulary file, in order of id: ``write_vocabulary`` escapes some characters."""
    plain = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
    lines = text.decode().split("\n")[:-1]
    return [re.sub(r"\\.", lambda escaped: plain[escaped[0]], line) if "\\" in line else line for line in lines]

"""Prepared data as tensors: memory-mapped, split by days, in contiguous batches. Needs only torch and NumPy."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import files
from .checksums import CheckedArray, checked_bytes
from .folder import COUNT_DTYPES, file_name, replaced
from .meta import is_raw, read_meta

OPEN_ATTEMPTS, OPEN_SECONDS = 20, 0.05  # while another process is replacing the folder


@dataclass(frozen=True)
class Bags:
    """A multi-valued feature: the ids of all rows' bags, one after another, and where each bag begins.

    Shape:
        values ``[V]``, int32, or int64 for raw ids; offsets ``[B + 1]``, int64.
    """

    values: Tensor
    offsets: Tensor

    def rows(self, start: int, stop: int) -> "Bags":
        """The bags of rows ``[start, stop)``; their offsets start at 0 again."""
        offsets = self.offsets[start : stop + 1]
        return Bags(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def take(self, index: Tensor) -> "Bags":
        """The bags of the rows ``index``, in that order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[index]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=index.device) - offsets[:-1].repeat_interleave(lengths)
        return Bags(self.values[self.offsets[index].repeat_interleave(lengths) + within], offsets)


@dataclass(frozen=True)
class Batch:
    """Rows of a click log.

    Shape:
        labels ``[B]``, uint8; dense ``[B, num_dense]``, float32; ids ``[B, F]``, int32, or int64 for raw ids. ``ids``
        holds the features with one value per row; ``bags`` holds those with several values, by name.
    """

    labels: Tensor
    dense: Tensor
    ids: Tensor
    bags: Mapping[str, Bags] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows ``[start, stop)``, as views."""
        part = slice(start, stop)
        bags = {name: bag.rows(start, stop) for name, bag in self.bags.items()}
        return Batch(self.labels[part], self.dense[part], self.ids[part], bags)

    def take(self, index: Tensor) -> "Batch":
        """The rows ``index``, in that order."""
        bags = {name: bag.take(index) for name, bag in self.bags.items()}
        return Batch(self.labels[index], self.dense[index], self.ids[index], bags)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same rows on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same rows in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, apply: Any) -> "Batch":
        bags = {name: Bags(apply(bag.values), apply(bag.offsets)) for name, bag in self.bags.items()}
        return Batch(apply(self.labels), apply(self.dense), apply(self.ids), bags)

    def jagged(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """All features as jagged input of an ``EmbeddingCollection``: values, and offsets ``[F * B + 1]``.

        Args:
            names: all categorical features in order; those not in ``bags`` are the columns of ``ids``.

        Raises:
            ValueError: if the names are not those of the columns and ``bags``.
        """
        single = [name for name in names if name not in self.bags]
        if len(single) != self.ids.shape[1] or len(names) != len(single) + len(self.bags):
            raise ValueError(
                f"names ({names}) must be {self.ids.shape[1]} single-valued features and {list(self.bags)}"
            )
        values, lengths = [], []
        columns = iter(self.ids.unbind(1))
        for name in names:
            if name in self.bags:
                values.append(self.bags[name].values)
                lengths.append(self.bags[name].offsets.diff())
            else:
                values.append(next(columns))
                lengths.append(torch.ones(len(self), dtype=torch.int64, device=self.ids.device))
        ends = torch.cat(lengths).cumsum(0)
        return torch.cat(values), torch.cat([ends.new_zeros(1), ends])

    def batches(self, size: int, *, seed: int | None = None) -> Iterator["Batch"]:
        """All rows in batches, in order or shuffled.

        Args:
            size: rows per batch; the last batch may have fewer.
            seed: seed of the shuffle; None keeps the order, as in the paper, and copies nothing.

        Raises:
            ValueError: if ``size`` is below 1.

        >>> rows = Batch(torch.arange(5), torch.zeros(5, 1), torch.zeros(5, 2))
        >>> [batch.labels.tolist() for batch in rows.batches(2)]
        [[0, 1], [2, 3], [4]]
        """
        if size < 1:
            raise ValueError(f"size ({size}) must be at least 1")
        order = None
        if seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).to(self.labels.device)
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            yield self.rows(start, stop) if order is None else self.take(order[start:stop])


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
        self._replaced = replaced(Path(os.path.realpath(path)))
        for attempt in range(OPEN_ATTEMPTS):
            before = _inode(self.path)
            try:
                self._open()
                if _inode(self.path) == before:  # else it was replaced meanwhile, and files of both may be open
                    return
            except (OSError, ValueError):
                is_absent = before is None and self._replaced.exists()  # a replacement is between its two renames
                if attempt + 1 == OPEN_ATTEMPTS or (_inode(self.path) == before and not is_absent):
                    raise
            time.sleep(OPEN_SECONDS)
        raise RuntimeError(f"{self.path} is replaced again and again while it is opened")

    def _open(self) -> None:
        if not self.path.exists() and self._replaced.exists():
            raise FileNotFoundError(
                f"{self.path} is missing: a run that was to replace it was stopped; the old data are in"
                f" {self._replaced}: rename it, or run quorem prepare again"
            )
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
        self._bags: list[tuple[CheckedArray, CheckedArray]] = []  # offsets and values
        for name in self.meta["bags"]:
            offsets = self._map(f"bags/{file_name(name)}.offsets.npy", (n + 1,), np.int64)
            offsets.check(0, n + 1)
            if offsets.array[0] != 0 or (np.diff(offsets.array) < 0).any():
                raise ValueError(f"{offsets.path} is damaged: offsets must rise from 0")
            values = self._map(f"bags/{file_name(name)}.values.npy", (int(offsets.array[-1]),), id_dtype)
            self._bags.append((offsets, values))
        bags = {name: Bags(v.tensor, o.tensor) for name, (o, v) in zip(self.meta["bags"], self._bags, strict=True)}
        self.all = Batch(labels.tensor, dense.tensor, ids.tensor, bags)

    def split(self, name: str, *, check: bool = True) -> Batch:
        """The rows of ``"train"``, ``"validation"`` or ``"test"``, as views of the files.

        Args:
            name: name of the split.
            check: compare its rows with their checksums, unless done before.

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
        """Compare the blocks that contain rows ``[start, stop)`` with their checksums, unless done before.

        Raises:
            ValueError: if a file is damaged.
        """
        for array in self._by_row:
            array.check(start, stop)
        for offsets, values in self._bags:
            values.check(int(offsets.array[start]), int(offsets.array[stop]))

    def verify(self) -> None:
        """Compare every file with its checksum.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if a file is damaged, or the data were prepared by a version without checksums.
        """
        if "checksums" not in self.meta:
            raise ValueError(f"{self.path} has no checksums: prepare it again")
        self.check(0, self.num_rows)
        for name in self.names:
            self.raw_counts(name) if self.has_raw_ids else self.frequencies(name)
        for file, checksums in self.meta["checksums"].items():
            if not file.endswith(".npy"):
                checked_bytes(self.path / file, checksums)

    def checksums(self) -> dict[str, str]:
        """The checksums of all rows, by file; computed here if ``meta.json`` has none."""
        arrays = [*self._by_row, *(array for pair in self._bags for array in pair)]
        return {array.path.name: array.checksums for array in arrays}

    def frequencies(self, name: str) -> NDArray[np.int64]:
        """How often each id of a feature occurs in the training rows.

        Raises:
            ValueError: if there is no feature of that name, or its ids are raw.
        """
        self._check_name(name)
        if self.has_raw_ids:
            raise ValueError(f"{self.path} has raw ids, which raw_counts counts: frequencies needs a vocabulary")
        size = self.cardinalities[self.names.index(name)]
        counts = self._map(f"counts/{file_name(name)}.npy", (size,), *COUNT_DTYPES)
        counts.check(0, size)
        return counts.array.astype(np.int64)

    def raw_counts(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The raw ids of a feature in the training rows, in ascending order, and how often each occurs.

        Raises:
            ValueError: if there is no feature of that name, or its ids are not raw.
        """
        self._check_name(name)
        if not self.has_raw_ids:
            raise ValueError(f"{self.path} has no raw ids: they are {self.meta['config'].get('ids', 'made up')}")
        path = self.path / f"counts/{file_name(name)}.npy"
        size = _mapped(path).size if path.is_file() else 0
        counts = self._map(f"counts/{file_name(name)}.npy", (size,), *COUNT_DTYPES)
        ids = self._map(f"raw_ids/{file_name(name)}.npy", (size,), np.int64)
        for array in (counts, ids):
            array.check(0, size)
        return ids.array, counts.array.astype(np.int64)

    def vocabulary(self, name: str) -> list[str | None]:
        """The token of each id of a feature; None for the NULL id and the unknown id.

        Raises:
            ValueError: if there is no feature of that name, or its ids are hashed, raw or synthetic.
        """
        try:
            text = self.vocabulary_text(name).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the vocabulary of {name} in {self.path} is damaged: {error}") from None
        tokens = [unescaped(token) if "\\" in token else token for token in text.split("\n")[:-1]]
        return [*[None] * self.meta["first_token_id"], *tokens]

    def vocabulary_text(self, name: str) -> bytes:
        """The contents of a feature's vocabulary file: one token per line in order of id, escaped.

        Raises:
            ValueError: if there is no feature of that name, or its ids are hashed, raw or synthetic.
        """
        self._check_name(name)
        if self.meta["first_token_id"] is None:
            raise ValueError(f"{self.path} has no vocabulary: its ids are {self.meta['config'].get('ids', 'made up')}")
        file = f"vocabulary/{file_name(name)}.txt"
        return checked_bytes(self.path / file, self._recorded(file))

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"name ({name!r}) must be one of the categorical features {', '.join(self.names)}")

    def _recorded(self, file: str) -> str | None:
        """The checksums of a file from ``meta.json``; None if ``meta.json`` has no checksums at all."""
        recorded: dict[str, str] | None = self.meta.get("checksums")
        if recorded is not None and file not in recorded:
            raise ValueError(f"{self.path / 'meta.json'} is damaged: it has no checksum of {file}")
        return None if recorded is None else recorded[file]

    def _map(self, name: str, shape: tuple[int, ...], *dtypes: type[np.generic]) -> CheckedArray:
        """Map an array of the folder, which must have the given shape and one of the dtypes."""
        path = self.path / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: prepare the data again")
        files.check_is_file(path)
        array = _mapped(path)
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


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def unescaped(token: str) -> str:
    """The original token of a line of a vocabulary file: ``write_vocabulary`` escapes backslashes and line ends."""
    parts = token.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)

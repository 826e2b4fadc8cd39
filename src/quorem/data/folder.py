"""A folder of arrays that appears under its name only once it is complete; and the checksums of its files.

Everything is written into ``NAME.partial`` beside it, synced, and renamed at the end, so that a run that is killed at
any moment leaves nothing that looks finished. An overwrite first renames the old folder to ``NAME.replaced``. If it is
killed before the new folder has its name, the next run renames the old one back.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..files import atomic as files
from .meta import FORMAT, META, Meta

LONGEST_NAME = 240  # characters of a file's name without its ending; file systems allow 255 with it
BLOCK_BYTES = 1 << 22  # of a checksum
REORDER_ROWS = 1 << 20  # rows that are copied at a time
ENTRIES = {META, f"{META}.tmp", "labels.npy", "dense.npy", "categorical.npy", "bags", "counts", "vocabulary", "scratch"}

ProgressCallback = Callable[[str, float, int], None]  # stage, fraction of it that is done, rows so far


class ArrayFile:
    """A ``.npy`` file to which rows are appended; it is open only during a write."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.rows = 0
        self.path.write_bytes(b"")
        self.append(np.empty((0, *row)))

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end."""
        self.rows += len(rows)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row)}
        with open(self.path, "r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)  # padded, so that the first axis can grow in place
            file.seek(0, os.SEEK_END)
            file.write(bytes_of(np.ascontiguousarray(rows, self.dtype)))


class Folder:
    """A folder under construction: ``partial``, which will be ``path``; what is there becomes ``replaced``."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path, self.overwrite = path, overwrite
        self.partial = path.with_name(path.name + ".partial")
        self.replaced = path.with_name(path.name + ".replaced")

    def array(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayFile:
        """A new array file in the folder."""
        path = self.partial / name
        path.parent.mkdir(exist_ok=True)
        return ArrayFile(path, dtype, row)

    def save(self, name: str, values: NDArray[Any]) -> None:
        self.array(name, values.dtype, values.shape[1:]).append(values)

    def reorder(self, name: str, order: NDArray[np.int64]) -> None:
        """Put the rows of an array into another order."""
        rows = np.load(self.partial / name, mmap_mode="r")
        (self.partial / name).unlink()  # the rows stay mapped
        array = self.array(name, rows.dtype, rows.shape[1:])
        for start in range(0, len(order), REORDER_ROWS):
            array.append(rows[order[start : start + REORDER_ROWS]])

    def save_counts(self, name: str, counts: NDArray[np.int64]) -> None:
        """Write how often each id of a feature occurs in training."""
        self.save(f"counts/{file_name(name)}.npy", counts.astype(np.min_scalar_type(counts.max(initial=0))))

    def commit(self, meta: Meta) -> None:
        """Write ``meta.json`` with the checksums of all files, sync everything and rename the folder.

        Of an array the checksums are those of its values.
        """
        checksums = {}
        for path in sorted(path for path in self.partial.rglob("*") if path.is_file()):
            values = bytes_of(np.load(path, mmap_mode="r")) if path.suffix == ".npy" else memoryview(path.read_bytes())
            checksums[path.relative_to(self.partial).as_posix()] = checksums_of(values)
        files.write_json(self.partial / META, FORMAT | asdict(replace(meta, checksums=checksums)))
        for path in (*self.partial.rglob("*"), self.partial):
            files.sync(path)
        self.check_target()  # someone may have put files there meanwhile
        if self.path.exists():
            os.rename(self.path, self.replaced)
        os.rename(self.partial, self.path)
        files.sync(self.path.parent)
        if self.replaced.exists():
            shutil.rmtree(self.replaced)

    def check_target(self) -> None:
        """Raise FileExistsError if something exists under the name that is not to be replaced."""
        if os.path.lexists(self.path):
            if not self.overwrite:
                raise FileExistsError(f"{self.path} exists: choose another name, or overwrite=True (--overwrite)")
            if not (self.path / META).exists() or not _is_ours(self.path):
                raise FileExistsError(f"{self.path} is not replaced: it is no prepared data, or has other files in it")

    def clear(self) -> None:
        """Bring back what a killed overwrite renamed, and remove what else a killed run left."""
        if _is_ours(self.replaced) and not os.path.lexists(self.path):
            os.rename(self.replaced, self.path)
        for left in (self.partial, self.replaced):
            if left.exists():
                if not _is_ours(left):
                    raise FileExistsError(f"{left} exists and was not left by an earlier run: move it away")
                shutil.rmtree(left)


@contextmanager
def new_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Folder]:
    """A folder to write and commit in the block; what was written is removed if the block fails.

    ``overwrite`` replaces prepared data that are there; they stay until the new ones are complete.
    """
    folder = Folder(Path(os.path.realpath(path)), overwrite=overwrite)  # the folder that a symbolic link leads to
    path, partial = folder.path, folder.partial
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = files.Lock(path.with_name(f".{path.name}.lock"), f"{path} is being written by another run", remove=True)
    try:
        folder.clear()
        folder.check_target()
        partial.mkdir()
        try:
            yield folder
        except OSError as error:
            if files.is_disk_full(error):
                raise files.disk_full(partial, "nothing was written") from error
            raise
        finally:
            if partial.exists():  # else it is finished, under its name
                shutil.rmtree(partial)
    finally:
        lock.release()


def _is_ours(path: Path) -> bool:
    return path.is_dir() and set(os.listdir(path)) <= ENTRIES


def file_name(column: str) -> str:
    """A valid file name for a column name.

    >>> file_name("C1"), file_name("a/b")
    ('C1', 'a%2Fb')
    """
    if len(name := quote(column, safe=" ()[]")) > LONGEST_NAME:
        raise ValueError(f"column ({column!r}) must have a shorter name: it names files, by {len(name)} characters")
    return name


def bag_file(column: str, what: Literal["offsets", "values"]) -> str:
    """The file with the offsets, or the values, of a column with several values per row."""
    return f"bags/{file_name(column)}.{what}.npy"


def checksums_of(data: memoryview) -> str:
    """The CRC-32 of each block of some bytes: eight hex digits each, concatenated.

    >>> checksums_of(memoryview(b"123456789"))
    'cbf43926'
    """
    blocks = (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
    return "".join(f"{zlib.crc32(block):08x}" for block in blocks)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of an array's values."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")

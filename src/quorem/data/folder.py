"""A folder of arrays that appears under its name only once it is complete.

Everything is written into ``NAME.partial`` beside it, synced, and renamed at the end, so that a run that is killed at
any moment leaves nothing that looks finished. An overwrite first renames the old folder to ``NAME.replaced``. If it is
killed before the new folder has its name, the next run renames the old one back.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..files import atomic as files
from .checksums import block_checksums, bytes_of
from .meta import FORMAT, FORMAT_VERSION, META

LONGEST_NAME = 240  # characters of a file's name without its ending; file systems allow 255 with it
REORDER_ROWS = 1 << 20  # rows that are copied at a time

Progress = Callable[[str, float, int], None]  # stage, fraction of it that is done, rows so far


class ArrayFile:
    """A ``.npy`` file to which rows are appended; it is open only during a write."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.rows = 0
        self.path.write_bytes(b"")
        self.append(np.empty((0, *row)))

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end.

        Raises:
            ValueError: if the rows do not have the shape of the file's rows.
        """
        if rows.shape[1:] != self.row:
            raise ValueError(f"rows of {self.path.name} have shape {rows.shape[1:]} but must have {self.row}")
        self.rows += len(rows)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row)}
        with open(self.path, "r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)  # padded, so that the first axis can grow in place
            file.seek(0, os.SEEK_END)
            file.write(bytes_of(np.ascontiguousarray(rows, self.dtype)))


class Folder:
    """A folder under construction: a context manager that removes it if the run fails.

    Args:
        path: path of the finished folder.
        overwrite: replace prepared data at ``path``.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False, or if it is not prepared data.
        RuntimeError: if another run is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(os.path.realpath(path))  # the folder that a symbolic link points to
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.replaced = self.path.with_name(self.path.name + ".replaced")
        self.overwrite = overwrite

    def __enter__(self) -> "Folder":
        """Lock the path, check what exists there, and remove what a killed run left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        message = f"{self.path} is being written by another run"
        self._lock = files.Lock(self.path.with_name(f".{self.path.name}.lock"), message, remove=True)
        try:
            if not self.path.exists() and _is_ours(self.replaced):  # an overwrite was killed between its two renames
                os.rename(self.replaced, self.path)
            self._check_target()
            for left in (self.partial, self.replaced):
                if left.exists() and not _is_ours(left):
                    raise FileExistsError(f"{left} exists and was not left by an earlier run: move it away")
                _remove(left)
            self.partial.mkdir()
            files.write_json(self.partial / META, {"format": FORMAT})  # says whose folder it is
        except BaseException:
            self._lock.release()
            raise
        return self

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self.overwrite:
            raise FileExistsError(f"{self.path} exists: choose another name, or overwrite=True (--overwrite)")
        if not _is_ours(self.path):
            raise FileExistsError(f"{self.path} is not a folder of prepared data and is not overwritten")
        written = {META, *_read_meta(self.path).get("checksums", ())}
        if strangers := sorted(_names_in(self.path) - written):
            raise FileExistsError(
                f"{self.path} is not overwritten: it has {', '.join(strangers[:3])}, which quorem did not write;"
                " move it away"
            )

    def array(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayFile:
        """A new array file in the folder."""
        path = self.partial / name
        path.parent.mkdir(exist_ok=True)
        return ArrayFile(path, dtype, row)

    def save(self, name: str, values: NDArray[Any]) -> None:
        """Write a whole array."""
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

    def commit(self, meta: dict[str, Any]) -> None:
        """Write ``meta.json`` with the checksums of all files, sync everything and rename the folder."""
        checksums = {name: _checksums(self.partial / name) for name in sorted(_names_in(self.partial) - {META})}
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        files.write_json(self.partial / META, {**head, **meta, "checksums": checksums})
        for path in (*self.partial.rglob("*"), self.partial):
            files.sync(path)
        self._check_target()  # someone may have put files there meanwhile
        if self.path.exists():
            os.rename(self.path, self.replaced)
        os.rename(self.partial, self.path)
        files.sync(self.path.parent)
        _remove(self.replaced)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove what was written if the run failed."""
        full = files.disk_full(self.partial, "nothing was written") if files.is_disk_full(error) else None
        _remove(self.partial)
        self._lock.release()
        if full is not None:
            raise full from error


def file_name(column: str) -> str:
    """A valid file name for a column name.

    Raises:
        ValueError: if it would be too long.

    >>> file_name("C1"), file_name("a/b")
    ('C1', 'a%2Fb')
    """
    if len(name := quote(column, safe=" ()[]")) > LONGEST_NAME:
        raise ValueError(f"column ({column!r}) must have a shorter name: it names files, by {len(name)} characters")
    return name


def offsets_file(column: str) -> str:
    """The file with the offsets of a column with several values per row."""
    return f"bags/{file_name(column)}.offsets.npy"


def _is_ours(path: Path) -> bool:
    """Whether a folder is empty, or holds prepared data, finished or not."""
    return path.is_dir() and (_read_meta(path).get("format") == FORMAT or not any(path.iterdir()))


def _read_meta(path: Path) -> dict[str, Any]:
    """The contents of ``meta.json`` without checks; empty if it cannot be read."""
    try:
        values = json.loads(files.read(path / META))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _checksums(path: Path) -> str:
    """The checksums of a file: of the values of an array, or of all bytes."""
    is_array = path.suffix == ".npy"
    return block_checksums(bytes_of(np.load(path, mmap_mode="r")) if is_array else memoryview(path.read_bytes()))


def _names_in(folder: Path) -> set[str]:
    """The files below a folder, as paths relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def _remove(folder: Path) -> None:
    """Remove a folder, if it exists; ``meta.json`` last, so that it is known whose it is if the removal is killed."""
    if folder.exists():
        for entry in sorted(folder.iterdir(), key=lambda path: path.name == META):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        folder.rmdir()

"""A folder of arrays that appears under its name only once it is complete.

Everything is written into ``NAME.partial`` beside it, synced, and renamed at the end, so that a run that is killed at
any moment leaves nothing that looks finished. An overwrite first renames the old folder to ``NAME.replaced``. If the
run is killed before the new folder has its name, the next run renames the old one back.
"""

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .. import files
from .checksums import BlockChecksums, checked_bytes, of_bytes
from .meta import FORMAT, FORMAT_VERSION

LONGEST_NAME = 240  # characters of a file's name without its ending; file systems allow 255 with it
MARK = ".quorem-partial"  # a file that marks folders that may be removed
ARRAYS = ("labels.npy", "dense.npy", "categorical.npy")
FOLDERS = ("bags", "counts", "raw_ids", "vocabulary")
REORDER_ROWS = 1 << 20  # rows that are copied at a time
COUNT_DTYPES = (np.uint8, np.uint16, np.uint32, np.int64)  # the smallest that holds all counts is used

Progress = Callable[[str, float, int], None]  # stage, fraction of it that is done, rows so far


class ArrayFile:
    """A ``.npy`` file to which rows are appended; it is open only during a write, and ``close`` sets its length."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.rows = 0
        self.checksums = BlockChecksums()
        self.path.touch()
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads the header so that the first axis can grow without moving the data.
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row)}
        with open(self.path, "r+b") as file:
            np.lib.format.write_array_header_1_0(file, header)

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end.

        Raises:
            ValueError: if the rows do not have the shape of the file's rows.
        """
        if rows.shape[1:] != self.row:
            raise ValueError(f"rows of {self.path.name} have shape {rows.shape[1:]} but must have {self.row}")
        data = np.ascontiguousarray(rows, self.dtype).data.cast("B") if rows.size else memoryview(b"")
        self.checksums.update(data)
        with open(self.path, "ab", buffering=0) as file:
            while len(data):
                data = data[file.write(data) :]
        self.rows += len(rows)

    def close(self) -> None:
        """Write the final length into the header."""
        self._write_header()


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
        self.replaced = replaced(self.path)
        self.overwrite = overwrite
        self.bytes_needed: Callable[[], int] | None = None
        self.arrays: dict[str, ArrayFile] = {}
        self._lock: files.Lock | None = None

    def __enter__(self) -> "Folder":
        """Lock the path, check what exists there, and remove what a killed run left."""
        self._check_target()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        message = f"{self.path} is being written by another run"
        self._lock = files.Lock(self.path.with_name(f".{self.path.name}.lock"), message, remove=True)
        try:
            self._bring_back()
            self._check_target()
            for left in (self.partial, self.replaced):
                if left.exists() and not _is_ours(left):
                    raise FileExistsError(f"{left} exists and was not left by an earlier run: move it away")
            self.partial.mkdir(exist_ok=True)
            (self.partial / MARK).touch()
            _empty(self.partial)
        except BaseException:
            self._lock.release()
            raise
        return self

    def _bring_back(self) -> None:
        """Undo the first rename of an overwrite that was killed between its two renames."""
        if not self.path.exists() and self.replaced.exists() and not (self.replaced / MARK).exists():
            os.rename(self.replaced, self.path)
            warnings.warn(
                f"{self.path} is the old data again: an earlier run was stopped while it replaced them", stacklevel=4
            )

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self.overwrite:
            raise FileExistsError(f"{self.path} exists: choose another name, or overwrite=True (--overwrite)")
        if not _is_ours(self.path):
            raise FileExistsError(f"{self.path} is not a folder of prepared data and is not overwritten")
        if not (self.path / MARK).exists() and (strangers := sorted(_names_in(self.path) - _written(self.path))):
            raise FileExistsError(
                f"{self.path} is not overwritten: it has {', '.join(strangers[:3])}, which quorem did not write;"
                " move it away"
            )

    def array(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayFile:
        """A new array file in the folder; ``commit`` closes it."""
        path = self.partial / name
        path.parent.mkdir(exist_ok=True)
        self.arrays[name] = ArrayFile(path, dtype, row)
        return self.arrays[name]

    def save(self, name: str, values: NDArray[Any]) -> None:
        """Write a whole array."""
        self.array(name, values.dtype, values.shape[1:]).append(values)

    def reorder(self, name: str, order: NDArray[np.int64]) -> None:
        """Put the rows of an array into another order."""
        old = self.arrays[name]
        rows = np.load(old.path, mmap_mode="r")
        old.path.unlink()  # the rows stay mapped
        array = self.array(name, old.dtype, old.row)
        for start in range(0, len(order), REORDER_ROWS):
            array.append(rows[order[start : start + REORDER_ROWS]])
        array.close()

    def save_counts(self, name: str, counts: NDArray[np.int64]) -> None:
        """Write how often each id of a feature occurs in training."""
        largest = int(counts.max(initial=0))
        dtype = next(dtype for dtype in COUNT_DTYPES if largest <= np.iinfo(dtype).max)
        self.save(f"counts/{file_name(name)}.npy", counts.astype(dtype))

    def commit(self, meta: dict[str, Any]) -> None:
        """Write ``meta.json`` with the checksums of all files, sync everything and rename the folder."""
        for array in self.arrays.values():
            array.close()
        checksums = {name: array.checksums.text() for name, array in self.arrays.items()}
        for name in _names_in(self.partial) - checksums.keys() - {MARK}:
            checksums[name] = of_bytes(memoryview(checked_bytes(self.partial / name, None)))
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        files.write_json(self.partial / "meta.json", {**head, **meta, "checksums": dict(sorted(checksums.items()))})
        for root, _, names in os.walk(self.partial):
            for name in names:
                files.sync(Path(root, name))
            files.sync(Path(root))
        if self.path.exists():
            if self.replaced.exists():
                _remove(self.replaced)
            os.rename(self.path, self.replaced)
        (self.partial / MARK).unlink()
        os.rename(self.partial, self.path)
        files.sync(self.path.parent)
        if self.replaced.exists():
            _remove(self.replaced)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove what was written if the run failed; if the disk is full, say how many bytes are needed."""
        message = self._disk_full_message() if files.is_disk_full(error) else None
        if self.partial.exists():
            _empty(self.partial)
            (self.partial / MARK).unlink(missing_ok=True)
            self.partial.rmdir()
        if self._lock is not None:
            self._lock.release()
        if message is not None:
            raise OSError(errno.ENOSPC, message, str(self.partial)) from error

    def _disk_full_message(self) -> str:
        needed = 0 if self.bytes_needed is None else self.bytes_needed()
        written, free = self._num_bytes(), shutil.disk_usage(self.partial).free
        in_all = f", about {needed:,} are needed in all" if needed > written + free else ""  # else it is not known
        return f"disk full: {written:,} bytes were written, {free:,} are free{in_all}"

    def _num_bytes(self) -> int:
        """Bytes written so far."""
        return sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file())

    def check_space(self) -> None:
        """Raise as soon as ``bytes_needed`` shows that the disk is too small, before it is full.

        Raises:
            OSError: if more bytes are needed than are written and free.
        """
        if self.bytes_needed is None:
            return
        if self.bytes_needed() > shutil.disk_usage(self.partial).free + self._num_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def replaced(path: Path) -> Path:
    """Where the old data of a folder are while it is overwritten."""
    return path.with_name(path.name + ".replaced")


def _is_ours(path: Path) -> bool:
    """Whether a folder is empty, or holds prepared data, finished or not."""
    if not path.is_dir():
        return False
    if (path / MARK).exists() or not any(path.iterdir()):
        return True
    return _read_meta(path).get("format") == FORMAT


def _read_meta(path: Path) -> dict[str, Any]:
    """The contents of ``meta.json`` in any version, without checks; empty if it cannot be read."""
    try:
        values = json.loads(files.read(path / "meta.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _names_in(folder: Path) -> set[str]:
    """The files below a folder, as paths relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def _written(folder: Path) -> set[str]:
    """The files that quorem wrote into a folder of prepared data."""
    recorded = _read_meta(folder).get("checksums")
    if isinstance(recorded, dict):
        return {"meta.json", MARK, *recorded}
    names = _names_in(folder)  # an earlier version, which wrote no list of files
    arrays = {name for name in names if name.partition("/")[0] in FOLDERS and name.endswith((".npy", ".txt"))}
    return {"meta.json", MARK, *ARRAYS} | arrays


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.name != MARK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def _remove(folder: Path) -> None:
    """Remove prepared data, but keep and warn about files that quorem did not write.

    The folder is marked first, so that it can be recognized if the removal is interrupted.
    """
    with suppress(OSError):  # the disk may be full
        (folder / MARK).touch()
    for name in sorted(_written(folder) - {"meta.json", MARK}):
        (folder / name).unlink(missing_ok=True)
    for name in FOLDERS:
        with suppress(OSError):  # absent, or not empty
            (folder / name).rmdir()
    strangers = sorted(_names_in(folder) - {"meta.json", MARK})
    (folder / "meta.json").unlink(missing_ok=True)
    (folder / MARK).unlink(missing_ok=True)
    if strangers:
        warnings.warn(f"{folder} keeps {', '.join(strangers[:3])}, which quorem did not write", stacklevel=4)
    else:
        folder.rmdir()

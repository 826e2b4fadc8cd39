"""A folder of arrays that appears under its name only once it is complete.

Everything is written into ``NAME.partial`` beside it, synced, and renamed at the end, so a run that is
killed at any moment leaves nothing that looks finished.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .. import files

FORMAT = "quorem-prepared"
FORMAT_VERSION = 1
MARK = ".quorem-partial"

Progress = Callable[[str, float, int], None]  # stage, part of it that is done, rows so far


class ArrayFile:
    """A ``.npy`` file written row by row, of a length known only at the end."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.rows = 0
        self.file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads the header so that the first axis can grow without moving the data.
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows at the end.

        Raises:
            ValueError: if the rows have another shape than the file's.
        """
        if rows.shape[1:] != self.row:
            raise ValueError(f"rows of {self.path.name} have shape {rows.shape[1:]} but must have {self.row}")
        data = np.ascontiguousarray(rows, self.dtype).data.cast("B") if rows.size else memoryview(b"")
        while len(data):
            data = data[self.file.write(data) :]
        self.rows += len(rows)

    def close(self) -> None:
        """Write the final length into the header."""
        if self.file.closed:
            return
        self.file.seek(0)
        self._write_header()
        self.file.close()


class Folder:
    """The folder under construction; a context manager that removes it again if the run fails.

    Args:
        path: name under which it appears.
        overwrite: replace a prepared folder of that name.

    Raises:
        FileExistsError: if ``path`` exists and is not to be, or must not be, replaced.
        RuntimeError: if another run is writing it.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.replaced = self.path.with_name(self.path.name + ".replaced")  # what is overwritten, for a moment
        self.overwrite = overwrite
        self.bytes_needed: Callable[[], int] | None = None
        self.arrays: list[ArrayFile] = []
        self._lock: files.Lock | None = None

    def __enter__(self) -> "Folder":
        """Claim the name: check what is there, drop what a killed run left."""
        self._check_target()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for left in (self.partial, self.replaced):
            if left.exists() and not _is_ours(left):
                raise FileExistsError(f"{left} exists and was not left by an earlier run: move it away")
        self.partial.mkdir(exist_ok=True)
        self._lock = files.Lock(self.partial / MARK, f"{self.partial} is being written by another run")
        _empty(self.partial)
        return self

    def _check_target(self) -> None:
        if not self.path.exists():
            return
        if not self.overwrite:
            raise FileExistsError(f"{self.path} exists: choose another name, or overwrite=True (--overwrite)")
        if not _is_ours(self.path):
            raise FileExistsError(f"{self.path} is not a folder of prepared data and is not overwritten")

    def array(self, name: str, dtype: DTypeLike, row: tuple[int, ...] = ()) -> ArrayFile:
        """A new array file in the folder, closed by ``commit``."""
        path = self.partial / name
        path.parent.mkdir(exist_ok=True)
        array = ArrayFile(path, dtype, row)
        self.arrays.append(array)
        return array

    def save(self, name: str, values: NDArray[Any]) -> None:
        """Write a whole array."""
        self.array(name, values.dtype, values.shape[1:]).append(values)

    def commit(self, meta: dict[str, Any]) -> None:
        """Write ``meta.json``, sync everything and give the folder its name."""
        for array in self.arrays:
            array.close()
        self.arrays.clear()
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        (self.partial / "meta.json").write_text(json.dumps({**head, **meta}, indent=1) + "\n", encoding="utf-8")
        for root, _, names in os.walk(self.partial):
            for name in names:
                files.sync(Path(root, name))
            files.sync(Path(root))
        self._check_target()
        if self.path.exists():
            if self.replaced.exists():
                _remove(self.replaced)
            os.rename(self.path, self.replaced)
        (self.partial / MARK).unlink()
        os.rename(self.partial, self.path)
        files.sync(self.path.parent)
        if self.replaced.exists():
            _remove(self.replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was written if the run failed; say what is missing if the disk is full."""
        for array in self.arrays:
            with suppress(OSError):
                array.file.close()
        message = self._disk_full_message() if files.is_disk_full(error) else None
        if self._lock is not None and self.partial.exists():
            _remove(self.partial)
        if self._lock is not None:
            self._lock.release()
        if message is not None:
            raise OSError(errno.ENOSPC, message, str(self.partial)) from error

    def _disk_full_message(self) -> str:
        written = sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file())
        needed = f", about {self.bytes_needed():,} are needed in all" if self.bytes_needed is not None else ""
        free = shutil.disk_usage(self.partial).free
        return f"disk full: {written:,} bytes were written, {free:,} are free{needed}"

    def check_space(self) -> None:
        """Raise before the disk is full, where ``bytes_needed`` already tells.

        Raises:
            OSError: if more bytes are needed than are free or written.
        """
        if self.bytes_needed is None:
            return
        written = sum(path.stat().st_size for path in self.partial.rglob("*") if path.is_file())
        if self.bytes_needed() > shutil.disk_usage(self.partial).free + written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def file_name(column: str) -> str:
    """A file name for a column of any name.

    >>> file_name("C1"), file_name("a/b")
    ('C1', 'a%2Fb')
    """
    return quote(column, safe=" ()[]")


def _is_ours(path: Path) -> bool:
    """Whether a folder is prepared data, finished or not, or empty."""
    if not path.is_dir():
        return False
    if (path / MARK).exists() or not any(path.iterdir()):
        return True
    try:
        return bool(json.loads((path / "meta.json").read_text(encoding="utf-8")).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.name != MARK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _remove(folder: Path) -> None:
    """Remove a folder of ours; stopped halfway, it can still be told from others."""
    with suppress(OSError):  # the disk may be full
        (folder / MARK).touch()
    _empty(folder)
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()

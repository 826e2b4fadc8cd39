"""Atomic file writes, locks, syncing to disk, errors of a full disk, and JSON with a checksum."""

import errno
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system: there are no locks, so two processes may write the same file at once
    fcntl = None  # type: ignore[assignment]

LOCK_ATTEMPTS = 10
LOCK_SECONDS = 0.05  # between two attempts
DRAFT_ATTEMPTS = 200  # to write a file that another process is writing
CHECKSUM = "checksum"  # key of the checksum in a JSON object


class LockedError(RuntimeError):
    """Another process holds the lock."""


class Lock:
    """A lock held by one process at a time. The system releases it when that process ends, even if it is killed.

    If another process still holds it after so many ``attempts``, LockedError says ``message``. One attempt would be too
    few: if a process is killed while it starts a child, the child may hold its locks for a moment. ``remove`` removes
    the file on release.
    """

    def __init__(self, path: Path, message: str, *, attempts: int = LOCK_ATTEMPTS, remove: bool = False) -> None:
        self.path, self.remove = path, remove
        for attempt in range(attempts):
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            with suppress(BlockingIOError, FileNotFoundError):
                if fcntl is not None:
                    fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have removed or renamed the file before it was locked.
                if os.path.samestat(os.fstat(self.descriptor), os.stat(path)):
                    return
            os.close(self.descriptor)
            if attempt + 1 < attempts:
                time.sleep(LOCK_SECONDS)
        raise LockedError(message)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.descriptor >= 0:
            if self.remove:
                self.path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def replacing(path: str | os.PathLike[str], *, num_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a draft for writing, and rename it to ``path`` only once it is complete and synced to the disk.

    The draft is ``NAME.tmp``, locked while it is written. A failure removes it; the draft of a killed process is
    written again. If ``path`` is a symbolic link, the file that it points to is replaced.

    If the disk is full, an existing file is kept, and the error says that ``num_bytes`` are needed. If another process
    is writing the file, it is a LockedError.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist: make it first")
    if path.exists():
        check_is_file(path)
    lock = Lock(path.with_name(f"{path.name}.tmp"), f"{path}: another process is writing it", attempts=DRAFT_ATTEMPTS)
    try:
        with open(lock.descriptor, "wb") as file:
            try:
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                if os.name != "posix":
                    file.close()  # such a system cannot rename an open file
                os.replace(lock.path, path)
            except BaseException:
                with suppress(OSError):
                    lock.path.unlink()  # while it is locked
                raise
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, "what was saved before is kept", num_bytes) from error
        raise
    sync(path.parent)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically: even after a power failure it is either complete or unchanged."""
    encoded = text.encode()
    with replacing(path, num_bytes=len(encoded)) as file:
        file.write(encoded)


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's entries, to the disk, so that they survive a power failure."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders, and need not sync them
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that the disk is full; Polars raises such an OSError without an errno."""
    return isinstance(error, OSError) and (error.errno == errno.ENOSPC or "os error 28" in str(error))


def disk_full(path: Path, consequence: str, num_bytes: int | None = None) -> OSError:
    """The error for a full disk; it says how many bytes are free and, if known, needed."""
    free = shutil.disk_usage(path.parent).free
    needed = f"{num_bytes:,} bytes are needed and " if num_bytes is not None else ""
    return OSError(errno.ENOSPC, f"disk full: {needed}{free:,} bytes are free; {consequence}", str(path))


def check_is_file(path: Path) -> None:
    """Raise unless ``path`` is a regular file: a pipe or a device could block a reader, and must not be replaced."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')} and must be a file")


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """If the block cannot make sense of what a file holds, a ValueError says that the file is damaged, and why."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError) as error:
        text = str(error).partition("\n")[0]  # torch appends a stack trace
        raise ValueError(f"{path} is damaged: {text}") from None


def read(path: Path) -> str:
    """The text of a file."""
    check_is_file(path)
    with naming_damage(path):
        return path.read_text(encoding="utf-8")


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write an object with a checksum, for ``read_json``; atomically, as ``write`` does."""
    write(path, json.dumps(sealed(values), indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object that ``write_json`` wrote. A checksum may be missing only if the object has no ``format``."""
    text = read(path)
    with naming_damage(path):
        values = json.loads(text)
        return unsealed(values, required=isinstance(values, dict) and "format" in values)


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values and a checksum of all of them, to be written as JSON.

    >>> sealed({"step": 36})
    {'step': 36, 'checksum': 'b4ed6b2c'}
    """
    return {**values, CHECKSUM: _checksum(values)}


def unsealed(values: Any, *, required: bool = False) -> dict[str, Any]:
    """The values that ``sealed`` was given. An object without a checksum is accepted unless one is required."""
    if not isinstance(values, dict):
        raise ValueError(f"it holds {str(values)[:40]!r} and must hold a JSON object")
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    expected = _checksum(rest)
    if values.get(CHECKSUM, None if required else expected) != expected:
        raise ValueError("it differs from its checksum")
    return rest


def _checksum(values: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"

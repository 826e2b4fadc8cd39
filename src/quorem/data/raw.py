"""The synthetic click log as text: in the format of the Criteo file, or as CSV, to try ``quorem prepare`` on."""

import gzip
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..files import atomic as files
from .folder import Progress
from .synthetic import CPU_CHUNK_ROWS, MISSING, WRITE_ROWS, Chunk, ClickLog, in_threads

HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def write_raw(
    log: ClickLog,
    num_rows: int,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the first rows of a log as lines of label, counts and tokens, separated by tabs; missing ones are empty.

    A token is eight hex digits, different for every id of a feature. A file whose name ends in ``.gz`` is compressed.
    One whose name ends in ``.csv`` or ``.csv.gz`` has commas instead of tabs, and a header line (``click,I1,...``).

    Args:
        log: the hidden model.
        num_rows: number of rows.
        path: file to write.
        overwrite: replace an existing file.
        progress: called with the stage, the fraction of it that is done, and the rows so far.

    Raises:
        FileExistsError: if ``path`` exists and ``overwrite`` is False.
        ValueError: if ``num_rows`` is below 1.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> write_raw(ClickLog(cardinalities=(10, 10), num_dense=1), 3, path)
    >>> path.read_text().splitlines()[0]
    'click,I1,C1,C2'
    """
    path = Path(path)
    if num_rows < 1:
        raise ValueError(f"num_rows ({num_rows}) must be at least 1")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another name, or overwrite=True (--overwrite)")

    def text(start: int) -> bytes:
        chunk = Chunk(*(part[..., : num_rows - start] for part in log._chunk(start, torch.device("cpu"))))
        return lines(chunk, "," if is_csv(path) else "\t")

    packed = path.suffix == ".gz"
    with files.replacing(path) as plain, gzip.GzipFile("", "wb", 6, plain) if packed else nullcontext(plain) as file:
        if is_csv(path):
            numbers = [f"I{k + 1}" for k in range(log.num_dense)]
            categories = [f"C{k + 1}" for k in range(len(log.cardinalities))]
            file.write((",".join(["click", *numbers, *categories]) + "\n").encode())
        for start in range(0, num_rows, WRITE_ROWS):
            stop = min(start + WRITE_ROWS, num_rows)
            file.writelines(in_threads(text, range(start, stop, CPU_CHUNK_ROWS)))
            if progress is not None:
                progress("draw", stop / num_rows, stop)


def is_csv(path: Path) -> bool:
    """Whether the name is that of a CSV file, plain or compressed.

    >>> [is_csv(Path(name)) for name in ("log.csv", "log.csv.gz", "train.txt", "csv")]
    [True, True, False, False]
    """
    return path.name.endswith((".csv", ".csv.gz"))


def lines(chunk: Chunk, separator: str) -> bytes:
    """The text of some rows, built as a matrix of characters ``[B, W]`` from which unused positions are dropped."""
    label = chunk.labels.numpy().astype(np.uint8)[:, None] + ord("0")
    fields = [(label, np.ones_like(label, bool))]
    fields += [decimal(count) for count in chunk.counts.numpy()]
    for feature, ids in enumerate(chunk.ids.numpy()):
        fields.append((hex_digits(token(ids, feature)), np.repeat(ids[:, None] != 0, 8, 1)))
    characters, used = [], []
    for k, (text, present) in enumerate(fields):
        end = ord(separator) if k < len(fields) - 1 else ord("\n")
        characters += [text, np.full((len(text), 1), end, np.uint8)]
        used += [present, np.ones((len(text), 1), bool)]
    return np.concatenate(characters, 1)[np.concatenate(used, 1)].tobytes()


def token(ids: NDArray[np.int64], feature: int) -> NDArray[np.uint32]:
    """A 32-bit number for each id of a feature; distinct ids have distinct numbers, since every step can be undone.

    >>> len(set(token(np.arange(1000), 3).tolist()))
    1000
    """
    x = ids.astype(np.uint32) + np.uint32(feature * 0x3C6EF372 & 0xFFFFFFFF)
    for shift, factor in ((15, 0x9E3779B1), (13, 0x85EBCA77)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def hex_digits(numbers: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The eight hex digits of each number as ASCII ``[B, 8]``.

    >>> hex_digits(np.array([10], np.uint32)).tobytes()
    b'0000000a'
    """
    return HEX_DIGITS[(numbers[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)]


def decimal(numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The sign and decimal digits of each number ``[B, W]``, and which of them are used: none for a missing number.

    >>> text, used = decimal(np.array([-12, 305, MISSING]))
    >>> [row[is_used].tobytes().decode() for row, is_used in zip(text, used)]
    ['-12', '305', '']
    """
    missing = numbers == MISSING
    size = np.abs(np.where(missing, 0, numbers))
    width = len(str(size.max(initial=0)))
    scaled = size[:, None] // 10 ** np.arange(width - 1, -1, -1)
    sign = np.full((len(numbers), 1), ord("-"))
    used = np.concatenate([(numbers < 0)[:, None], scaled > 0], 1)
    used[:, -1] = True
    return np.concatenate([sign, ord("0") + scaled % 10], 1).astype(np.uint8), used & ~missing[:, None]

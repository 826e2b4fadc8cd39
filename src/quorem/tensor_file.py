"""A file of tensors and their description, in the safetensors format with checksums; it is read as a memory map.

Any safetensors reader can open it. This module fixes what the format leaves open. Tensors are aligned and lie in the
order in which they are given, so that adjacent tables can be mapped as one tensor. The description is JSON in the
header's metadata. Every tensor and the header have a CRC-32. Reading allocates no memory for tensors: they are views
of the mapped file.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import check_is_file, replacing

METADATA = "__metadata__"  # safetensors' key for the strings that describe a file
MAX_HEADER = 100_000_000  # bytes, the limit of safetensors' own readers
ALIGNMENT = 64
BLOCK_BYTES = 1 << 24  # bytes that are written, or read for a checksum, at a time
DTYPE_OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}
MAX_DIMS = 8


class TensorEntry(NamedTuple):
    """One tensor of the file; ``start`` and ``stop`` count from the first byte after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class FileKind(NamedTuple):
    """What a file holds, and its format version; a reader refuses files of another kind or version."""

    name: str
    version: int


def write_tensors(
    path: str | os.PathLike[str], kind: FileKind, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write tensors and their description to a file, atomically.

    Args:
        path: path of the file; an existing file is replaced.
        kind: kind of the file.
        tensors: tensors by name, on any device, in the order in which they are written.
        description: JSON values.

    Raises:
        ValueError: if a tensor has a dtype that the format does not have, or would not be aligned.
        OSError: if the disk is full; an existing file is kept.
    """
    entries: dict[str, Any] = {}
    stop = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAME_OF_DTYPE:
            raise ValueError(f"{name} ({tensor.dtype}) must be one of {', '.join(map(str, NAME_OF_DTYPE))}")
        if tensor.nbytes and stop % tensor.itemsize:
            raise ValueError(f"{name} ({tensor.dtype}) must come before tensors of narrower dtypes")
        start, stop = stop, stop + tensor.nbytes
        entries[name] = {
            "dtype": NAME_OF_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    metadata = {"format": kind.name, "version": str(kind.version), "description": json.dumps(description)}
    metadata["checksums"] = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})
    metadata["header_checksum"] = _header_checksum(entries, metadata)
    header = json.dumps({METADATA: metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    if len(header) > MAX_HEADER:
        raise ValueError(f"the header ({len(header):,} bytes) must have at most {MAX_HEADER:,} bytes")
    with replacing(path, num_bytes=8 + len(header) + stop) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for tensor in tensors.values():
            for block in byte_blocks(tensor):
                file.write(block)


class TensorFile:
    """A file that ``write_tensors`` wrote, mapped into memory.

    The mapping is private: writes into the tensors stay in this process and do not reach the file.

    Args:
        path: path of the file.
        kind: the kind that it must have.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is cut off, damaged, of another kind, or of an unknown version.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind) -> None:
        self.path = Path(path)
        check_is_file(self.path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 8:
                raise ValueError(f"{self.path} is cut off: it has {self.size} bytes")
            # Copy on write: torch wants writable memory, and the file must not change.
            mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        length = int.from_bytes(mapped[:8], "little")
        if length > min(self.size - 8, MAX_HEADER):
            raise ValueError(f"{self.path} {_what_else(mapped[:4], length, self.size, kind)}")
        try:
            header = json.loads(mapped[8 : 8 + length].decode(), object_pairs_hook=_unrepeated)
            self.description, checksums, entries = _opened(header, kind)
            self.entries = _checked_entries(entries, self.size - 8 - length)
            if length % 8:
                raise ValueError(f"a header of {length:,} bytes leaves its tensors unaligned")
        except RecursionError:
            raise ValueError(f"{self.path} is damaged: its header is nested too deeply") from None
        except _ForeignError as error:
            raise ValueError(f"{self.path} {error}") from None
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from None
        if checksums.keys() != self.entries.keys():
            raise ValueError(f"{self.path} is damaged: checksums and tensors differ in their names")
        self.checksums = checksums
        self._mapped, self._begin = mapped, 8 + length

    def tensor(self, name: str) -> Tensor:
        """One tensor, as a view of the file.

        Raises:
            ValueError: if the file has no such tensor.
        """
        entry = self._entry(name)
        return self._view(entry.dtype, entry.start, entry.stop).view(entry.shape)

    def together(self, names: Iterable[str]) -> Tensor:
        """The elements of tensors that are adjacent in the file, as one view ``[elements]``.

        Raises:
            ValueError: if they are not adjacent, or differ in dtype.
        """
        entries = [self._entry(name) for name in names]
        for before, after in pairwise(entries):
            if before.stop != after.start or before.dtype != after.dtype:
                raise ValueError(f"{self.path} is damaged: its tables must follow each other and share a dtype")
        return self._view(entries[0].dtype, entries[0].start, entries[-1].stop)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the named tensors, or all, with their checksums; this reads each tensor once.

        Raises:
            ValueError: if some differ; the message names them.
        """
        wanted = {name: self._entry(name) for name in (self.entries if names is None else names)}
        flat = {name: self._view(torch.uint8, entry.start, entry.stop) for name, entry in wanted.items()}
        wrong = [name for name, data in flat.items() if checksum(data) != self.checksums[name]]
        if wrong:
            raise ValueError(f"{self.path} is damaged: {', '.join(wrong[:3])} differ from their checksums")

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.entries:
            raise ValueError(f"{self.path} is damaged: {name} is missing")
        return self.entries[name]

    def _view(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """A tensor with a storage of its own, so that ``torch.save`` writes it alone and beside other dtypes."""
        if stop == start:
            return torch.empty(0, dtype=dtype, device="cpu")
        count = (stop - start) // dtype.itemsize
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=self._begin + start)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    value = 0
    for block in byte_blocks(tensor):
        value = zlib.crc32(block, value)
    return value


def byte_blocks(tensor: Tensor) -> Iterable[memoryview]:
    """A tensor's bytes, a part at a time, so that a strided tensor or one on a GPU is not copied as a whole."""
    rows = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()
    step = max(1, BLOCK_BYTES // max(1, tensor.nbytes // max(1, len(rows)))) if rows.dim() else 1
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu().contiguous().view(-1)
        if len(part):
            yield part.view(torch.uint8).numpy().data


class _ForeignError(ValueError):
    """The file is intact, but of another kind or version."""


def _opened(header: Any, kind: FileKind) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
    """Description, checksums and entries of a header; raises ValueError if the header is wrong."""
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} of its header must hold strings")
    if metadata.get("format") != kind.name:
        other = metadata.get("format", "no format")
        raise _ForeignError(f"is a safetensors file of something else: it says {other!r} and must say {kind.name!r}")
    if metadata.get("version") != str(kind.version):
        version = metadata.get("version")
        raise _ForeignError(f"has format version {version!r}, but this quorem reads {kind.version}: see CHANGELOG.md")
    if metadata.pop("header_checksum", None) != _header_checksum(header, metadata):
        raise ValueError("its header differs from its checksum")
    description, checksums = (json.loads(metadata.get(name, "null")) for name in ("description", "checksums"))
    if not isinstance(description, dict):
        raise ValueError("its description is not a JSON object")
    if not isinstance(checksums, dict) or not all(type(value) is int for value in checksums.values()):
        raise ValueError("its checksums are not integers by name")
    return description, checksums, header


def _checked_entries(entries: dict[str, Any], size: int) -> dict[str, TensorEntry]:
    """The tensors that a header declares; raises ValueError unless they fill the ``size`` bytes after it exactly."""
    checked = {name: _checked_entry(name, entry) for name, entry in entries.items()}
    end = 0
    for name, entry in sorted(checked.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"{name} starts at byte {entry.start} and must start at {end}")
        end = entry.stop
    if end > size:
        raise ValueError(f"it is cut off: its tensors have {end:,} bytes and {size:,} are there")
    if end < size:
        raise ValueError(f"its tensors have {end:,} bytes and {size:,} are there")
    return checked


def _checked_entry(name: str, entry: Any) -> TensorEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_NAME:
        raise ValueError(f"dtype ({dtype!r}) of {name} must be one of {', '.join(DTYPE_OF_NAME)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape ({str(shape)[:80]}) of {name} must be at most {MAX_DIMS} integers of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets ({str(offsets)[:80]}) of {name} must be two integers of at least 0")
    start, stop = offsets
    itemsize = DTYPE_OF_NAME[dtype].itemsize
    if stop - start != math.prod(shape) * itemsize:
        raise ValueError(f"{name} is {dtype} {shape}, which does not take {stop - start} bytes")
    if stop > start and start % itemsize:
        raise ValueError(f"{name} starts at byte {start}, which is not aligned for {dtype}")
    return TensorEntry(DTYPE_OF_NAME[dtype], tuple(shape), start, stop)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _header_checksum(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    text = json.dumps([entries, metadata], sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice in its header")
    return values


def _what_else(first: bytes, length: int, size: int, kind: FileKind) -> str:
    """The error for a file whose first eight bytes are not a valid header length: what the file may be instead."""
    if first == b"PK\x03\x04":
        return f"is a zip archive, such as torch.save writes, and not a {kind.name} file: it is not unpickled"
    return f"is cut off, or not a {kind.name} file: a header of {length:,} bytes is declared, and it has {size:,}"

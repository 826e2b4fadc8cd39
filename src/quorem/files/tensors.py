"""Files of tensors and their description: the safetensors format, with checksums in its metadata.

Any safetensors reader can open them. Reading maps the file: tensors are views of it and take no memory of their own.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .atomic import check_is_file, naming_damage, replacing, sealed, unsealed

METADATA = "quorem"  # key of the description, kind and checksums in the file's metadata
ALIGNMENT = 64  # bytes: rows start at a cache line
BLOCK_BYTES = 1 << 24  # bytes that are written, or read for a checksum, at a time
NAME_OF_DTYPE = {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (64, 32, 16)}
NAME_OF_DTYPE |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (64, 32, 16, 8)}
NAME_OF_DTYPE |= {torch.bfloat16: "BF16", torch.uint8: "U8", torch.bool: "BOOL"}


class FileKind(NamedTuple):
    """What a file holds, and its format version; a reader refuses files of another kind or version."""

    name: str
    version: int


def write_tensors(
    path: str | os.PathLike[str], kind: FileKind, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write tensors and their description to a file, atomically.

    safetensors' own writer would rename a file of mode 600 into place, leave it behind where the process is killed, and
    keep a copy of all tensors of a GPU. So the file is written here, a block at a time, and only read by the package.

    ``description`` are JSON values. An existing file is replaced, and kept if the disk is full.
    """
    in_order = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # so that all are aligned
    entries: dict[str, Any] = {}
    stop = 0
    for name, tensor in in_order.items():
        if tensor.dtype not in NAME_OF_DTYPE:
            raise ValueError(f"{name} ({tensor.dtype}) must be one of {', '.join(map(str, NAME_OF_DTYPE))}")
        start, stop = stop, stop + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": NAME_OF_DTYPE[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
    checksums = {name: checksum(tensor) for name, tensor in in_order.items()}
    values = {"format": kind.name, "version": kind.version, "checksums": checksums, "description": description}
    header = {"__metadata__": {METADATA: json.dumps(sealed(values))}, **entries}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    with replacing(path, num_bytes=8 + len(encoded) + stop) as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in in_order.values():
            for block in byte_blocks(tensor):
                file.write(block)


class TensorFile:
    """A file that ``write_tensors`` wrote, mapped into memory. Writes into its tensors do not reach the file.

    ``tensors`` are views of the file by name, and ``description`` is what was written. ``verify`` compares all tensors
    with their checksums, which reads each once. A file that is cut off, damaged, or of another kind or version is a
    ValueError.
    """

    def __init__(self, path: str | os.PathLike[str], kind: FileKind, *, verify: bool = True) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        check_is_file(self.path)
        try:
            with safe_open(self.path, "pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                values = _opened(self.path, metadata, kind)
                self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, RuntimeError) as error:
            what = f"is damaged, or not a {kind.name} file"
            if zipfile.is_zipfile(self.path):
                what = f"is a zip archive, such as torch.save writes, and not a {kind.name} file (it is not unpickled)"
            raise ValueError(f"{self.path} {what}: {error}") from None
        self.description: dict[str, Any] = values["description"]
        checksums: dict[str, int] = values["checksums"]
        if wrong := sorted(self.tensors.keys() ^ checksums.keys()):
            raise ValueError(f"{self.path} is damaged: {', '.join(wrong[:3])} must be a tensor with a checksum")
        wrong = [name for name, tensor in self.tensors.items() if verify and checksum(tensor) != checksums[name]]
        if wrong:
            raise ValueError(f"{self.path} is damaged: {', '.join(wrong[:3])} differ from their checksums")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's dtype, shape and bytes."""
    value = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
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


def _opened(path: Path, metadata: Mapping[str, str], kind: FileKind) -> dict[str, Any]:
    """What ``write_tensors`` put into the metadata; raises ValueError if it is damaged or of another kind."""
    with naming_damage(path):
        values = json.loads(metadata.get(METADATA, "{}"))
        name, version = values.get("format", metadata.get("format", "no format")), values.get("version")
        content = unsealed(values, required=True) if (name, version) == kind else {}
    if name != kind.name:
        rule = f"it says {str(name)[:40]!r} and must say {kind.name!r}"
        raise ValueError(f"{path} is a safetensors file of something else: {rule}")
    if version != kind.version:
        rule = f"this quorem reads {kind.version}: see CHANGELOG.md"
        raise ValueError(f"{path} has format version {str(version)[:40]!r}, but {rule}")
    return content

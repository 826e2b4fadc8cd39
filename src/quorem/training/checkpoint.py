"""Checkpoints: one safetensors file each, complete or absent, whose checksums tell damage from data."""

import json
import re
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import files

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("checkpoints need safetensors: pip install safetensors", name=error.name) from None

FORMAT = "quorem-checkpoint-2"
NAME = re.compile(r"step-(\d+)\.safetensors")

# The names that the safetensors format has for what a run holds.
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    torch.bool: "BOOL",
}


class CorruptCheckpointError(ValueError):
    """A checkpoint that is cut off, damaged, or no checkpoint at all."""


class Checkpoint(NamedTuple):
    """Tensors after a step, and JSON values beside them."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write the checkpoint of a step beside the earlier ones, then drop all but the last ``keep``.

    Args:
        folder: of the checkpoints; made if absent.
        step: that the tensors are the state after.
        tensors: by name, on any device.
        meta: JSON values that ``load`` gives back.
        keep: how many to keep, so that one damaged later does not lose the run.

    Raises:
        ValueError: if ``keep`` is below 1.
        OSError: if the disk is full; the earlier checkpoints stay.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:012}.safetensors"
    write_tensors(path, FORMAT, tensors, {"step": str(step), "meta": json.dumps(meta)})
    for _, old in saved(folder)[keep:]:
        old.unlink()
    return path


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum of each tensor and of the values in its header; ``kind`` names both.

    The library's own writer leaves a hidden file behind when it is killed, and gives the file to its owner alone.

    Raises:
        OSError: if the disk is full; a file that was there before stays.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    host = {name: tensors[name].detach().cpu().contiguous() for name in order}
    checksums = json.dumps({name: checksum(tensor) for name, tensor in host.items()})
    header: dict[str, Any] = {"__metadata__": files.sealed({"format": kind, **values, "checksums": checksums})}
    end = 0
    for name, tensor in host.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with files.replacing(path, num_bytes=8 + len(text) + end) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in host.values():
            file.write(_bytes(tensor))


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and values of a file that ``write_tensors`` wrote.

    Raises:
        FileNotFoundError: if there is none.
        CorruptCheckpointError: if the file is cut off, damaged, or another file.
    """
    files.check_is_file(path)
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != kind:
                raise CorruptCheckpointError(f"{path} is of format {header.get('format')!r} and must be of {kind!r}")
            values = files.unsealed(header, required=True)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        checksums = json.loads(values.pop("checksums"))
    except CorruptCheckpointError:
        raise
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path} is cut off or damaged ({path.stat().st_size:,} bytes): {error}") from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}") from None
    wrong = sorted(name for name in {*checksums, *tensors} if not _is_whole(tensors.get(name), checksums.get(name)))
    if wrong:
        raise CorruptCheckpointError(f"{path} is damaged: {', '.join(wrong[:3])} differ from their checksums")
    return tensors, values


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in a folder, the latest first."""
    matches = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def load(path: Path) -> Checkpoint:
    """The checkpoint in a file.

    Raises:
        CorruptCheckpointError: if the file is cut off, damaged, or not a checkpoint.
    """
    tensors, values = read_tensors(path, FORMAT)
    return Checkpoint(int(values["step"]), tensors, json.loads(values["meta"]))


def latest(folder: Path) -> Checkpoint | None:
    """The latest checkpoint that is whole; a warning for each later one that is not. None if there are none at all.

    Raises:
        CorruptCheckpointError: if there are some, and none is whole.
    """
    paths = [path for _, path in saved(folder)]
    for path in paths:
        try:
            return load(path)
        except CorruptCheckpointError as error:
            if path == paths[-1]:
                raise CorruptCheckpointError(f"no checkpoint is whole: {error}") from None
            warnings.warn(f"{error}; the one before it is taken", stacklevel=2)
    return None


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes, shape and dtype."""
    return zlib.crc32(_bytes(tensor), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


def _bytes(tensor: Tensor) -> memoryview:
    values = tensor.detach().contiguous().view(-1)
    return values.view(torch.uint8).numpy().data if len(values) else memoryview(b"")


def _is_whole(tensor: Tensor | None, expected: int | None) -> bool:
    return tensor is not None and checksum(tensor) == expected

"""Checkpoints: one safetensors file each, complete or absent, whose checksums tell damage from data."""

import errno
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("checkpoints need safetensors: pip install safetensors", name=error.name) from None

FORMAT = "quorem-checkpoint-1"
NAME = re.compile(r"step-(\d+)\.safetensors")


class CorruptCheckpointError(ValueError):
    """A checkpoint that is cut off, damaged, or no checkpoint at all."""


def write(path: Path, text: str) -> None:
    """Write a small file such that it is there whole or not at all, also after a power failure."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # another process may be writing the same
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names in a folder last."""
    with suppress(PermissionError):  # Windows opens no folders, and needs no sync of them
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: checksum(tensor) for name, tensor in host.items()}
    header = {"format": FORMAT, "step": str(step), "meta": json.dumps(meta), "checksums": json.dumps(checksums)}
    path = folder / f"step-{step:012}.safetensors"
    write_tensors(path, host, header)
    for _, old in saved(folder)[keep:]:
        old.unlink()
    return path


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file such that it is there whole or not at all.

    Raises:
        OSError: if the disk is full; a file that was there before stays.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, draft, header)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        if getattr(error, "errno", None) != errno.ENOSPC and not re.search("os error 28|No space left", str(error)):
            raise
        size = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(path.parent).free
        text = f"disk full: {size:,} bytes are needed and {free:,} are free; what was saved before is kept"
        raise OSError(errno.ENOSPC, text, str(path)) from error
    os.replace(draft, path)
    sync_folder(path.parent)


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in a folder, the latest first."""
    found = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def load(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Step, tensors and meta of a checkpoint.

    Raises:
        CorruptCheckpointError: if the file is cut off, damaged, or not a checkpoint.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CorruptCheckpointError(f"{path} is of format {header.get('format')!r} and must be of {FORMAT!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        step, meta, checksums = int(header["step"]), json.loads(header["meta"]), json.loads(header["checksums"])
    except (SafetensorError, OSError, KeyError, UnicodeError) as error:
        raise CorruptCheckpointError(f"{path} is cut off or damaged ({path.stat().st_size:,} bytes): {error}") from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}") from None
    wrong = sorted(name for name in {*checksums, *tensors} if not _is_whole(tensors.get(name), checksums.get(name)))
    if wrong:
        raise CorruptCheckpointError(f"{path} is damaged: {', '.join(wrong[:3])} differ from their checksums")
    return step, tensors, meta


def latest(folder: Path) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    """The latest checkpoint that is whole, or nothing if there is none at all; a warning for each that is not.

    Raises:
        CorruptCheckpointError: if there are some, and none is whole.
    """
    found = saved(folder)
    for at, (_, path) in enumerate(found):
        try:
            yield load(path)
            return
        except CorruptCheckpointError as error:
            if at + 1 == len(found):
                raise CorruptCheckpointError(f"no checkpoint is whole: {error}") from None
            warnings.warn(f"{error}; the one before it is taken", stacklevel=2)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes, shape and dtype."""
    head = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().contiguous().view(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().data, head) if len(values) else head


def _is_whole(tensor: Tensor | None, expected: int | None) -> bool:
    return tensor is not None and checksum(tensor) == expected

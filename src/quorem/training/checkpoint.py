"""Checkpoints: one file each, written atomically, with checksums that reveal damage."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..files.tensors import FileKind, TensorFile, write_tensors

KIND = FileKind("quorem-checkpoint", 2)
KEPT = 2  # checkpoints; with several, the run is not lost if the last one is damaged later
NAME = re.compile(r"step-(\d+)\.safetensors")


class CorruptCheckpointError(ValueError):
    """The file is cut off, damaged, or not a checkpoint."""


class Checkpoint(NamedTuple):
    """The tensors after a step, and JSON values."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write the tensors and JSON values after a step, then remove all but the last ``KEPT`` checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:012}.safetensors"
    write_tensors(path, KIND, tensors, {"step": step, "meta": meta})
    for _, old in saved(folder)[KEPT:]:
        old.unlink()
    return path


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in a folder, the latest first."""
    matches = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def load(path: Path) -> Checkpoint:
    """The checkpoint in a file; raises CorruptCheckpointError if it is cut off, damaged, or not a checkpoint."""
    try:
        file = TensorFile(path, KIND)
        step, meta = file.description.get("step"), file.description.get("meta")
        if type(step) is not int or not isinstance(meta, dict):
            raise ValueError(f"{path} is damaged: step must be an integer and meta an object")
        file.verify()
    except ValueError as error:
        raise CorruptCheckpointError(str(error)) from None
    return Checkpoint(step, {name: tensor.clone() for name, tensor in file.tensors.items()}, meta)


def latest(folder: Path) -> Checkpoint | None:
    """The latest intact checkpoint, with a warning for each later one that is damaged; None if there are none at all.

    Raises:
        CorruptCheckpointError: if there are checkpoints, but none is intact.
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

"""Checkpoints: one file each, written atomically, with checksums that reveal damage."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..files.checked_json import build
from ..files.tensors import FileKind, TensorFile, write_tensors

KIND = FileKind("quorem-checkpoint", 4)
KEPT = 2  # checkpoints; with several, the run is not lost if the last one is damaged later
NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: its configuration, steps, seconds of training, the last loss, and the best epoch so far."""

    config: str  # as JSON
    step: int = 0
    seconds: float = 0.0
    loss: float | None = None
    best_loss: float = math.inf
    best_epoch: int = 0
    metrics_lines: int = 0  # lines in metrics.jsonl up to the step


class Checkpoint(NamedTuple):
    """The progress of a run, and its tensors."""

    progress: Progress
    tensors: dict[str, Tensor]


def save(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> Path:
    """Write the tensors after a step, then remove all but the last ``KEPT`` checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{progress.step:012}.safetensors"
    write_tensors(path, KIND, tensors, asdict(progress))
    for _, old in saved(folder)[KEPT:]:
        old.unlink()
    return path


def saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in a folder, the latest first."""
    matches = ((NAME.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def load(path: Path) -> Checkpoint:
    """The checkpoint in a file; raises ValueError if it is cut off, damaged, or not a checkpoint."""
    file = TensorFile(path, KIND)
    try:
        progress = build(Progress, file.description)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return Checkpoint(progress, {name: tensor.clone() for name, tensor in file.tensors.items()})


def latest(folder: Path) -> Checkpoint | None:
    """The latest intact checkpoint, with a warning for each later one that is damaged; None if there are none at all.

    If there are checkpoints, but none is intact, it raises ValueError.
    """
    paths = [path for _, path in saved(folder)]
    for path in paths:
        try:
            return load(path)
        except ValueError as error:
            if path == paths[-1]:
                raise ValueError(f"no checkpoint is whole: {error}") from None
            warnings.warn(f"{error}; the one before it is taken", stacklevel=2)
    return None

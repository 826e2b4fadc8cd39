"""The folder of a run: its configuration, metrics, checkpoints and, at the end, the model and the result.

run.json              the configuration
metrics.jsonl         one JSON object per line: step, training loss or metrics of a split, and a checksum
checkpoints/          the last few checkpoints, one file each
model.safetensors     the trained model, as ``quorem.save`` writes it; for a custom network only its tables
layers.safetensors    for a custom network: everything else; loading it needs the network's Python file
encoding.safetensors  columns, transforms and vocabularies of the data, so that the model can score raw rows
result.json           the result, which is written last: if it exists, the run is finished
"""

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import models
from ..checks import shown_names
from ..data.encoding import write_encoding
from ..data.prepared import Prepared
from ..files import atomic as files
from ..files.checked_json import build
from ..files.saved_model import load, save
from ..files.tensors import FileKind, TensorFile, write_tensors
from ..models.presets import is_custom
from ..modules.lookup import tables_in
from .config import RunConfig
from .processes import is_first
from .trial import Trial

RESULT_FORMAT = "quorem-result-1"
ENCODING, RESULT = "encoding.safetensors", "result.json"
MODEL, LAYERS = "model.safetensors", "layers.safetensors"
LAYERS_KIND, CHECKPOINT_KIND = FileKind("quorem-layers", 2), FileKind("quorem-checkpoint", 4)
CHECKPOINT_NAME = re.compile(r"step-(\d+)\.safetensors")
KEPT = 2  # checkpoints; with several, the run is not lost if the last one is damaged later


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


class RunFolder:
    """The folder of one run, in which only one process at a time can train: a context manager.

    Entering it raises LockedError if another process is training in it: after so many ``attempts`` to lock it.
    """

    def __init__(self, path: str | os.PathLike[str], config: RunConfig, *, attempts: int = files.LOCK_ATTEMPTS) -> None:
        self.path, self.config, self.attempts = Path(path), config, attempts
        self._metrics = self.path / "metrics.jsonl"
        self._lock: files.Lock | None = None

    def __enter__(self) -> "RunFolder":
        """Lock the folder; of several processes that train together, the first does it for all."""
        if is_first():
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(f"{self.path} is a file and must be a folder, or not exist yet")
            self.path.mkdir(parents=True, exist_ok=True)
            message = f"{self.path}: another process is training in this folder"
            self._lock = files.Lock(self.path / ".lock", message, attempts=self.attempts)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def claim(self) -> None:
        """Check that the folder is of this run, or is empty, and remove the drafts of a killed process."""
        if not is_first():
            return
        about = self.path / "run.json"
        for draft in self.path.rglob("*.tmp"):
            draft.unlink()
        if about.exists():
            if (earlier := read_config(about)) != self.config:
                raise ValueError(f"{self.path} holds another run: {difference(earlier, self.config)}; take a new --out")
            return
        if strangers := sorted(p.name for p in self.path.iterdir() if p.name != ".lock"):
            raise FileExistsError(f"{self.path} is not the folder of a run: it has {', '.join(strangers[:3])}")
        files.write(about, self.config.to_json() + "\n")

    def result(self) -> dict[str, Any] | None:
        """The result if the run is finished, whose checkpoints then go; else None."""
        if not (self.path / RESULT).exists():
            return None
        self._remove_checkpoints()  # the run may have been killed before it did
        return read_result(self.path / RESULT)

    def _remove_checkpoints(self) -> None:
        if is_first():
            for _, old in saved_checkpoints(self.path / "checkpoints"):
                old.unlink()

    def resume(self, trial: Trial) -> Progress:
        """Restore the trial from the latest intact checkpoint, if there is one; returns its progress.

        The first process also drops the metrics of later steps.
        """
        progress = Progress(config=self.config.to_json())
        if last := latest_checkpoint(self.path / "checkpoints"):
            progress, tensors = last
            if progress.config != self.config.to_json():
                other = difference(RunConfig.from_json(progress.config), self.config)
                raise ValueError(f"{self.path} has a checkpoint of another run: {other}")
            trial.restore(progress.step, tensors)
        if is_first():
            lines = read_metrics(self._metrics).lines if self._metrics.exists() else []
            kept = [values for values in lines if values["step"] <= progress.step]
            if lost := progress.metrics_lines - len(kept):
                about = f"{lost} of its {progress.metrics_lines} lines up to step {progress.step} are lost"
                warnings.warn(f"{self._metrics} is damaged: {about}", stacklevel=3)
            files.write(self._metrics, "".join(map(_line, kept)))
        return progress

    def save(self, trial: Trial, progress: Progress) -> None:
        """Write a checkpoint; the metrics up to it are synced to the disk first."""
        files.sync(self._metrics)
        progress = replace(progress, metrics_lines=self._metrics.read_bytes().count(b"\n"))
        save_checkpoint(self.path / "checkpoints", progress, trial.tensors())

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``."""
        with open(self._metrics, "a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))

    def finish(self, model: nn.Module | None, prepared: Prepared, result: dict[str, Any]) -> None:
        """Write the model, unless it is None, with its encoding, and the result; remove all checkpoints."""
        files.sync(self._metrics)
        if model is not None:
            write_model(self.path, model, self.config)
            write_encoding(self.path / ENCODING, prepared, self.config.data)
        files.write_json(self.path / RESULT, {"format": RESULT_FORMAT, **result})
        self._remove_checkpoints()


def save_checkpoint(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> Path:
    """Write the tensors after a step, then remove all but the last ``KEPT`` checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{progress.step:012}.safetensors"
    write_tensors(path, CHECKPOINT_KIND, tensors, asdict(progress))
    for _, old in saved_checkpoints(folder)[KEPT:]:
        old.unlink()
    return path


def saved_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint in a folder, the latest first."""
    matches = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.safetensors"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def load_checkpoint(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """The progress and the tensors in a checkpoint; raises ValueError if it is cut off, damaged, or none."""
    file = TensorFile(path, CHECKPOINT_KIND)
    with files.naming_damage(path):
        progress = build(Progress, file.description)
    return progress, {name: tensor.clone() for name, tensor in file.tensors.items()}


def latest_checkpoint(folder: Path) -> tuple[Progress, dict[str, Tensor]] | None:
    """The latest intact checkpoint, with a warning for each later one that is damaged; None if there are none at all.

    If there are checkpoints, but none is intact, it raises ValueError.
    """
    paths = [path for _, path in saved_checkpoints(folder)]
    for path in paths:
        try:
            return load_checkpoint(path)
        except ValueError as error:
            if path == paths[-1]:
                raise ValueError(f"no checkpoint is whole: {error}") from None
            warnings.warn(f"{error}; the one before it is taken", stacklevel=2)
    return None


class MetricsFile(NamedTuple):
    """The intact lines of ``metrics.jsonl``, the numbers of damaged lines, and whether the final line is there."""

    lines: list[dict[str, Any]]
    damaged: list[int]
    is_final: bool


def read_metrics(path: Path) -> MetricsFile:
    """Read a ``metrics.jsonl``."""
    files.check_is_file(path)
    lines, damaged, text = [], [], path.read_bytes()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lines.append(files.unsealed(json.loads(line), required=True))
        except (ValueError, RecursionError):
            damaged.append(number)
    return MetricsFile(lines, damaged, is_final=bool(lines) and "test" in lines[-1])


def _line(values: dict[str, Any]) -> str:
    return json.dumps(files.sealed(values)) + "\n"


def read_result(path: Path) -> dict[str, Any]:
    """Read a ``result.json``; raises ValueError if it is damaged."""
    result = files.read_json(path)
    if (found := result.pop("format", None)) != RESULT_FORMAT:
        raise ValueError(f"{path} is damaged: format ({found!r}) must be {RESULT_FORMAT!r}")
    return result


def read_config(path: Path) -> RunConfig:
    """Read a ``run.json``; raises ValueError if it is damaged."""
    text = files.read(path)
    with files.naming_damage(path):
        return RunConfig.from_json(text)


def difference(saved: RunConfig, wanted: RunConfig) -> str:
    """Where two configurations differ; of plans only the tables."""
    plans = [dict(config.plan or ()) for config in (saved, wanted)]
    tables = [name for name in plans[0] | plans[1] if plans[0].get(name) != plans[1].get(name)]
    pairs = [(f.name, getattr(saved, f.name), getattr(wanted, f.name)) for f in fields(RunConfig) if f.name != "plan"]
    texts = [f"{name} is {old!r} there and {new!r} here" for name, old, new in pairs if old != new]
    return ", ".join([*[f"the plan differs in tables {shown_names(tables)}"] * bool(tables), *texts])


def write_model(folder: Path, model: nn.Module, config: RunConfig) -> None:
    """Write a trained model."""
    if not is_custom(config.network):
        save(model, folder / MODEL)
        return
    tables = tables_in(model)[0]
    state, inside = model.state_dict(), _prefixes(model, tables)
    layers = {name: tensor.detach() for name, tensor in state.items() if not name.startswith(inside)}
    write_tensors(folder / LAYERS, LAYERS_KIND, layers, {})
    save(tables, folder / MODEL)


def read_model(folder: Path, config: RunConfig, num_dense: int, *, verify: bool = True) -> nn.Module:
    """The model that ``write_model`` wrote. For a custom network, this runs the network's Python file."""
    loaded = load(folder / MODEL, verify=verify)
    if not is_custom(config.network):
        return loaded
    model = models.build(config.network, loaded, num_dense=num_dense)
    file = TensorFile(folder / LAYERS, LAYERS_KIND, verify=verify)
    keys = model.load_state_dict(file.tensors, strict=False)
    missing = [name for name in keys.missing_keys if not name.startswith(_prefixes(model, loaded))]
    if wrong := [*keys.unexpected_keys, *missing]:
        raise ValueError(f"{folder / LAYERS} does not fit the network: {', '.join(wrong[:3])}")
    return model


def _prefixes(model: nn.Module, tables: nn.Module) -> tuple[str, ...]:
    """The prefixes of the names of the tables' tensors in the model's ``state_dict``."""
    named = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}." for name, module in named if module is tables)

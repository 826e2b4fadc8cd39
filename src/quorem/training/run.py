"""A run's folder: what is being trained, its checkpoints, its metrics line by line, and at the end its result.

run.json            configuration
metrics.jsonl       one JSON object a line: step, and training loss or metrics of a split
checkpoints/        the last few, each one file
model.safetensors   the trained model, as ``state_dict`` names it
result.json         written last: with it the run is finished
"""

import dataclasses
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from .. import files
from ..provenance import commit, versions
from . import checkpoint
from .config import RunConfig
from .trial import Trial

MODEL_FORMAT = "quorem-model-1"


class RunFolder:
    """The folder of one run, in which one process at a time trains: a context manager.

    Args:
        path: made if absent.
        config: of the run; a folder of another run is refused.

    Raises:
        ValueError: if the folder belongs to a run with another configuration or other data.
        FileExistsError: if it has files, and none that say whose run it is.
        LockedError: if another process is training in it.
    """

    def __init__(self, path: str | os.PathLike[str], config: RunConfig) -> None:
        self.path, self.config = Path(path), config
        self._lock: files.Lock | None = None

    def lock(self, *, attempts: int = files.LOCK_ATTEMPTS) -> None:
        """Keep other processes out until ``unlock``.

        Raises:
            LockedError: if another process is training in the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        message = f"{self.path}: another process is training in this folder"
        self._lock = files.Lock(self.path / ".lock", message, attempts=attempts)

    def unlock(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        """Check whose run it is, and open it; lock it, if that was not done before."""
        self._unlock_at_exit = self._lock is None
        if self._lock is None:
            self.lock()
        try:
            self._claim()
            self.metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")
        except BaseException:
            self._release()
            raise
        return self

    def _claim(self) -> None:
        about = self.path / "run.json"
        for folder in (self.path, self.path / "checkpoints"):
            files.clear_drafts(folder)
        if about.exists():
            found = RunConfig.from_json(about.read_text(encoding="utf-8"))
            if found != self.config:
                raise ValueError(f"{self.path} holds another run: {difference(found, self.config)}")
            return
        if strangers := sorted(p.name for p in self.path.iterdir() if p.name != ".lock"):
            raise FileExistsError(f"{self.path} is not the folder of a run: it has {', '.join(strangers[:3])}")
        files.write(about, self.config.to_json() + "\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the run, and unlock it unless it was locked before."""
        self.metrics.close()
        self._release()

    def _release(self) -> None:
        if self._unlock_at_exit:
            self.unlock()

    def result(self) -> dict[str, Any] | None:
        """The result, if the run is finished."""
        path = self.path / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def resume(self, trial: Trial) -> tuple[int, dict[str, Any]]:
        """Put the trial into the state of the latest whole checkpoint; its step and progress, or 0 and nothing.

        Raises:
            CorruptCheckpointError: if there are checkpoints, and none is whole.
            ValueError: if the checkpoint is of another run.
        """
        last = checkpoint.latest(self.path / "checkpoints")
        if last is None:
            self._forget_after(0)
            return 0, {}
        found = RunConfig.from_json(last.meta["config"])
        if found != self.config:
            raise ValueError(f"{self.path} has a checkpoint of another run: {difference(found, self.config)}")
        trial.restore(last.tensors)
        self._forget_after(last.step)
        return last.step, last.meta["progress"]

    def _forget_after(self, step: int) -> None:
        """Drop the metrics of steps that are about to be taken again, and a last line that was cut off."""
        path = self.path / "metrics.jsonl"
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                break
        self.metrics.close()
        files.write(path, "".join(kept))
        self.metrics = open(path, "a", encoding="utf-8")  # noqa: SIM115 - see __exit__

    def save(self, trial: Trial, step: int, progress: dict[str, Any], *, keep: int = 2) -> None:
        """Write a checkpoint; metrics up to it are on the disk before it is.

        Raises:
            OSError: if the disk is full.
        """
        self.metrics.flush()
        os.fsync(self.metrics.fileno())
        meta = {"config": self.config.to_json(), "progress": progress, "versions": versions(), "commit": commit()}
        checkpoint.save(self.path / "checkpoints", step, trial.tensors(), meta, keep=keep)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``."""
        self.metrics.write(json.dumps({"step": step, **values}) + "\n")
        self.metrics.flush()

    def finish(self, model: nn.Module | None, result: dict[str, Any]) -> None:
        """Write the trained model, if one is given, and the result, and drop the checkpoints.

        Raises:
            OSError: if the disk is full.
        """
        os.fsync(self.metrics.fileno())
        if model is not None:
            about = {"config": self.config.to_json()}
            checkpoint.write_tensors(self.path / "model.safetensors", MODEL_FORMAT, model.state_dict(), about)
        files.write(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        for _, old in checkpoint.saved(self.path / "checkpoints"):
            old.unlink()


def difference(found: RunConfig, wanted: RunConfig) -> str:
    """Where two configurations differ.

    >>> difference(RunConfig(data="a", seed=1), RunConfig(data="a", seed=2))
    'seed is 1 there and 2 here'
    """
    pairs = [(f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in dataclasses.fields(RunConfig)]
    return ", ".join(f"{name} is {there!r} there and {here!r} here" for name, there, here in pairs if there != here)

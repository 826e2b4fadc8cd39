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
import platform
import subprocess
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..version import __version__
from . import checkpoint
from .config import RunConfig
from .trial import Trial

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes in one folder are then not told apart
    fcntl = None  # type: ignore[assignment]

LOCK_ATTEMPTS = 10


class RunFolder:
    """The folder of one run, held by one process at a time.

    Args:
        path: made if absent.
        config: of the run; a folder of another run is refused.

    Raises:
        ValueError: if the folder belongs to a run with another configuration or other data.
        FileExistsError: if it has files, and none that say whose run it is.
        RuntimeError: if another process is training in it.
    """

    def __init__(self, path: str | os.PathLike[str], config: RunConfig) -> None:
        self.path, self.config = Path(path), config
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            if fcntl is not None:
                _lock(self._lock, f"{self.path}: another process is training in this folder")
            self._claim()
            self.metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - see __exit__
        except BaseException:
            os.close(self._lock)
            raise

    def _claim(self) -> None:
        about = self.path / "run.json"
        for draft in [*self.path.glob("*.tmp"), *(self.path / "checkpoints").glob("*.tmp")]:
            draft.unlink()  # what a killed process was writing
        if about.exists():
            found = RunConfig.from_json(about.read_text(encoding="utf-8"))
            if found != self.config:
                raise ValueError(f"{self.path} holds another run: {difference(found, self.config)}")
            return
        if strangers := sorted(p.name for p in self.path.iterdir() if p.name != ".lock"):
            raise FileExistsError(f"{self.path} is not the folder of a run: it has {', '.join(strangers[:3])}")
        checkpoint.write(about, self.config.to_json() + "\n")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let another process have the folder."""
        self.metrics.close()
        os.close(self._lock)

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
        step, progress = 0, {}
        for step, tensors, meta in checkpoint.latest(self.path / "checkpoints"):  # noqa: B007 - one at most
            found = RunConfig.from_json(meta["config"])
            if found != self.config:
                raise ValueError(f"{self.path} has a checkpoint of another run: {difference(found, self.config)}")
            trial.restore(tensors)
            progress = meta["progress"]
        self._forget_after(step)
        return step, progress

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
        checkpoint.write(path, "".join(kept))
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
            state = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
            header = {"config": self.config.to_json()}
            checkpoint.write_tensors(self.path / "model.safetensors", state, header)
        checkpoint.write(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        for _, old in checkpoint.saved(self.path / "checkpoints"):
            old.unlink()


def _lock(descriptor: int, held: str) -> None:
    """Take a lock; raise RuntimeError if another process keeps it.

    A process that was killed while it started another may leave it to that one for a moment.
    """
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt == LOCK_ATTEMPTS - 1:
                raise RuntimeError(held) from None
        time.sleep(0.05)


def difference(found: RunConfig, wanted: RunConfig) -> str:
    """Where two configurations differ.

    >>> difference(RunConfig(data="a", seed=1), RunConfig(data="a", seed=2))
    'seed is 1 there and 2 here'
    """
    pairs = [(f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in dataclasses.fields(RunConfig)]
    return ", ".join(f"{name} is {there!r} there and {here!r} here" for name, there, here in pairs if there != here)


def versions() -> dict[str, str]:
    """What a run depends on."""
    found = {"quorem": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return found | {"python": platform.python_version()}


@cache
def commit() -> str | None:
    """The checkout's commit when first asked, a plus where the package differs from it; None without a checkout."""
    here = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD") if git("ls-files", "__init__.py") else ""
        return head + "+" * bool(git("status", "--porcelain", "--", ".")) if head else None
    except OSError:  # git is not installed
        return None

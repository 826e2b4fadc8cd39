"""What every row of a benchmark tells of its run."""

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...version import __version__
from .check import ROOT


def facts_of_run(device: torch.device, command: str, commit: str | None = None) -> dict[str, Any]:
    """Device, versions, commit, date and command."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "numba")},
        "fbgemm": _version("fbgemm_gpu") or _version("fbgemm_gpu_cpu"),
        "quorem": __version__,
        "commit": commit or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The checkout's commit, "+" appended where its code has changed since; "unknown" outside of one."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())

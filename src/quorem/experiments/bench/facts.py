"""The facts about a run that every row of a benchmark contains."""

import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...files import provenance
from ...version import __version__


def facts_of_run(device: torch.device, command: str, commit: str | None = None) -> dict[str, Any]:
    """Device, versions, commit, date and command."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "numba")},
        "fbgemm": _version("fbgemm_gpu") or _version("fbgemm_gpu_cpu"),
        "quorem": __version__,
        "commit": commit or provenance.commit() or "unknown",
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

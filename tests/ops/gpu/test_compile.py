"""Every kernel compiles for a GPU, whether or not there is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quorem

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

SOURCES = Path(quorem.__file__).parent
TESTS = Path(__file__).parents[2]


def test_every_kernel_compiles(tmp_path: Path) -> None:
    kernels = {
        name
        for file in SOURCES.glob("**/*.py")
        for name in re.findall(r"@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\(", file.read_text("utf-8"))
    }
    path = os.pathsep.join([str(TESTS), str(SOURCES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, "-W", "error:tl.where", str(TESTS / "compile_kernels.py")]  # later Tritons refuse it
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kernels and set(done.stdout.split()[1:]) == kernels

"""`import quorem` loads torch and numpy, nothing heavier."""

import json
import subprocess
import sys

HEAVY = {"numba", "triton", "polars", "pyarrow", "matplotlib", "typer", "rich", "pandas", "scipy"}


def top_level_modules(statement: str) -> set[str]:
    """The top-level packages a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name.split('.')[0] for name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_is_light():
    alone = top_level_modules("import torch, numpy")
    with_quorem = top_level_modules("import torch, numpy, quorem")
    assert "quorem" in with_quorem
    assert sorted((with_quorem - alone) & HEAVY) == []

"""Every script of ``benchmarks/`` finds what it imports: few of them run in the tests."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_scripts_import():
    names = ", ".join(sorted(path.stem for path in FOLDER.glob("*.py")))
    done = subprocess.run([sys.executable, "-c", f"import {names}"], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

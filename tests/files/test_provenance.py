"""Versions and commit: asked for in one place."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from quorem.files import provenance

ROOT = Path(__file__).parents[2]


def test_versions_are_those_installed():
    found = provenance.versions("pytest")
    assert found.keys() == {"quorem", "python", "torch", "numpy", "pytest"}
    assert (found["torch"], found["pytest"]) == (torch.__version__, version("pytest"))


def test_the_commit_is_that_of_the_checkout():
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()

    if not git("ls-files", "src/quorem/__init__.py"):  # no checkout, or that of another project around this one
        pytest.skip("needs a checkout of the repository, and git: git clone")
    changed = git("status", "--porcelain", "src/quorem")
    assert provenance.commit() == git("rev-parse", "HEAD")[:12] + "+" * bool(changed)


def test_without_git_or_a_checkout_there_is_no_commit(tmp_path):
    code = "from quorem.files import provenance; print(provenance.commit())"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert run.stdout.strip() == "None", run.stderr


def test_nothing_else_asks_git_locks_or_syncs():
    asking = {
        path.relative_to(ROOT).as_posix()
        for folder in ("src", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"rev-parse|import fcntl|os\.fsync", path.read_text(encoding="utf-8"))
    }
    of_another_tree = "benchmarks/against.py"
    assert asking - {of_another_tree} == {
        "src/quorem/files/provenance.py",
        "src/quorem/files/atomic.py",
        "src/quorem/training/run.py",
    }

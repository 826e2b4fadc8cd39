"""The commit of the checkout, and what it is without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quorem.files import provenance

ROOT = Path(__file__).parents[2]


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

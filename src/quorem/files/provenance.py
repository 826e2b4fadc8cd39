"""What produced a result: versions of the packages, and the commit of the checkout."""

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ..version import __version__


def versions(*packages: str) -> dict[str, str]:
    """Versions of quorem, Python, torch and NumPy, and of further packages, given by their distribution names."""
    always = {"quorem": __version__, "python": platform.python_version()}
    always |= {"torch": torch.__version__, "numpy": np.__version__}
    return always | {name: importlib.metadata.version(name) for name in packages}


@cache
def commit() -> str | None:
    """The commit of the checkout when this was first called, with a plus if the package has uncommitted changes.

    It is twelve hex digits, and perhaps a plus; None without a checkout or without git.
    """
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", "__init__.py"):  # the package is installed inside another project's checkout
            return None
        head = git("rev-parse", "--short=12", "HEAD")
        return head + "+" * bool(git("status", "--porcelain", "--", ".")) if head else None
    except OSError:  # git is not installed
        return None

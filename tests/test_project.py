"""Dependencies are pinned in constraints.txt and explained in docs/dependencies.md; tests do without optional ones."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quorem

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    *PYPROJECT["build-system"]["requires"],
    *PYPROJECT["project"]["dependencies"],
    *(r for extra in PYPROJECT["project"]["optional-dependencies"].values() for r in extra),
]
NAMES = sorted({re.match(r"[\w.-]+", requirement)[0] for requirement in REQUIREMENTS})


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_runtime_dependencies_are_torch_numpy_and_safetensors():
    assert PYPROJECT["project"]["dependencies"] == ["torch>=2.11", "numpy>=1.26", "safetensors>=0.5"]


def test_constraints_pin_the_direct_dependencies_and_nothing_else():
    assert sorted(pins()) == NAMES
    assert pins()["torch"] == "2.13.0"


@pytest.mark.parametrize("name", NAMES)
def test_dependency_is_explained(name):
    assert f"\n| {name} |" in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


WITHOUT = """
import sys

MISSING = {"polars", "selenium", "torchrec", "fbgemm_gpu", "uvicorn", "nbformat", "hatchling"}
MISSING |= {"accelerate", "lightning", "transformers"}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Finder())
"""


def test_all_tests_are_collected_where_optional_packages_are_missing(tmp_path: Path) -> None:
    """As on a GPU machine with torch, Triton and little else; what needs them is skipped, with the line to install."""
    (tmp_path / "without.py").write_text(WITHOUT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "pytest", "-p", "without", "-p", "no:cacheprovider", "--co", "-q", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    skipped = re.findall("^SKIPPED.*", done.stdout, re.M)
    assert skipped and all(": pip install" in line or "make install" in line for line in skipped)


def test_workflows_run_targets_that_exist():
    """Continuous integration elsewhere does what ``.ci/run`` does here."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    called = re.findall(r"run: make (\w+)", workflow)
    assert set(called) <= targets
    here = re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    assert set(here) <= set(called)


def test_the_package_and_the_citation_have_the_version_of_the_project():
    assert quorem.__version__ == PYPROJECT["project"]["version"]
    assert f"\nversion: {quorem.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")

"""Every direct dependency is pinned in constraints.txt and explained in docs/dependencies.md."""

import re
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


def test_runtime_dependencies_are_torch_and_numpy():
    assert PYPROJECT["project"]["dependencies"] == ["torch>=2.11", "numpy>=1.26"]


def test_constraints_pin_the_direct_dependencies_and_nothing_else():
    assert sorted(pins()) == NAMES
    assert pins()["torch"] == "2.13.0"


@pytest.mark.parametrize("name", NAMES)
def test_dependency_is_explained(name):
    assert f"\n| {name} |" in (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")


def test_the_version_is_that_of_the_project():
    assert quorem.__version__ == PYPROJECT["project"]["version"]

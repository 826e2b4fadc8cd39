"""Dependencies are pinned in constraints.txt and explained in docs/dependencies.md; tests do without optional ones."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
from processes import python
from test_docs import BLOCK

import quorem

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    *PYPROJECT["build-system"]["requires"],
    *PYPROJECT["project"]["dependencies"],
    *(r for extra in PYPROJECT["project"]["optional-dependencies"].values() for r in extra),
]
NAMES = sorted({re.match(r"[\w.-]+", requirement)[0] for requirement in REQUIREMENTS})


def test_dependencies_are_pinned_and_explained():
    pins = re.findall("^([^#=]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert sorted(pins) == NAMES
    explained = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"\n| {name} |" not in explained] == []


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
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = ("-m", "pytest", "-p", "without", "-p", "no:cacheprovider", "--co", "-q", "tests")
    skipped = re.findall("^SKIPPED.*", python(*command, cwd=ROOT, env=environment), re.M)
    assert skipped and all(": pip install" in line or "make install" in line for line in skipped)


def test_the_package_and_the_citation_have_the_version_of_the_project():
    assert quorem.__version__ == PYPROJECT["project"]["version"]
    assert f"\nversion: {quorem.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f'needs {package}: pip install "quorem[dev]"')
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel_python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: quorem from the wheel, what it needs from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (wheel,) = dist.glob("*.whl")
    executable = folder / "bin" / "python"
    python("-m", "pip", "--python", executable, "install", "--no-deps", "--no-index", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A .pth file in a folder that is itself added so is not read: the editable quorem of the tests stays out.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return executable


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_source_distribution_has_what_the_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {"Makefile", "constraints.txt", "mkdocs.yml", "docs/tutorial.md", "tests/test_docs.py"}
    assert needed | {"src/quorem/api.py", "examples/quickstart.ipynb", "benchmarks/result_tables.py"} <= names


def test_readme_runs_from_the_wheel(wheel_python: Path, tmp_path: Path) -> None:
    where = run(wheel_python, "-c", "import quorem; print(quorem.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(wheel_python.parents[1])
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    code = "\n".join(code for language, code in blocks if language == "python")
    (tmp_path / "readme.py").write_text(code, encoding="utf-8")
    run(wheel_python, "readme.py", folder=tmp_path)


def test_the_command_comes_with_the_wheel(wheel_python: Path, tmp_path: Path) -> None:
    for command in ([wheel_python.with_name("quorem")], [wheel_python, "-m", "quorem"]):
        assert "reproduce" in run(*command, "--help", folder=tmp_path)

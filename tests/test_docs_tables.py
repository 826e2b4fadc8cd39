"""What the tables of the documents say, the code, the tests and the result files say too."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@lru_cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, methods as ``Class.method``, and assigned names at the top of a Python file."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                names |= {name, *(f"{name}.{f.name}" for f in body if isinstance(f, ast.FunctionDef))}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return frozenset(names)


PAPER = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
CODE = sorted(set(re.findall(r"`([\w/]+\.py):(\w[\w.]*)`", PAPER)))
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAPER)))


@pytest.mark.parametrize(("file", "name"), CODE)
def test_code_named_in_the_paper_table_exists(file: str, name: str) -> None:
    assert name in names_in(ROOT / "src" / "quorem" / file)


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_test_named_in_the_paper_table_exists(file: str, name: str) -> None:
    assert name in names_in(ROOT / "tests" / file)


def test_the_paper_table_names_nothing_else_as_code() -> None:
    """A reference with a typing error in its form would escape the checks above."""
    files = {f"`{reference}`" for reference in re.findall(r"`([^`]*\.py[^`]*)`", PAPER)}
    checked = {f"`{file}:{name}`" for file, name in CODE} | {f"`{file}::{name}`" for file, name in TESTS}
    assert files - checked == {"`test_docs_tables.py`"}


@pytest.mark.parametrize(
    "item",
    [f"equation {i}" for i in (1, 6, 7)]
    + ["equations 2 and 3", "equations 4 and 5", "equations 8 and 9", "equations 10 to 13"]
    + ["algorithm 1", "algorithm 2", "definition 1", "definitions 2 to 4", "theorem 1", "table 1"]
    + [f"figure {i}" for i in range(1, 8)]
    + [f"family {i}" for i in range(1, 5)],
)
def test_the_paper_table_has_every_numbered_item(item: str) -> None:
    assert item in PAPER

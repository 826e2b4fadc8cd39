"""What the tables of the documents say, the code, the tests and the result files say too."""

import ast
import importlib.util
import json
import re
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import quorem

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
    assert files <= checked


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


def readme_schemes() -> list[tuple[int, int, list[str]]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- schemes: (\d+) x (\d+) -->\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[3].splitlines()]
    return [(int(match[1]), int(match[2]), row) for row in rows]


@pytest.mark.parametrize(("n", "d", "row"), readme_schemes(), ids=lambda value: value[0] if type(value) is list else "")
def test_readme_says_what_each_scheme_stores(n: int, d: int, row: list[str]) -> None:
    spec = eval(row[0].strip("`"), vars(quorem.api)).spec(n, d)
    assert row[1:] == [
        ", ".join(f"({p.stride}, {p.size})" for p in spec.partitions),
        " + ".join(f"{rows:,}" for rows, _ in spec.shapes),
        f"{spec.num_parameters:,}",
        f"{spec.compression:,.0f}x",
    ]


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_initialization_shows_the_study() -> None:
    """The document's tables are those that the study's command prints from its results."""
    pytest.importorskip("polars", reason='needs Polars: pip install "quorem[data]"')
    path = ROOT / "benchmarks" / "start_study.py"
    spec = importlib.util.spec_from_file_location("start_study", path)
    study = importlib.util.module_from_spec(spec)
    sys.modules["start_study"] = study  # its dataclasses look themselves up there
    spec.loader.exec_module(study)
    results = json.loads((ROOT / "benchmarks" / "results" / "start_study.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "appendix" / "start_study.md").read_text(encoding="utf-8")
    shown = text.split("<!-- start_study -->\n")[1].split("<!-- /start_study -->")[0]
    assert shown == study.table(results)

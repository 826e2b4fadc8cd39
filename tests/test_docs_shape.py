"""Documents are easy to read: the answer comes first, and lines are short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
WRITTEN = [path for path in DOCUMENTS if "results" not in path.parts]  # docs/results/ is written by commands


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_lines_have_at_most_120_characters(path: Path) -> None:
    """Rows of tables cannot be broken."""
    lines = path.read_text(encoding="utf-8").splitlines()
    free = re.compile(r"\s*\|")
    assert [f"{i}: {line}" for i, line in enumerate(lines, 1) if len(line) > 120 and not free.match(line)] == []


@pytest.mark.parametrize("path", WRITTEN, ids=name)
def test_a_document_starts_with_the_answer(path: Path) -> None:
    """A title, then one paragraph or list of a few lines: no table, no code, no heading before it."""
    title, empty, *rest = path.read_text(encoding="utf-8").splitlines()
    assert title.startswith("# ") and empty == ""
    first = rest[: rest.index("")]
    assert 1 <= len(first) <= 10
    assert not re.match(r"[|#`<!]", first[0]) or re.match(r"`[^`]", first[0])

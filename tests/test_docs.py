"""Every ```python block of README.md and docs/ runs, in order, one namespace per file.

A block that cannot run is marked ```python no-run; the line before says why: <!-- no-run: reason -->
An ```output block shows what the Python block before it prints, and is compared with that.
"""

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]

FENCE = re.compile(r"\s*(?P<ticks>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
REASON = re.compile(r"\s*<!-- no-run: \S.*-->\s*$")
OTHER_SPELLINGS = {"py", "python3", "pycon", "ipython"}
# Packages without which a document cannot run, and the line that installs them.
NEEDS = {
    "docs/serve.md": ("polars", 'pip install "quorem[data]"'),
    "docs/torchrec.md": ("torchrec", "`make install`, or the line in docs/torchrec.md"),
}


class Block(NamedTuple):
    line: int  # of the first statement
    code: str
    printed: str | None = None  # what an ```output block below it shows


def python_blocks(text: str) -> list[Block]:
    """Each block to run.

    Raises:
        ValueError: if a Python block would escape being run without a stated reason, or is never closed; or if an
            ```output block follows none.
    """
    blocks: list[Block] = []
    for line, language, body in _blocks_of(text):
        if language == "python":
            blocks.append(Block(line, dedent(body)))
        elif not blocks or blocks[-1].printed is not None:
            raise ValueError(f"line {line - 1}: an output block must follow a Python block that is run")
        else:
            blocks[-1] = blocks[-1]._replace(printed=dedent(body))
    return blocks


def _blocks_of(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each Python block to run and of each output block."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if not opening:
            at += 1
            continue
        start, ticks = at + 1, opening["ticks"]
        closing = re.compile(rf"\s*{ticks[0]}{{{len(ticks)},}}\s*$")
        end = next((i for i in range(start, len(lines)) if closing.match(lines[i])), None)
        if end is None:
            raise ValueError(f"line {start}: the fence is never closed")
        language, *marks = opening["info"].lower().split() or [""]
        if language in OTHER_SPELLINGS:
            raise ValueError(f"line {start}: '{language}' must be written 'python', so that the block is run")
        if language == "python" and marks == ["no-run"]:
            if at == 0 or not REASON.match(lines[at - 1]):
                raise ValueError(f"line {start}: no-run needs '<!-- no-run: reason -->' on the line before")
        elif language == "python" and marks:
            raise ValueError(f"line {start}: unknown mark {' '.join(marks)!r}; only 'no-run' is understood")
        elif language in ("python", "output"):
            yield start + 1, language, "\n".join((*lines[start:end], ""))
        at = end + 1


def run_document(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of one file; fail with the file and the line of the block that failed."""
    module = ModuleType(f"document_{re.sub(r'[^0-9a-z]', '_', name.lower())}")
    # Classes defined in a block are found by pickle and dataclasses under their module's name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        blocks = list(python_blocks(path.read_text(encoding="utf-8")))
    except ValueError as error:
        pytest.fail(f"{name}: {error}", pytrace=False)
    for line, code, printed in blocks:
        output = StringIO()
        try:
            # Leading newlines make the traceback's line numbers those of the document.
            with redirect_stdout(output):
                exec(compile("\n" * (line - 1) + code, str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            trace = "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))
            pytest.fail(f"{name}:{line}: this block fails\n{trace}", pytrace=False)
        if printed is not None and output.getvalue() != printed:
            pytest.fail(f"{name}:{line}: this block prints\n{output.getvalue()}not\n{printed}", pytrace=False)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_runs(path, tmp_path, monkeypatch):
    name = path.relative_to(ROOT).as_posix()
    if name in NEEDS:
        package, line = NEEDS[name]
        pytest.importorskip(package, reason=f"needs {package}: {line}")
    monkeypatch.chdir(tmp_path)
    run_document(path, name, monkeypatch)


def test_blocks_of_a_document_share_a_namespace(tmp_path, monkeypatch):
    document = tmp_path / "good.md"
    document.write_text(
        "```python\nx = 1\n```\n\n- item\n\n  ```python\n  assert x == 1\n  ```\n\n````\n```python\n1/0\n```\n````\n"
    )
    assert [block.line for block in python_blocks(document.read_text())] == [2, 8]
    run_document(document, "good.md", monkeypatch)


@pytest.mark.parametrize("statement", ["1 / 0", "x = = 1", "raise SystemExit(1)"])
def test_failing_block_is_named_by_file_and_line(statement, tmp_path, monkeypatch):
    document = tmp_path / "bad.md"
    document.write_text(f"# Title\n\n```python\nx = 1\n```\n\n```python\ny = x\n{statement}\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"bad\.md:8: this block fails\n"):
        run_document(document, "bad.md", monkeypatch)


def test_output_is_what_the_block_prints(tmp_path, monkeypatch):
    document = tmp_path / "printed.md"
    document.write_text("```python\nprint(1 + 1)\n```\n\n```output\n2\n```\n")
    run_document(document, "printed.md", monkeypatch)
    document.write_text("```python\nprint(1 + 2)\n```\n\n```output\n2\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"printed\.md:2: this block prints\n3\nnot\n2\n"):
        run_document(document, "printed.md", monkeypatch)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python no-run\n1/0\n```\n", "line 1: no-run needs"),
        ("\n<!-- no-run: -->\n```python no-run\n1/0\n```\n", "line 3: no-run needs"),
        ("```python skip\n1/0\n```\n", "line 1: unknown mark 'skip'"),
        ("```pycon\n>>> 1/0\n```\n", "line 1: 'pycon' must be written 'python'"),
        ("text\n```python\n1/0\n", "line 2: the fence is never closed"),
        ("```output\n1\n```\n", "line 1: an output block must follow"),
    ],
)
def test_block_may_not_escape_unexplained(text, message):
    with pytest.raises(ValueError, match=message):
        list(python_blocks(text))


def test_no_run_with_a_reason_is_left_out():
    text = "<!-- no-run: needs two machines -->\n```python no-run\n1/0\n```\n"
    assert list(python_blocks(text)) == []

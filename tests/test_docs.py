"""Every ```python block of README.md and docs/ runs, in order, one namespace per file.

A block that cannot run is marked ```python no-run. An ```output block shows what the block before it prints.
"""

import re
import sys
import traceback
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(python|output)\n(.*?)^ *```$", re.M | re.S)
# Packages without which a document cannot run, and the line that installs them.
NEEDS = {
    "docs/serve.md": ("polars", 'pip install "quorem[data]"'),
    "docs/torchrec.md": ("torchrec", "`make install`, or the line in docs/torchrec.md"),
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = path.relative_to(ROOT).as_posix()
    if name in NEEDS:
        package, line = NEEDS[name]
        pytest.importorskip(package, reason=f"needs {package}: {line}")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"document_{re.sub(r'[^0-9a-z]', '_', name.lower())}")
    # Classes defined in a block are found by pickle and dataclasses under their module's name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = path.read_text(encoding="utf-8")
    printed = ""
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(2)) + 1
        if block[1] == "output":
            assert printed == dedent(block[2]), f"{name}:{line}: the block above prints this"
            continue
        output = StringIO()
        try:
            # Leading newlines make the traceback's line numbers those of the document.
            with redirect_stdout(output):
                exec(compile("\n" * (line - 1) + dedent(block[2]), str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            trace = "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))
            pytest.fail(f"{name}:{line}: this block fails\n{trace}", pytrace=False)
        printed = output.getvalue()


def test_every_python_block_is_found() -> None:
    """Another spelling of the language would escape being run."""
    for path in DOCUMENTS:
        fences = re.findall(r"^ *(?:```|~~~)(\w*.*)$", path.read_text(encoding="utf-8"), re.M)
        languages = {fence for fence in fences if re.match(r"py|ipython", fence.lower())}
        assert languages <= {"python", "python no-run"}, path

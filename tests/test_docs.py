"""Every ```python block of README.md and docs/ runs, in order, one namespace per file; figures, names and links hold.

A block that cannot run is marked ```python no-run. An ```output block shows what the block before it prints.
"""

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import torch

import quorem
from quorem import QR, EmbeddingCollection, Table, optim
from quorem.data.shape import NUM_ROWS, day_split
from quorem.ops import cpu

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


# Up to Python 3.11, sys.setprofile sees calls of what Numba has compiled.
COMPILED = () if sys.version_info < (3, 12) else ("lookup_kernel", "sum_slots", "adagrad")
DESIGN = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
SOURCE = Path(quorem.__file__).parent


def hops(name: str) -> list[tuple[str, str]]:
    """File and function of each hop of a table of the document."""
    (table,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", DESIGN, re.S)
    return re.findall(r"`([\w/]+\.py)` `([\w.<>]+)`", table)


def calls(function: Callable[[], object]) -> list[tuple[str, str]]:
    """File and function of every call of quorem's, in order."""
    seen = []

    def note(frame, event, argument):  # type: ignore[no-untyped-def]
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            seen.append((file.relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif(not cpu.kernels(), reason="the page follows the kernels of Numba: pip install quorem[cpu]")
def test_a_batch_takes_the_hops_of_the_page() -> None:
    collection = EmbeddingCollection([Table("a", 1000, 8, QR(4)), Table("b", 50, 8, QR(4, operation="add"))])
    optim.apply_in_backward(collection, optim.Adagrad, lr=0.1)
    ids = torch.randint(0, 50, (8, 2))
    collection(ids).sum().backward()  # compiles
    out = []
    forward = calls(lambda: out.append(collection(ids)))
    backward = calls(lambda: out[0].sum().backward())
    for name, made in (("forward", forward), ("backward", backward)):
        rest = iter(made)
        for hop in hops(name):
            assert hop[1] in COMPILED or hop in rest, (name, hop, made)
        assert len(hops(name)) == {"forward": 7, "backward": 9}[name]
        (files,) = re.findall(rf"(\d+) files {name}", DESIGN)
        assert len({file for file, _ in made}) <= int(files), (name, made)


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]

# Not by sys.path: other files of benchmarks/ have the names of folders of tests/.
spec = importlib.util.spec_from_file_location("result_tables", ROOT / "benchmarks" / "result_tables.py")
result_tables = sys.modules["result_tables"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(result_tables)
results, medians = result_tables.results, result_tables.medians


@pytest.mark.parametrize("document", result_tables.DOCUMENTS)
def test_the_document_shows_the_results(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If not: python benchmarks/result_tables.py"""
    monkeypatch.chdir(ROOT)
    assert (ROOT / document).read_text(encoding="utf-8") == result_tables.with_tables(document)


def prose() -> list[tuple[str, str]]:
    """Document, and words with figures that it must hold."""
    serving, hunts = results("serving"), {name: results(f"hunt/{name}") for name in ("damage", "kills", "steps")}
    rates, guarded = serving["predict"]["rows_per_second"], [case["ratio"] for case in serving["onnx"]]
    full, tuned, *_ = results("fine_tune")["rows"]
    rows = medians("h200_full")
    composed = [
        us / rows[mode, dim, batch, provider, "Full()", graph]
        for (mode, dim, batch, provider, scheme, graph), us in rows.items()
        if (mode, provider, scheme) == ("forward", "fused", "QR(4)")
    ]
    steps = medians("h200")
    (job,) = (r for r in results("prepare")["results"] if r["rows"] == NUM_ROWS and "quorem" in r["work"])
    return [
        ("docs/data.md", f"takes {job['wall_s']:.0f} s on two cores and {job['peak_gb']:.0f} GB of memory"),
        ("docs/data.md", f"({day_split(NUM_ROWS)['train'][1]:,})"),
        ("docs/benchmarks.md", f"take {min(composed):.2f} to {max(composed):.2f} times as long"),
        ("docs/kernels.md", f"four in {steps['step', 16, 128, 'fused', 'QR(4)', 1]:.1f} us"),
        ("docs/compress.md", f"{tuned['fitted at 100%']['mean']:.4f} against {tuned['scratch at 100%']['mean']:.4f}"),
        ("docs/compress.md", f"full tables {full['at 100%']['mean']:.4f}"),
        ("docs/serve.md", f"scores {rates['predict int8']:,} rows a second"),
        ("docs/serve.md", f"would allow {rates['floor']:,}."),
        ("docs/serve.md", f"{min(guarded):.1f} to {max(guarded):.1f} times as long"),
        ("docs/reliability.md", f"{hunts['damage']['files']:,} damaged files"),
        ("docs/reliability.md", f"{hunts['kills']['kills']} processes killed"),
        ("docs/reliability.md", f"{hunts['steps']['steps']:,} steps of drawn optimizers"),
    ]


@pytest.mark.parametrize(("document", "words"), prose())
def test_prose_has_the_figures_of_the_files(document: str, words: str) -> None:
    assert words in " ".join((ROOT / document).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_lines_are_short(path: Path) -> None:
    """Rows of tables cannot be broken; docs/results/ is written by commands."""
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    long = [line for line in text.splitlines() if len(line) > 120 and not re.match(r"\s*\|", line)]
    assert long == [] or "results" in path.relative_to(ROOT).parts


PAPER = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(::?)(\w[\w.]*)`", PAPER)))  # file:code, file::test


@pytest.mark.parametrize(("file", "colons", "name"), NAMED)
def test_code_and_tests_named_in_the_paper_table_exist(file: str, colons: str, name: str) -> None:
    text = (ROOT / ("tests" if colons == "::" else "src/quorem") / file).read_text(encoding="utf-8")
    outer, _, method = name.partition(".")
    (defined,) = re.findall(rf"^(?:def {outer}\(|class {outer}\b|{outer}(?::.*)? = )(?:.*\n(?!\S))*", text, re.M)
    assert f"    def {method}(" in defined or not method


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

"""What the tables of the documents say, the code, the tests and the result files say too; links lead somewhere."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import quorem
from quorem.data.shape import NUM_ROWS, day_split

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]

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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
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


def test_the_paper_table_has_every_numbered_item() -> None:
    items = ["equation 1,", "equations 2 and 3", "equations 4 and 5", "equation 6", "equation 7", "equations 8 and 9"]
    items += ["equations 10 to 13", "algorithm 1", "algorithm 2", "definition 1", "definitions 2 to 4", "theorem 1"]
    items += ["table 1", *(f"figure {i}" for i in range(1, 8)), *(f"family {i}" for i in range(1, 5))]
    assert [item for item in items if item not in PAPER] == []


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

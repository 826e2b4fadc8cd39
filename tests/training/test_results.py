"""The tables of docs/training.md are those of the results beside the benchmarks."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def results(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def markdown(*rows: tuple[str, ...]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def train_cpu() -> str:
    head = ("step", "provider", "threads", "rows a second", "times the loop")
    rows = [
        (r["mode"], r["provider"], str(r["threads"]), f"{r['rows_per_second']:,}", f"{r['times_the_loop']}x")
        for r in results("train_cpu")
    ]
    return markdown(head, *rows)


def criteo_sample() -> str:
    found = {(r["scheme"], r["optimizer"]): r for r in results("criteo_sample")}
    rows = []
    for scheme in dict.fromkeys(scheme for scheme, _ in found):
        own = [found[scheme, optimizer] for optimizer in ("adagrad", "amsgrad")]
        losses = (f"{r['test_log_loss']:.4f} ± {r['deviation']:.4f}" for r in own)
        rows.append((scheme, f"{own[0]['embedding_parameters']:,}", *losses))
    return markdown(("tables", "parameters", "Adagrad", "AMSGrad"), *rows)


@pytest.mark.parametrize("table", [train_cpu, criteo_sample], ids=lambda table: table.__name__)
def test_document_shows_the_results(table):
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    name = table.__name__
    assert text.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0] == table()

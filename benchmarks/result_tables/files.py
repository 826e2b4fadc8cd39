"""Read result files, and write numbers and Markdown tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {"dlrm": "DLRM", "dcn": "DCN", "adagrad": "Adagrad", "amsgrad": "AMSGrad", "QR(4)": "`QR(4)`", "full": "full"}


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machine(result: dict[str, Any]) -> str:
    """The machine, and whether other work shared it, as a line above a table."""
    load = result["load_before"]
    others = "otherwise idle" if load < 0.5 else f"shared with other work (load {load:.1f})"
    return f"{result['cores']} cores, {others}; torch {result['versions']['torch']}, commit {result['commit']}.\n\n"


def markdown(*rows: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"

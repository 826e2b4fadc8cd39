"""The command line of a benchmark, and the file that it writes."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from quorem.files.provenance import commit, versions


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command that is described by its module, with the option ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    return parser


def made_by(*packages: str) -> dict[str, Any]:
    """The machine with its load, versions and the commit; call it before measuring."""
    load = round(os.getloadavg()[0], 2)
    return {"cores": os.cpu_count(), "load_before": load, "versions": versions(*packages), "commit": commit()}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON: an entry a line, and lists with a line for each of their items."""
    lines = []
    for name, value in result.items():
        items = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        lines.append(f" {json.dumps(name)}: " + (f"[\n  {items}\n ]" if items else json.dumps(value)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

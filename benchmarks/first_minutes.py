"""How long a newcomer waits: install, help, demo, first vectors, first table of their own.

    python benchmarks/first_minutes.py --out benchmarks/results/first_minutes.json

Runs the commands of README.md in a new environment, with the caches of compiled kernels empty, and writes the seconds
of each. What pip downloads depends on the network: ``install`` is with the packages of constraints.txt within reach.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result_file

ROOT = Path(__file__).parents[1]
VECTORS = """
import torch, quorem
table = quorem.Embedding(1_000_000, 16, quorem.QR(4))
table(torch.randint(0, 1_000_000, (128,))).sum().backward()
"""


def timed(command: list[str | Path], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds until the command's first line, and until it ended.

    Raises:
        SystemExit: if it failed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = process.stdout.readline()
    seen = time.perf_counter() - start
    output = first + process.stdout.read()
    if process.wait():
        raise SystemExit(f"{command}: {output}")
    line = round(seen, 2) if first else None
    return {"first_line_s": line, "seconds": round(time.perf_counter() - start, 2)}


def clicks(path: Path, rows: int = 10_000) -> None:
    """A small log of one's own: text, numbers and a label."""
    draw = random.Random(0)
    lines = ["click,user,item,price"]
    for _ in range(rows):
        user, item = int(2000 * draw.random() ** 3), int(500 * draw.random() ** 3)
        lines.append(f"{int(draw.random() < 0.2 + 0.3 * (user % 2))},u{user},i{item},{draw.random() * 100:.2f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    """Every step, in order."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["NUMBA_CACHE_DIR"] = str(folder / "numba")
    python = folder / "venv" / "bin" / "python"
    extras = f"{ROOT}[cpu,cli,report,data,export]"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", extras]
    quorem = [python, "-m", "quorem"]
    timed([sys.executable, "-m", "venv", folder / "venv"], folder, environment)
    clicks(folder / "clicks.csv")
    tail = [f"{line}" for line in ("click,user,item,price", "0,u1,i2,3.5", "0,u7,i9,1.0")]
    (folder / "new.csv").write_text("\n".join(tail) + "\n", encoding="utf-8")
    commands: dict[str, list[str | Path]] = {
        "install": install,
        "help": [*quorem, "--help"],
        "first vectors": [python, "-c", VECTORS],
        "first vectors, again": [python, "-c", VECTORS],
        "demo": [*quorem, "demo", "--out", "demo"],
        "prepare": [*quorem, "prepare", "table", "clicks.csv", "data", "--label", "click", "--vocabulary", "train"],
        "train": [*quorem, "train", "--data", "data", "--out", "run", "--scheme", "mult", "--collisions", "4"],
        "predict": [*quorem, "predict", "run", "new.csv", "--out", "scores.csv"],
    }
    return {name: timed(command, folder, environment) for name, command in commands.items()}


def main() -> None:
    """Read the command line, measure, write."""
    parser = result_file.parser_of(__doc__)
    arguments = parser.parse_args()
    head = result_file.made_by()
    with tempfile.TemporaryDirectory() as folder:
        result_file.write(arguments.out, head | {"steps": steps(Path(folder))})


if __name__ == "__main__":
    main()

"""``benchmarks/against.py``: two source trees in turns, on the same ids."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "against.py"
SMALL = ["--scale", "0.00002", "--batch", "8", "--dim", "4", "--rounds", "2", "--seconds", "0.001", "--threads", "1"]


def against(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_tree_against_itself(tmp_path):
    modes = ["--mode", "forward", "--mode", "step"]
    done = against(ROOT, ROOT, "--out", tmp_path / "x.json", *SMALL, *modes, "--limit", 99)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["before"] == found["after"] != "unknown"
    settings = [(row["mode"], row["batch"], row["dim"], row["graph"]) for row in found["rows"]]
    assert settings == [("forward", 8, 4, 0), ("step", 8, 4, 0)]
    for row in found["rows"]:
        assert row["same_bits"] and row["before_us"] > 0 and row["ratio_q20"] <= row["ratio"] <= row["ratio_q80"]
    assert "0 of 2 ratios are above 99" in done.stdout


SLOWER = """
import time

forward = EmbeddingCollection.forward


def slower(self, ids):
    time.sleep(0.02)
    return forward(self, ids) + 1


EmbeddingCollection.forward = slower
"""


def test_a_tree_of_other_numbers_is_seen_and_a_slower_one_fails(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")  # with the kernels that were compiled
    with (tmp_path / "src" / "quorem" / "api.py").open("a") as file:
        file.write(SLOWER)
    done = against(ROOT, tmp_path, "--out", tmp_path / "x.json", *SMALL, "--mode", "forward")
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    (row,) = found["rows"]
    assert not row["same_bits"] and row["ratio"] > 2 and found["after"] == "unknown"


def test_every_script_of_the_folder_finds_what_it_imports():
    """Few of them run in the tests."""
    names = ", ".join(sorted(path.stem for path in SCRIPT.parent.glob("*.py")))
    command = [sys.executable, "-c", f"import {names}"]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

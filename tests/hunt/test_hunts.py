"""The hunts in a short form; ``make hunt`` runs the long one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hunt import damage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "hunt"


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_damaged_files_are_told_or_harmless():
    found = damage.hunt(39, seed=7)
    assert found["bad"] == []
    assert sum(found["outcomes"].values()) == 39 and found["outcomes"]["told"] > 15


def test_the_long_forms_found_nothing():
    """In the files that docs/reliability.md shows."""
    for name in ("damage", "kills"):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        assert found["bad"] == [], name
    assert json.loads((RESULTS / "damage.json").read_text())["files"] >= 1000
    assert json.loads((RESULTS / "kills.json").read_text())["kills"] >= 200


def fail(error):
    def read(folder):
        raise error(str(folder) if error is ValueError else "somewhere")

    return read


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda folder: 1, "same"),
        (lambda folder: 2, "wrong"),
        (fail(ValueError), "told"),
        (fail(OSError), "unnamed"),
        (fail(KeyError), "traceback"),
        (lambda folder: time.sleep(60), "hang"),
    ],
)
def test_the_hunt_knows_what_it_is_looking_for(read, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(damage, "SECONDS", 0.2)
    target = damage.Target("made up", tmp_path, "*", read)
    assert damage.outcome(target, "flip", tmp_path, 1)[0] == outcome


def test_killed_at_random_nothing_is_lost_or_wrong():
    program = Path(__file__).with_name("kills.py")
    command = [sys.executable, program, "--kills", "5", "--jobs", "prepare"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["bad"] == [] and found["jobs"]["prepare"]["kills"] == 5

"""The hunts in a short form; ``make hunt`` runs the long one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hunt import budgets, damage, damages, lookups, steps

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "hunt"


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_damaged_files_are_told_or_harmless():
    counts = damage.hunt(45, seed=7)
    assert counts["bad"] == []
    assert sum(counts["outcomes"].values()) == 45 and counts["outcomes"]["told"] > 15


def test_the_long_forms_found_nothing():
    """In the files of docs/reliability.md and its appendix."""
    for name in ("damage", "kills", "lookups", "steps"):
        counts = json.loads((RESULTS / f"{name}.json").read_text())
        assert counts["bad"] == [], name
    assert json.loads((RESULTS / "damage.json").read_text())["files"] >= 1000
    assert json.loads((RESULTS / "kills.json").read_text())["kills"] >= 200
    assert json.loads((RESULTS / "lookups.json").read_text())["lookups"] >= 10**6
    assert json.loads((RESULTS / "steps.json").read_text())["steps"] >= 10**5


def test_drawn_lookups_are_torchs():
    counts = lookups.hunt(10_000, seed=7)
    assert counts["bad"] == []
    assert counts["lookups"] >= 10_000 and counts["refused"] == counts["modules"]


def test_budgets_of_drawn_models_hold():
    counts = budgets.hunt(40, seed=7)
    assert counts["bad"] == [] and counts["outcomes"]["compressed"] >= 10


def test_drawn_steps_are_torchs():
    counts = steps.hunt(300, seed=7)
    assert counts["bad"] == [] and sum(counts["by_rule"].values()) == counts["steps"] == 300


def test_the_hunts_for_wrong_numbers_would_see_one():
    assert lookups._difference(lookups.torch.ones(3), lookups.torch.tensor([1.0, 1.0, 1.1]), 1e-5) == "9.09e-02 off"
    run = steps.Run(steps.random.Random(3), steps.Counter())
    run.step()
    with steps.torch.no_grad():
        run.twin.stored[0] += 1e-6
    with pytest.raises(AssertionError, match="off"):
        run.compare(run.module.stored, run.twin.stored)


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
        (lambda folder: bytes(2**40), "traceback"),  # more memory than it may take
    ],
)
def test_the_hunt_knows_what_it_is_looking_for(read, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(damage, "SECONDS", 0.2)
    target = damage.Target("made up", tmp_path, "*", read)
    assert damage.outcome(target, "flip", tmp_path, 1)[0] == outcome


def test_the_hunt_would_see_code_that_runs():
    data = damages.pickled(b"", damages.random.Random(1))
    assert not damages.EXECUTED.exists()
    damages.pickle.loads(data)
    damages.EXECUTED.rmdir()  # it was made


def test_killed_at_random_nothing_is_lost_or_wrong():
    program = Path(__file__).with_name("kills.py")
    command = [sys.executable, program, "--kills", "5", "--jobs", "prepare"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(run.stdout)
    assert counts["bad"] == [] and counts["jobs"]["prepare"]["kills"] == 5

"""The hunts in a short form; ``make hunt`` runs the long one."""

import json
import time

import pytest
from hunt import budgets, damage, damages, steps
from processes import python


def test_damaged_files_are_told_or_harmless():
    counts = damage.hunt(45, seed=7)
    assert counts["bad"] == []
    assert sum(counts["outcomes"].values()) == 45 and counts["outcomes"]["told"] > 15


def test_budgets_of_drawn_models_hold():
    counts = budgets.hunt(40, seed=7)
    assert counts["bad"] == [] and counts["outcomes"]["compressed"] >= 10


def test_drawn_steps_are_torchs():
    counts = steps.hunt(300, seed=7)
    assert counts["bad"] == [] and sum(counts["by_rule"].values()) == 300


def test_the_hunt_for_wrong_numbers_would_see_one():
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
    command = ("-m", "hunt.kills", "--kills", "16", "--jobs", "prepare", "train")
    counts = json.loads(python(*command))
    assert counts["bad"] == [] and [job["kills"] for job in counts["jobs"].values()] == [8, 8]

"""A run's folder: resumed bit for bit after any interruption, and refused where it would mix runs or is damaged.

``tests/hunt/kills.py`` kills runs.
"""

import os

import pytest
from runs_of_training import StopAt, assert_same_model, lines, small_log, small_run

from quorem.training import loop, run
from quorem.training.loop import train
from quorem.training.model import data_identity

OPTIMIZERS = ["adagrad", "amsgrad"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 29, 30, 53])
def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(log, tmp_path, optimizer, at):
    """Also where rows owe steps to AMSGrad when the checkpoint is taken, and right after a validation (step 30)."""
    config = small_run(log, optimizer=optimizer, validate_every=30)
    whole = train(config, log, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, log, tmp_path / "cut", stop=StopAt(at))
    assert [step for step, _ in run.saved_checkpoints(tmp_path / "cut" / "checkpoints")] == [at]
    resumed = train(config, log, tmp_path / "cut")
    assert_same_model(tmp_path / "whole", tmp_path / "cut")
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")
    assert (resumed["test"], resumed["validation"]) == (whole["test"], whole["validation"])


def test_a_damaged_checkpoint_falls_back_to_the_one_before(log, tmp_path):
    config = small_run(log)
    train(config, log, tmp_path / "whole")
    for steps in (20, 5):
        with pytest.raises(KeyboardInterrupt):
            train(config, log, tmp_path / "cut", stop=StopAt(steps))
    (last, path), (before, _) = run.saved_checkpoints(tmp_path / "cut" / "checkpoints")
    assert (last, before) == (25, 20)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="is damaged, or not a quorem-checkpoint file"):
        train(config, log, tmp_path / "cut")
    assert_same_model(tmp_path / "whole", tmp_path / "cut")


def test_damaged_lines_of_metrics_are_left_out_with_a_word_and_those_after_them_stay(log, tmp_path):
    config, path = small_run(log, validate_every=10), tmp_path / "cut" / "metrics.jsonl"
    train(config, log, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, log, tmp_path / "cut", stop=StopAt(35))
    first, second, third = path.read_text().splitlines(keepends=True)
    digit = second.rindex("0.")
    second = second[: digit + 2] + str((int(second[digit + 2]) + 1) % 10) + second[digit + 3 :]
    path.write_text(first + second + third + '{"step": 3')  # cut off: it was being written
    with pytest.warns(UserWarning, match=r"metrics\.jsonl is damaged: 1 of its 3 lines up to step 35 are lost"):
        train(config, log, tmp_path / "cut")
    whole = lines(tmp_path / "whole")
    assert lines(tmp_path / "cut") == [whole[0], *whole[2:]]
    for line in (b"\xff\n", b'{"loss": 1}\n', b"3\n", b"\n"):
        path.write_bytes(line + first.encode())
        assert run.read_metrics(path) == ([whole[0]], [1], False)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("run.json", lambda text: text[:-9], r"run\.json is damaged: "),
        ("run.json", lambda text: text.replace('"seed": 0', '"seed": "0"'), r"run\.json is damaged: seed \('0'\)"),
        ("result.json", lambda text: text.replace('"auc": 0.', '"auc": 1.', 1), r"result\.json is damaged: it differs"),
        ("result.json", lambda text: "{}", r"result\.json is damaged: format \(None\) must be"),
    ],
)
def test_a_damaged_file_of_a_finished_run_is_named(log, tmp_path, file, damage, message):
    config = small_run(log, max_rows=64)
    train(config, log, tmp_path)
    (tmp_path / file).write_text(damage((tmp_path / file).read_text()))
    with pytest.raises(ValueError, match=message):
        train(config, log, tmp_path)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(log, tmp_path):
    config = small_run(log, max_rows=64)
    train(config, log, tmp_path)
    for name in ("result.json", "run.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} is a pipe and must be a file"):
            train(config, log, tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(text)


def test_another_configuration_is_refused(log, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(small_run(log), log, tmp_path / "run", stop=StopAt(2))
    with pytest.raises(
        ValueError, match=r"holds another run: lr is None there and 0\.1 here, seed is 0 there and 3 here"
    ):
        train(small_run(log, seed=3, lr=0.1), log, tmp_path / "run")


def test_a_checkpoint_of_another_run_is_refused(log, tmp_path):
    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            train(small_run(log, seed=seed), log, tmp_path / str(seed), stop=StopAt(2 + seed))
    ((_, path),) = run.saved_checkpoints(tmp_path / "1" / "checkpoints")
    os.rename(path, tmp_path / "0" / "checkpoints" / path.name)
    with pytest.raises(ValueError, match="has a checkpoint of another run: seed is 1 there and 0 here"):
        train(small_run(log), log, tmp_path / "0")


def test_other_data_are_refused(log, tmp_path):
    other = small_log(tmp_path / "other", seed=1)
    assert data_identity(other) != data_identity(log)
    with pytest.raises(ValueError, match=rf"config\.data \('{data_identity(log)}'\) must be the identity of"):
        train(small_run(log), other)


def test_the_data_have_one_name_wherever_they_lie(log, tmp_path):
    assert data_identity(small_log(tmp_path / "again")) == data_identity(log)


def test_a_folder_of_something_else_is_refused(log, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is not the folder of a run: it has notes\.txt"):
        train(small_run(log), log, tmp_path)


def test_a_folder_is_trained_in_by_one_process(log, tmp_path):
    with loop.RunFolder(tmp_path / "run", small_run(log)), pytest.raises(RuntimeError, match="another process"):
        train(small_run(log), log, tmp_path / "run")
    train(small_run(log, max_rows=64), log, tmp_path / "later")


def test_a_finished_run_is_not_trained_again(log, tmp_path):
    config = small_run(log)
    first = train(config, log, tmp_path / "run")
    assert train(config, log, tmp_path / "run", stop=StopAt(0)) == first

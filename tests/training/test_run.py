"""A run's folder: resumed bit for bit after any interruption, and refused where it would mix runs or is damaged.

Checkpoints are whole or absent, checked, and kept in number; ``test_damaged_files`` damages the format everywhere, and
``tests/hunt/kills.py`` kills runs.
"""

import os
from pathlib import Path

import pytest
import torch
from limits import small_disk
from runs_of_training import StopAt, assert_same_model, lines, small_log, small_run
from safetensors.torch import load_file, save_file

from quorem.files import tensors as tensor_file
from quorem.paper.schemes import QR, Full
from quorem.training import run
from quorem.training.loop import train
from quorem.training.model import data_identity
from quorem.training.run import difference

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


def test_another_configuration_is_refused(log, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(small_run(log), log, tmp_path / "run", stop=StopAt(2))
    both = r"holds another run: lr is None there and 0\.1 here, seed is 0 there and 3 here"
    with pytest.raises(ValueError, match=both):
        train(small_run(log, seed=3, lr=0.1), log, tmp_path / "run")
    plans = [small_run(log, plan=dict.fromkeys("abcdefg", each)) for each in (Full(), QR(4))]
    assert difference(*plans) == "the plan differs in tables a, b, c, d, e and 2 more"
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file and must be a folder, or not exist yet"):
        train(small_run(log), log, tmp_path / "file")


def test_a_checkpoint_of_another_run_is_refused(log, tmp_path):
    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            train(small_run(log, seed=seed), log, tmp_path / str(seed), stop=StopAt(2 + seed))
    ((_, path),) = run.saved_checkpoints(tmp_path / "1" / "checkpoints")
    os.rename(path, tmp_path / "0" / "checkpoints" / path.name)
    with pytest.raises(ValueError, match="has a checkpoint of another run: seed is 1 there and 0 here"):
        train(small_run(log), log, tmp_path / "0")


def test_other_data_are_refused(log, tmp_path):
    """Which have one name wherever they lie."""
    assert data_identity(small_log(tmp_path / "again")) == data_identity(log)
    other = small_log(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=rf"config\.data \('{data_identity(log)}'\) must be the identity of"):
        train(small_run(log), other)


def test_a_folder_of_something_else_is_refused(log, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is not the folder of a run: it has notes\.txt"):
        train(small_run(log), log, tmp_path)


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "empty": torch.empty(0, 4)}


def after(step: int, **values: object) -> run.Progress:
    return run.Progress(config="{}", step=step, **values)


def test_the_last_ones_are_kept_in_order_of_steps(tmp_path):
    for step in (9, 10, 100, 1000):
        run.save_checkpoint(tmp_path, after(step), TENSORS)
    assert [step for step, _ in run.saved_checkpoints(tmp_path)] == [1000, 100]
    assert not list(tmp_path.glob("*.tmp"))


def test_what_was_saved_is_loaded_also_by_other_readers_of_the_format(tmp_path):
    progress = after(12, seconds=1.5, loss=0.25)
    every = TENSORS | {f"{dtype}": torch.ones(3, 5, dtype=dtype) for dtype in tensor_file.NAME_OF_DTYPE}
    path = run.save_checkpoint(tmp_path, progress, every)
    read, tensors = run.load_checkpoint(path)
    assert read == progress
    for loaded in (tensors, load_file(path)):
        assert loaded.keys() == every.keys()
        for name, tensor in every.items():
            assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype, name


DAMAGES = {
    "cut": lambda data: data[:-5],
    "flipped": lambda data: data.replace(TENSORS["a"].numpy().tobytes(), TENSORS["a"].neg().numpy().tobytes()),
    "dtype": lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1),
    "shape": lambda data: data.replace(b'"shape":[2,3]', b'"shape":[3,2]', 1),
    "header": lambda data: data.replace(b"step", b"stop", 1),
}


@pytest.mark.parametrize("name", ["other", "quorem-checkpoint-1"])  # the second was an earlier version's
def test_a_file_of_another_format_is_told(name, tmp_path):
    save_file(TENSORS, tmp_path / "step-1.safetensors", {"format": name, "step": "1", "meta": "{}"})
    with pytest.raises(ValueError, match=f"it says '{name}' and must say 'quorem-checkpoint'"):
        run.load_checkpoint(tmp_path / "step-1.safetensors")


@pytest.mark.parametrize("how", DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(tmp_path, how):
    before, last = (run.save_checkpoint(tmp_path, after(step), TENSORS) for step in (1, 2))
    last.write_bytes(DAMAGES[how](last.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged.*; the one before it is taken"):
        assert run.latest_checkpoint(tmp_path)[0].step == 1
    before.write_bytes(DAMAGES[how](before.read_bytes()))
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no checkpoint is whole"):
        run.latest_checkpoint(tmp_path)


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as folder:
        run.save_checkpoint(folder, after(1), TENSORS)
        with pytest.raises(OSError, match=r"disk full: 4,000,\d{3} bytes are needed and .* are free"):
            run.save_checkpoint(folder, after(2), {"large": torch.ones(1_000_000)})
        assert run.latest_checkpoint(folder)[0].step == 1
        assert [path.name for path in folder.iterdir()] == ["step-000000000001.safetensors"]


@pytest.mark.parametrize("values", [{}, {"config": "{}", "step": None}, {"config": "{}", "seconds": "long"}])
def test_values_that_a_checkpoint_must_have(values: dict, tmp_path: Path) -> None:
    """As a file that was edited by hand lacks them, its checksums made to fit."""
    path = tmp_path / "step-1.safetensors"
    tensor_file.write_tensors(path, run.CHECKPOINT_KIND, TENSORS, values)
    with pytest.raises(ValueError, match=r"step-1.safetensors is damaged: .* (is missing|must be)"):
        run.load_checkpoint(path)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("model.", "dtype"), ("model.", "shape"), ("model.", "missing"), ("dense.", "dtype"), ("dense.", "shape")],
)
def test_a_run_with_a_checkpoint_of_other_tensors(part: str, kind: str, tmp_path: Path) -> None:
    log = small_log(tmp_path / "log", 600)
    with pytest.raises(KeyboardInterrupt):
        train(small_run(log), log, tmp_path / "run", stop=StopAt(3))
    (saved,) = run.saved_checkpoints(tmp_path / "run" / "checkpoints")
    progress, whole = run.load_checkpoint(saved[1])
    name, tensor = next((n, t) for n, t in whole.items() if t.dim() == 2 and n.startswith(part))
    changed = {"dtype": {name: tensor.view(torch.int32)}, "shape": {name: tensor[1:]}, "missing": {}}[kind]
    tensors = {other: each for other, each in whole.items() if other != name} | changed
    run.save_checkpoint(saved[1].parent, progress, tensors)
    message = "missing in the checkpoint" if kind == "missing" else r"torch\.\w+ \[.*\] in the checkpoint and must be"
    with pytest.raises(ValueError, match=f"{name} is {message}"):
        train(small_run(log), log, tmp_path / "run")

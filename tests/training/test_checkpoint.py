"""Checkpoints: whole or absent, checked, and kept in number; ``test_damaged_files`` damages the format everywhere."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from runs_of_training import StopAt, small_log, small_run
from safetensors.torch import load_file, save_file

from quorem.files import tensors as tensor_file
from quorem.training import run
from quorem.training.loop import train

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "empty": torch.empty(0, 4)}


def after(step: int, **values: object) -> run.Progress:
    return run.Progress(config="{}", step=step, **values)


def test_what_was_saved_is_loaded(tmp_path):
    progress = after(12, seconds=1.5, loss=0.25)
    read, tensors = run.load_checkpoint(run.save_checkpoint(tmp_path, progress, TENSORS))
    assert read == progress
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype, name


def test_the_last_ones_are_kept_in_order_of_steps(tmp_path):
    for step in (9, 10, 100, 1000):
        run.save_checkpoint(tmp_path, after(step), TENSORS)
    assert [step for step, _ in run.saved_checkpoints(tmp_path)] == [1000, 100]
    assert not list(tmp_path.glob("*.tmp"))


def test_other_readers_of_the_format_read_it(tmp_path):
    every = {f"{dtype}": torch.ones(3, 5, dtype=dtype) for dtype in tensor_file.NAME_OF_DTYPE}
    path = run.save_checkpoint(tmp_path, after(1), every | TENSORS)
    read = load_file(path)
    assert read.keys() == every.keys() | TENSORS.keys()
    for name, tensor in (every | TENSORS).items():
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype, name


def flip(data: bytes) -> bytes:
    start = data.rindex(TENSORS["a"].numpy().tobytes())
    return data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :]


DAMAGES = {
    "cut": lambda data: data[:-5],
    "empty": lambda data: b"",
    "flipped": flip,
    "text": lambda data: b"not a checkpoint",
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


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert run.latest_checkpoint(tmp_path / "absent") is None


def test_a_full_disk_keeps_the_earlier_checkpoint():
    folder = Path(tempfile.mkdtemp())
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode:
            pytest.skip(f"needs the right to mount a tmpfs, run it as root: {mounted.stderr.strip()}")
        run.save_checkpoint(folder, after(1), TENSORS)
        with pytest.raises(OSError, match=r"disk full: 4,000,\d{3} bytes are needed and .* are free"):
            run.save_checkpoint(folder, after(2), {"large": torch.ones(1_000_000)})
        assert run.latest_checkpoint(folder)[0].step == 1
        assert [path.name for path in folder.iterdir()] == ["step-000000000001.safetensors"]
    finally:
        subprocess.run(["umount", folder], capture_output=True)
        shutil.rmtree(folder)


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

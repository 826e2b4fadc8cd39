"""Training on a GPU: captured steps, rows read ahead, runs side by side, resumed bit for bit in deterministic mode."""

import pytest
import torch
from runs_of_training import StopAt, assert_same_model, guess, small_run
from safetensors.torch import load_file

from quorem.training import feed, loop, trial
from quorem.training.loop import train, train_many

pytestmark = pytest.mark.gpu
OPTIMIZERS = ["adagrad", "amsgrad"]


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_captured_steps_train_as_plain_ones(log, tmp_path, optimizer, monkeypatch, deterministic):
    config = small_run(log, optimizer=optimizer, epochs=2, validate_every=20)
    train(config, log, tmp_path / "graph", device="cuda")
    monkeypatch.setattr(trial, "WARM_UP", 10**9)
    train(config, log, tmp_path / "plain", device="cuda")
    graph, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("graph", "plain"))
    for name in plain:
        torch.testing.assert_close(graph[name], plain[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 30, 53])
def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(log, tmp_path, optimizer, at, deterministic):
    config = small_run(log, optimizer=optimizer, validate_every=30)
    train(config, log, tmp_path / "whole", device="cuda")
    with pytest.raises(KeyboardInterrupt):
        train(config, log, tmp_path / "cut", device="cuda", stop=StopAt(at))
    train(config, log, tmp_path / "cut", device="cuda")
    assert_same_model(tmp_path / "whole", tmp_path / "cut")


def test_rows_read_ahead_are_the_resident_ones(log, tmp_path, monkeypatch, deterministic):
    monkeypatch.setattr(feed, "BLOCK_ROWS", 256)
    config = small_run(log, shuffle=True)
    train(config, log, tmp_path / "resident", device="cuda")
    monkeypatch.setattr(feed, "RESIDENT", 0)
    assert not loop.Feed(log, "cuda").resident
    train(config, log, tmp_path / "ahead", device="cuda")
    assert_same_model(tmp_path / "resident", tmp_path / "ahead")


def test_runs_side_by_side_are_each_what_it_is_alone(log, tmp_path, deterministic):
    configs = [small_run(log, seed=seed, epochs=3) for seed in range(3)]
    for k, config in enumerate(configs):
        train(config, log, tmp_path / f"alone{k}", device="cuda")
    train_many(configs, log, [tmp_path / f"together{k}" for k in range(3)], device="cuda", workers=3)
    for k in range(3):
        assert_same_model(tmp_path / f"alone{k}", tmp_path / f"together{k}")


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_lower_precision_learns(log, precision):
    exact, rough = (train(small_run(log, precision=p), log, device="cuda")["test"] for p in ("float32", precision))
    assert rough != exact
    assert rough["log_loss"] < 1.1 * guess(log)

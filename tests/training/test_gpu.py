"""Training on a GPU: captured steps, rows read ahead, runs side by side, resumed bit for bit in deterministic mode."""

import pytest
import torch
from runs_of_training import StopAt, assert_same_model, guess, small_run

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
@pytest.mark.parametrize("validate_every", [20, 7])
def test_captured_steps_train_as_plain_ones(log, optimizer, validate_every, monkeypatch):
    replayed = []

    class Graph(torch.cuda.CUDAGraph):
        def replay(self):
            replayed.append(self)
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    config = small_run(log, optimizer=optimizer, epochs=2, validate_every=validate_every)
    graph = train(config, log, device="cuda")
    assert len(set(replayed)) == (2 if validate_every == 20 else 1)  # of ten steps, and of one
    replayed.clear()
    monkeypatch.setattr(trial, "WARM_UP", 10**9)
    plain = train(config, log, device="cuda")
    assert not replayed
    for split in ("validation", "test"):
        assert graph[split]["log_loss"] == pytest.approx(plain[split]["log_loss"], rel=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 2, 5])  # looks at the event, one after every few steps
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


def test_lower_precision_learns(log):
    exact, rough = (train(small_run(log, precision=p), log, device="cuda")["test"] for p in ("float32", "bfloat16"))
    assert rough != exact
    assert rough["log_loss"] < 1.1 * guess(log)

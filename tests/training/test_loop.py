"""Training: torch's own steps, reproducible, in every precision, alone and many at a time."""

import copy
import json
import os
import signal
import time
from typing import get_args

import pytest
import torch
from runs_of_training import TORCHS, StopAt, assert_same_model, guess, lines, small_log, small_run
from torch import nn
from torch.nn import functional as F

import quorem
from quorem import models
from quorem.modules.collection import EmbeddingCollection
from quorem.optimizer_names import Optimizer
from quorem.training import feed as feed_module
from quorem.training import loop, run
from quorem.training.loop import train, train_many
from quorem.training.metrics import Evaluation
from quorem.training.model import build_model, tables_of
from quorem.training.trial import Trial, compiled_loss, dense_optimizer, update_

OPTIMIZERS = ["adagrad", "amsgrad"]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "amsgrad", "adamw"])
def test_training_is_torchs_own_loop_on_the_stored_tables(log, tmp_path, optimizer):
    """The same steps by torch.optim on the dense gradient of the same tables: equal to the rounding of float32."""
    options = {"optimizer": optimizer, "lr": 0.5 if optimizer == "sgd" else None}
    config = small_run(log, scheme=quorem.QR(4, operation="add"), max_rows=640, **options)
    model = build_model(config, log)
    steps = TORCHS[optimizer](model.parameters(), lr=config.learning_rate)
    rows = log.split("train").rows(0, 640)
    for batch in rows.batches(64):
        steps.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels.float()).backward()
        steps.step()
    evaluation = Evaluation()
    test = log.split("test")
    evaluation.update(model(test.dense, test.ids), test.labels.float())
    result = train(config, log, tmp_path)["test"]
    trained = quorem.load(tmp_path / "model.safetensors").state_dict()
    initial = dict(build_model(config, log).named_parameters())
    for name, expected in model.named_parameters():
        assert (expected - initial[name]).abs().max() > 1e-3, name
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-6, msg=name)
    assert result["rows"] == len(test)
    assert result["log_loss"] == pytest.approx(evaluation.compute().log_loss, rel=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_run_twice_has_the_same_bits_and_another_seed_has_not(log, tmp_path, optimizer):
    config = small_run(log, optimizer=optimizer, shuffle=True, epochs=2, validate_every=20)
    first, second = (train(config, log, tmp_path / name) for name in "ab")
    assert_same_model(tmp_path / "a", tmp_path / "b")
    assert lines(tmp_path / "a") == lines(tmp_path / "b")
    assert first["test"] == second["test"]
    assert train(small_run(log, optimizer=optimizer, seed=1), log)["test"] != first["test"]


def test_shuffled_epochs_take_every_row_once_in_orders_of_their_own(log):
    feed = loop.Feed(log)
    config = small_run(log, shuffle=True, epochs=2)
    rows = log.split("train")
    batches = list(feed.training(config))
    half = len(batches) // 2
    orders = [torch.cat([b.dense for b in part]) for part in (batches[:half], batches[half:])]
    assert not torch.equal(*orders)
    for order in orders:
        assert torch.equal(order.sort(0).values, rows.dense.sort(0).values)
    for skip in (1, half - 1, half, half + 3):
        rest = torch.cat([b.ids for b in feed.training(config, skip)])
        assert torch.equal(rest, torch.cat([b.ids for b in batches[skip:]]))


@pytest.mark.parametrize("first", [0, 3, 51])
@pytest.mark.parametrize("ahead", [False, True])
def test_batches_given_together_are_the_single_ones_and_end_where_something_is_due(log, first, ahead, monkeypatch):
    if ahead:
        monkeypatch.setattr(feed_module, "BLOCK_ROWS", 64 * 7)
    config = small_run(log, epochs=2, max_rows=64 * 40 + 5)
    feed = loop.Feed(log)
    single = list(feed.training(config, first))
    joint = list(feed.training(config, first, 10, (20, 7, None)))
    assert torch.equal(torch.cat([b.ids for b in joint]), torch.cat([b.ids for b in single]))
    counts = [-(-len(b) // 64) for b in joint]
    assert sum(counts) == len(single) and max(counts) <= 10
    ends = {first + sum(counts[: k + 1]) for k in range(len(counts))}
    last = first + len(single)
    assert ends >= {step for step in range(first + 1, last + 1) if step % 20 == 0 or step % 7 == 0}


def test_result_tells_what_was_trained(log, tmp_path):
    config = small_run(log, epochs=2)
    result = train(config, log, tmp_path / "run")
    assert run.read_result(tmp_path / "run" / "result.json") == result
    with pytest.warns(UserWarning, match="1 of 4 tables stay full"):
        tables = EmbeddingCollection(tables_of(log.cardinalities, config.scheme, embedding_dim=4), device="meta")
    model = models.build("dlrm", tables, num_dense=3, device=torch.device("meta"))
    assert result["config"] == json.loads(config.to_json())
    assert result["embedding_parameters"] == tables.num_parameters
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["bytes"] == 4 * result["parameters"]
    assert result["tables_kept_full"] == sum(spec.fallback is not None for spec in tables.specs)
    assert result["rows"] == 2 * len(log.split("train"))
    assert result["rows_per_second"] == pytest.approx(result["rows"] / result["seconds"])
    assert {"device", "threads", "versions", "commit", "seed"} <= result.keys()


def test_metrics_are_logged(log, tmp_path):
    rows = len(log.split("train"))
    config = small_run(log, validate_every=80, epochs=4)
    train(config, log, tmp_path / "run")
    steps = 4 * -(-rows // 64)
    logged = lines(tmp_path / "run")
    assert [line["step"] for line in logged if "loss" in line] == list(range(100, steps + 1, 100))
    validated = [line for line in logged if "validation" in line]
    ends = range(steps // 4, steps + 1, steps // 4)  # of epochs
    assert [line["step"] for line in validated] == sorted({*range(80, steps, 80), *ends})
    metrics = {"rows", "log_loss", "auc", "accuracy", "calibration"}
    assert all(line["validation"].keys() == metrics for line in validated)
    assert logged[-1].keys() == {"step", "validation", "test"}


def test_the_mean_loss_logged_is_that_of_the_steps(log):
    config = small_run(log, max_rows=128)
    trial = loop.Trial(config, build_model(config, log), log.names)
    losses = []
    for batch in loop.Feed(log).training(config):
        with torch.no_grad():
            losses.append(F.binary_cross_entropy_with_logits(trial.logits(batch), batch.labels.float()).item())
        trial.step(batch)
    assert trial.mean_loss(2) == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize("scheme", [quorem.Full(), quorem.Hash(4), quorem.QR(4, operation="concat"), quorem.Path(4)])
@pytest.mark.parametrize("network", ["dlrm", "dcn"])
def test_every_kind_of_table_trains(log, network, scheme):
    result = train(small_run(log, network=network, scheme=scheme, lr=0.02, threshold=10, epochs=2), log)
    assert result["test"]["auc"] > 0.55 and result["test"]["log_loss"] < 1.1 * guess(log)


def test_bfloat16_learns_and_tables_stay_float32(log, tmp_path):
    exact, rough = (train(small_run(log, precision=p), log, tmp_path / p) for p in ("float32", "bfloat16"))
    assert exact["test"] != rough["test"]
    assert rough["test"]["log_loss"] < 1.1 * guess(log)
    model = quorem.load(tmp_path / "bfloat16" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in model.parameters())


def test_a_diverging_run_stops(log):
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 100: lower lr \(1e\+30\)"):
        train(small_run(log, lr=1e30, epochs=2), log)


@pytest.mark.parametrize("workers", [1, 2])
def test_many_runs_in_one_process_are_each_what_it_is_alone(log, tmp_path, workers):
    configs = [small_run(log, seed=seed, optimizer="amsgrad") for seed in range(3)]
    alone = [train(config, log, tmp_path / f"alone{k}") for k, config in enumerate(configs)]
    together = train_many(configs, log, [tmp_path / f"together{k}" for k in range(3)], workers=workers)
    assert [r["test"] for r in together] == [r["test"] for r in alone]
    for k in range(3):
        assert_same_model(tmp_path / f"alone{k}", tmp_path / f"together{k}")


@pytest.mark.parametrize("workers", [1, 2])
def test_many_runs_tell_what_failed(log, workers):
    configs = [small_run(log, epochs=20), small_run(log, lr=1e30, epochs=20)]
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        train_many(configs, log, workers=workers)
    assert torch.get_num_threads() == 1
    with pytest.raises(ValueError, match=r"workers \(0\) must be at least 1"):
        train_many(configs, log, workers=0)
    with pytest.raises(ValueError, match=r"outs \(1\) must be as many as configs \(2\)"):
        train_many(configs, log, [None])


@pytest.fixture
def interruptible():
    """SIGINT as a terminal's: a job in the background starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_stop_on_signal_sets_the_event_once_then_interrupts(interruptible):
    with loop.stop_on_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_log_without_rows_to_test_on_is_refused_before_training(tmp_path):
    tiny = small_log(tmp_path / "tiny", 7)
    assert not len(tiny.split("validation")) or not len(tiny.split("test"))
    with pytest.raises(ValueError, match=r"tiny has no rows for (validation|test)"):
        train(small_run(tiny), tiny, tmp_path / "run")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "adagrad in bfloat16", "adagrad in log8"])
def test_of_several_epochs_the_best_is_kept_also_when_resumed(log, tmp_path, optimizer):
    optimizer, _, state_dtype = optimizer.partition(" in ")
    options = {"optimizer": optimizer, "lr": 0.05, "shuffle": True, "state_dtype": state_dtype or "float32"}
    single = [train(small_run(log, epochs=n, **options), log)["validation"]["log_loss"] for n in (1, 2)]
    config = small_run(log, epochs=6, patience=2, **options)
    result = train(config, log, tmp_path / "whole")
    per_epoch = -(-len(log.split("train")) // 64)
    losses = [line["validation"]["log_loss"] for line in lines(tmp_path / "whole") if "validation" in line]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert result["best_epoch"] == best + 1 and result["validation"]["log_loss"] == losses[best]
    assert losses[0] == single[0] and result["steps"] == min(6, best + 3) * per_epoch < 6 * per_epoch
    with pytest.raises(KeyboardInterrupt):
        train(config, log, tmp_path / "cut", stop=StopAt((best + 1) * per_epoch + 3))
    assert train(config, log, tmp_path / "cut")["test"] == result["test"]
    assert_same_model(tmp_path / "whole", tmp_path / "cut")


NETWORKS = {
    "dlrm": lambda tables: models.DLRM(tables, num_dense=3, bottom=(16,), top=(24, 8)),
    "dcn": lambda tables: models.DCN(tables, num_dense=3, deep=(24, 8), num_cross=2),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_compiled_steps_are_plain_ones_and_go_on_from_their_tensors(log, network):
    def small_trial(compiled):
        torch.manual_seed(0)
        tables = quorem.EmbeddingCollection(tables_of(log.cardinalities, quorem.QR(4), embedding_dim=4))
        trial = Trial(small_run(log, network=network, batch_size=16), NETWORKS[network](tables), log.names)
        if compiled:  # as on a GPU
            trial.compiles, trial._compiled_loss = True, compiled_loss(trial.model)
        return trial

    def step(trial, batch):
        trial._step(batch)
        trial.steps += 1

    batches = list(log.split("train").rows(0, 40).batches(16))  # the last has fewer rows
    compiled, plain = small_trial(True), small_trial(False)
    start = {name: tensor.clone() for name, tensor in plain.tensors().items() if name.startswith("model.")}
    for trial in (compiled, plain):
        for batch in batches[:2]:
            step(trial, batch)
    saved = {name: tensor.clone() for name, tensor in compiled.tensors().items()}
    for trial in (compiled, plain):
        step(trial, batches[2])
    ours, truth = compiled.tensors(), plain.tensors()
    assert ours.keys() == truth.keys()
    assert float(ours["loss.sum"]) == pytest.approx(float(truth["loss.sum"]), rel=1e-6)
    for name, first in start.items():
        change, expected = ours[name] - first, truth[name] - first
        assert (change - expected).norm() <= 1e-3 * expected.norm(), name  # small gradients have steps as large as any
    resumed = small_trial(True)
    resumed.restore(2, saved)
    step(resumed, batches[2])
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, ours[name]), name


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_the_captured_update_is_that_of_torch(log, optimizer):
    """In float64, so that nothing but the rule is compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1)).double()
    model[2].bias.requires_grad_(False)  # gets no gradient
    twin = copy.deepcopy(model)
    ours = dense_optimizer(small_run(log, optimizer=optimizer), list(model.parameters()))
    truth = TORCHS[optimizer](twin.parameters())
    for _ in range(5):
        x = torch.randn(8, 5, dtype=torch.float64)
        for network, step in ((model, lambda: update_(ours)), (twin, truth.step)):
            network.zero_grad()
            F.softplus(network(x)).mean().backward()
            step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)

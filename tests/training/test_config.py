"""RunConfig: checked on construction, the same through JSON, named by a key that any process finds again."""

import dataclasses
import hashlib
import inspect
from functools import partial

import pytest
import torch
from refusals import refused
from runs_of_training import small_log, small_run
from torch import nn

import quorem
from quorem.training.config import DEFAULT_LRS, RunConfig
from quorem.training.model import build_model

CONFIG = RunConfig(data="log")
CHANGES = {
    "data": "another",
    "network": "dcn",
    "preset": "table1",
    "patience": 2,
    "hidden": (64,),
    "bottom": (64,),
    "scheme": quorem.Hash(num_collisions=4),
    "threshold": 20,
    "plan": {"C2": quorem.Full(), "C1": quorem.QR(60)},
    "unknown": "hash",
    "bits": 4,
    "row_dtype": "bfloat16",
    "state_dtype": "log8",
    "embedding_dim": 8,
    "optimizer": "amsgrad",
    "lr": 0.5,
    "batch_size": 2048,
    "epochs": 2,
    "seed": 1,
    "shuffle": True,
    "precision": "bfloat16",
    "validate_every": 1000,
    "max_rows": 64_000,
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig)])
def test_json_round_trip_and_a_key_of_its_own(name):
    changed = dataclasses.replace(CONFIG, **{name: CHANGES[name]})
    assert RunConfig.from_json(changed.to_json()) == changed != CONFIG
    assert changed.key() != CONFIG.key()
    assert RunConfig.from_json(changed.to_json()).key() == changed.key()


def test_a_plan_is_named_by_its_schemes():
    """In whatever order and form it is given; runs without one are named as before there were plans."""
    plan = {"C1": quorem.QR(60), "C2": quorem.Full()}
    config = RunConfig(data="log", plan=plan)
    assert config == RunConfig(data="log", plan=tuple(reversed(plan.items()))) and hash(config)
    assert config.plan == (("C1", quorem.QR(60)), ("C2", quorem.Full()))
    assert config.key() != RunConfig(data="log", plan={**plan, "C1": quorem.QR(4)}).key()
    assert "plan" not in CONFIG.to_json()
    with pytest.raises(ValueError, match=r"plan \({}\) must name at least one table"):
        RunConfig(data="log", plan={})
    for wrong in ({"C1": 3}, {1: quorem.Full()}, 5, "C1"):
        with pytest.raises(TypeError, match="must be a mapping of names of tables to schemes"):
            RunConfig(data="log", plan=wrong)
    for more in ({"scheme": quorem.Hash(4)}, {"threshold": 3}):
        with pytest.raises(ValueError, match=r"must be left at QR\(num_collisions=4\) and 0 where plan says"):
            RunConfig(data="log", plan=plan, **more)


def test_the_key_is_the_hash_of_a_text_that_does_not_change():
    """The name of a run's folder, on any machine and in later versions."""
    text = (
        '{"batch_size": 128, "data": "log", "embedding_dim": 16, "epochs": 1, "lr": null, "max_rows": null, '
        '"network": "dlrm", "optimizer": "adagrad", "precision": "float32", "preset": "text", '
        '"scheme": {"scheme": "QR"}, "seed": 0, "shuffle": false, "threshold": 0, "validate_every": null}'
    )
    assert CONFIG.to_json() == text
    assert CONFIG.key() == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_learning_rates_are_torchs_defaults():
    for name, optimizer in {"adagrad": torch.optim.Adagrad, "amsgrad": torch.optim.Adam}.items():
        assert DEFAULT_LRS[name] == inspect.signature(optimizer).parameters["lr"].default
        assert RunConfig(data="log", optimizer=name).learning_rate == DEFAULT_LRS[name]
        assert RunConfig(data="log", optimizer=name, lr=0.5).learning_rate == 0.5


config = partial(RunConfig, data="log")
test_wrong_options_are_named = refused(
    (lambda: config(data=""), ValueError, r"data \(''\) must name the data"),
    (lambda: config(data=3), TypeError, r"data \(3\) must be a str"),
    (lambda: config(network="wide"), ValueError, r"network \('wide'\) must be one of 'dcn', 'dlrm', or FILE.py:F"),
    (lambda: config(preset="table2"), ValueError, r"preset \('table2'\) must be one of 'text', 'table1'"),
    (lambda: config(precision="fp8"), ValueError, r"precision \('fp8'\) must be one of 'float32', 'bfloat16'"),
    (lambda: config(state_dtype="int8"), ValueError, r"state_dtype \('int8'\) must be one of 'float32', 'bfloat16'"),
    (lambda: config(state_dtype="log8", optimizer="adam"), ValueError, r"state_dtype \('log8'\) must be .* for adam"),
    (lambda: config(scheme="QR"), TypeError, r"scheme \('QR'\) must be a Scheme"),
    (lambda: config(threshold=-1), ValueError, r"threshold \(-1\) must be at least 0"),
    (lambda: config(seed=1.5), TypeError, r"seed \(1.5\) must be an int"),
    (lambda: config(shuffle=1), TypeError, r"shuffle \(1\) must be a bool"),
    (lambda: config(validate_every=0), ValueError, r"validate_every \(0\) must be at least 1"),
    (lambda: config(lr=0), ValueError, r"lr \(0\) must be above 0 and finite"),
    (lambda: config(lr=float("nan")), ValueError, r"lr \(nan\) must be above 0 and finite"),
    (lambda: config(lr="0.1"), TypeError, r"lr \('0.1'\) must be a float"),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "data is missing"),
        ('{"data": "log", "learning": 1, "colour": 2}', "colour is not known: RunConfig has data, network"),
        ('{"data": "log", "scheme": {"scheme": "Q"}}', "must be an object whose 'scheme' is one of"),
    ],
)
def test_wrong_json_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_json(text)


def test_widths_of_hidden_layers_are_those_of_the_network(tmp_path):
    log = small_log(tmp_path / "log", 300)
    config = small_run(log, hidden=[7, 5], bottom=(6,))
    assert RunConfig.from_json(config.to_json()) == config and config.hidden == (7, 5)
    model = build_model(config, log)
    assert [layer.out_features for layer in model.top if isinstance(layer, nn.Linear)] == [7, 5]
    assert [layer.out_features for layer in model.bottom if isinstance(layer, nn.Linear)] == [6, 4]
    model = build_model(small_run(log, network="dcn", hidden=(9,)), log)
    assert [layer.out_features for layer in model.deep if isinstance(layer, nn.Linear)] == [9]
    with pytest.raises(ValueError, match=r"bottom \(\(6,\)\) must be None for network \('dcn'\)"):
        small_run(log, network="dcn", bottom=(6,))
    with pytest.raises(ValueError, match=r"hidden \(\(6,\)\) must be None for .* with preset \('table1'\)"):
        small_run(log, preset="table1", hidden=(6,))
    with pytest.raises(ValueError, match=r"hidden \(0\) must be at least 1"):
        small_run(log, hidden=(0,))

"""Compressed models under accelerate: saved, loaded and resumed."""

from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason='needs accelerate: pip install "quorem[dev]"')

import torch
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from foreign_model import batch, check_tool, empty, facts_of, train, trained
from torch import nn


def save(model: nn.Module, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, str(folder / "model"))
    accelerator.save_state(str(folder / "state"))


def load(model: nn.Module, folder: Path) -> nn.Module:
    with init_empty_weights():
        other = empty(folder.name, folder)
    other = load_checkpoint_and_dispatch(other, str(folder / "model"), device_map={"": "cpu"})
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.load_state(str(folder / "state"))
    assert torch.equal(other(*batch(7)), model(*batch(7)))
    return accelerator.unwrap_model(model)


def test_models_come_back_in_a_process_without_data(tmp_path: Path) -> None:
    check_tool(__file__, save, tmp_path)


def test_training_is_resumed(tmp_path: Path) -> None:
    for kind in ("qr", "counts"):
        accelerator = Accelerator(cpu=True)
        model = trained(kind, tmp_path)
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        train(model, optimizer, range(2))
        accelerator.save_state(str(tmp_path / kind))
        train(model, optimizer, range(2, 4))
        resumed, again = empty(kind, tmp_path), Accelerator(cpu=True)
        resumed, optimizer = again.prepare(resumed, torch.optim.Adam(resumed.parameters(), lr=0.1))
        again.load_state(str(tmp_path / kind))
        train(resumed, optimizer, range(2, 4))
        for name, value in facts_of(model).items():
            assert torch.equal(facts_of(resumed)[name], value), name

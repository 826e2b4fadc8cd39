"""Compressed models in safetensors' files."""

from pathlib import Path

import pytest
import torch
from foreign_model import check_tool
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from quorem import QR, Embedding


def save(model: nn.Module, folder: Path) -> None:
    save_model(model, str(folder / "model.safetensors"))
    save_file(model.state_dict(), folder / "state.safetensors")


def load(model: nn.Module, folder: Path) -> None:
    assert load_model(model, folder / "model.safetensors") == (set(), [])
    model.load_state_dict(load_file(folder / "state.safetensors"))


def test_models_come_back_in_a_process_without_data(tmp_path: Path) -> None:
    check_tool(__file__, save, tmp_path)


def test_rows_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    save_file(Embedding(1000, 16, QR(4)).state_dict(), tmp_path / "state")
    module = Embedding(1000, 16, QR(4, operation="add"))
    before = module.stored.detach().clone()
    with pytest.raises(RuntimeError, match="table holds mult of 1:250, 250:4 in the checkpoint and add of 1:250"):
        load_model(module, tmp_path / "state")
    assert torch.equal(module.stored, before)

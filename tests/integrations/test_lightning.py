"""Checkpoints of PyTorch Lightning, by a trainer that calls the same hooks in the same order."""

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quorem import QR, Embedding
from quorem.integrations import lightning
from quorem.optim import AMSGrad, apply_in_backward


class Network(nn.Module):
    """What a ``LightningModule`` would be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.top = Embedding(60, 8, QR(4)), nn.Linear(8, 1)
        self.table_optimizer = apply_in_backward(self.table, AMSGrad, lr=0.05)
        self.optimizer = torch.optim.Adam(self.top.parameters(), lr=0.05)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        lightning.on_save_checkpoint(self.table_optimizer, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        lightning.on_load_checkpoint(self.table_optimizer, checkpoint)


def fit(network: Network, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, 60, (4,), generator=torch.Generator().manual_seed(step))
        network.optimizer.zero_grad()
        network.top(network.table(ids)).square().mean().backward()
        network.optimizer.step()


def saved(network: Network, hooks: Any, path: Path) -> None:
    """Weights, callbacks, optimizers, then the hook of the module."""
    checkpoint = {"state_dict": network.state_dict()}
    if hooks is not None and hooks is not network:
        hooks.on_save_checkpoint(None, network, checkpoint)
    checkpoint["optimizer_states"] = [network.optimizer.state_dict()]
    if hooks is network:
        network.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)


def resumed(network: Network, hooks: Any, path: Path) -> None:
    """The hook of the module, weights, callbacks, then optimizers."""
    checkpoint = torch.load(path, weights_only=True)
    if hooks is network:
        network.on_load_checkpoint(checkpoint)
    network.load_state_dict(checkpoint["state_dict"])
    if hooks is not None and hooks is not network:
        hooks.on_load_checkpoint(None, network, checkpoint)
    network.optimizer.load_state_dict(checkpoint["optimizer_states"][0])


@pytest.fixture(params=["hooks", "callback"])
def keep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What keeps the state of a network: its own hooks, or a callback."""
    if request.param == "hooks":
        return lambda network: network
    names = ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].Callback = type("Callback", (), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return lambda network: lightning.callback(lambda module: module.table_optimizer)


def test_a_resumed_run_goes_on_with_the_state_of_the_tables(keep: Any, tmp_path: Path) -> None:
    whole, stopped = Network(), Network()
    fit(whole, range(12))
    fit(stopped, range(6))
    saved(stopped, keep(stopped), tmp_path / "run.ckpt")
    again, forgetful = Network(), Network()
    resumed(again, keep(again), tmp_path / "run.ckpt")
    resumed(forgetful, None, tmp_path / "run.ckpt")
    for network in (again, forgetful):
        fit(network, range(6, 12))
    torch.testing.assert_close(again.table.to_dense(), whole.table.to_dense())
    assert (forgetful.table.to_dense() - whole.table.to_dense()).abs().max() > 1e-3


def test_checkpoints_without_the_state_are_refused() -> None:
    network, checkpoint = Network(), {}
    with pytest.raises(ValueError, match="must hold 'quorem_table_optimizers'"):
        lightning.on_load_checkpoint(network.table_optimizer, checkpoint)
    lightning.on_save_checkpoint([network.table_optimizer], checkpoint)
    other = copy.deepcopy(checkpoint)
    other[lightning.KEY] *= 2
    with pytest.raises(ValueError, match="state of 2 optimizers of tables but must have 1"):
        lightning.on_load_checkpoint(network.table_optimizer, other)


def test_without_lightning_there_is_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs PyTorch Lightning"):
        lightning.callback(Network().table_optimizer)

"""Compressed models under Lightning's own Trainer: trained, saved, loaded and resumed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason='needs lightning: pip install "quorem[dev]"')

import torch
from foreign_model import batch, check_tool, empty, facts_of, trained
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from quorem.integrations import lightning
from quorem.optim import Adam, AMSGrad, apply_in_backward

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


class Module(LightningModule):
    """A model whose tables are updated by an optimizer that Lightning knows, or within the backward pass."""

    def __init__(self, model: nn.Module, in_backward: bool = False) -> None:
        super().__init__()
        self.model = model
        self.tables = apply_in_backward(model, AMSGrad, lr=0.05) if in_backward else None

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.model(*batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Adam(self.model.top.parameters() if self.tables else self.model.parameters(), lr=0.05)


class WithHooks(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tables"] = self.tables.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tables.load_state_dict(checkpoint["tables"])


def fit(module: Module, folder: Path, epochs: int, resume: Path | None = None, more: Sequence[Any] = ()) -> None:
    """Train, with a checkpoint after each epoch."""
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[keep, *more], **QUIET)
    trainer.fit(module, DataLoader([batch(step) for step in range(3)], batch_size=None), ckpt_path=resume)


def save(model: nn.Module, folder: Path) -> None:
    fit(Module(model), folder, 1)


def load(model: nn.Module, folder: Path) -> nn.Module:
    return Module.load_from_checkpoint(folder / "epoch=0.ckpt", model=model, weights_only=True).model


def test_models_come_back_in_a_process_without_data(tmp_path: Path) -> None:
    check_tool(__file__, save, tmp_path)


@pytest.mark.parametrize("kind", ["qr", "counts"])
@pytest.mark.parametrize("way", ["configure_optimizers", "hooks", "callback"])
def test_training_is_resumed(way: str, kind: str, tmp_path: Path) -> None:
    make = WithHooks if way == "hooks" else Module
    more = [lightning.callback(lambda module: module.tables)] if way == "callback" else []
    whole = make(trained(kind, tmp_path), way != "configure_optimizers")
    fit(whole, tmp_path, 3, more=more)
    resumed = make(empty(kind, tmp_path), way != "configure_optimizers")
    fit(resumed, tmp_path / "again", 3, tmp_path / "epoch=0.ckpt", more)
    assert resumed.trainer.global_step == 9
    for name, value in facts_of(whole.model).items():
        assert torch.equal(facts_of(resumed.model)[name], value), name


def test_checkpoints_without_the_state_are_refused(tmp_path: Path) -> None:
    tables = apply_in_backward(trained("qr", tmp_path), AMSGrad, lr=0.05)
    with pytest.raises(ValueError, match="must hold 'quorem_table_optimizers'"):
        lightning.callback(tables).on_load_checkpoint(None, None, {})


def test_without_lightning_there_is_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs PyTorch Lightning"):
        lightning.callback(lambda module: module.tables)

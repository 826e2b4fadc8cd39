"""Compressed models in other libraries' files: they come back bit for bit in a process that has no data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from foreign_model import KINDS, assert_equal, batch, empty, facts_of, train, trained
from processes import python
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.data import DataLoader

from quorem import optim
from quorem.integrations import lightning


def save_by_torch(model: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "state.pt")


def load_by_torch(model: nn.Module, folder: Path) -> nn.Module:
    state = torch.load(folder / "state.pt", weights_only=True)
    with torch.device("meta"):
        other = empty(folder.name, folder)
    other.load_state_dict(state, assign=True)
    model.load_state_dict(state)
    assert torch.equal(other(*batch(7)), model(*batch(7)))
    return model


def save_by_safetensors(model: nn.Module, folder: Path) -> None:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    safetensors.torch.save_file(model.state_dict(), folder / "state.safetensors")


def load_by_safetensors(model: nn.Module, folder: Path) -> nn.Module:
    assert safetensors.torch.load_model(model, folder / "model.safetensors") == (set(), [])
    model.load_state_dict(safetensors.torch.load_file(folder / "state.safetensors"))
    return model


def save_by_distributed(model: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "state", no_dist=True)


def load_by_distributed(model: nn.Module, folder: Path) -> nn.Module:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder / "state", no_dist=True)
    set_model_state_dict(model, state)
    return model


def save_by_accelerate(model: nn.Module, folder: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, str(folder / "model"))
    accelerator.save_state(str(folder / "state"))


def load_by_accelerate(model: nn.Module, folder: Path) -> nn.Module:
    from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        other = empty(folder.name, folder)
    other = load_checkpoint_and_dispatch(other, str(folder / "model"), device_map={"": "cpu"})
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.load_state(str(folder / "state"))
    assert torch.equal(other(*batch(7)), model(*batch(7)))
    return accelerator.unwrap_model(model)


def lightning_module(model: nn.Module, tables: optim.RowOptimizer | None = None) -> Any:
    """Lightning's module around a model; ``tables``, if there is one, takes its steps within the backward pass."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, inputs: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(*inputs).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optim.Adam(self.model.top.parameters() if tables else self.model.parameters(), lr=0.05)

    return Module(model)


def fit_by_lightning(module: Any, folder: Path, epochs: int, resume: Path | None = None, callbacks: Any = ()) -> None:
    """Train, with a checkpoint after each epoch."""
    from lightning import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[keep, *callbacks], **quiet)
    trainer.fit(module, DataLoader([batch(step) for step in range(3)], batch_size=None), ckpt_path=resume)
    assert trainer.global_step == 3 * epochs


def save_by_lightning(model: nn.Module, folder: Path) -> None:
    fit_by_lightning(lightning_module(model), folder, 1)


def load_by_lightning(model: nn.Module, folder: Path) -> nn.Module:
    kind = type(lightning_module(model))
    return kind.load_from_checkpoint(folder / "epoch=0.ckpt", model=model, weights_only=True).model


TOOLS: dict[str, tuple[Callable[..., None], Callable[..., nn.Module]]] = {
    "torch": (save_by_torch, load_by_torch),
    "safetensors": (save_by_safetensors, load_by_safetensors),
    "torch.distributed": (save_by_distributed, load_by_distributed),
    "accelerate": (save_by_accelerate, load_by_accelerate),
    "lightning": (save_by_lightning, load_by_lightning),
}


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("tool", TOOLS)
def test_models_come_back_in_a_process_without_data(tool: str, tmp_path: Path) -> None:
    save, expected = TOOLS[tool][0], {}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        model = trained(kind, tmp_path / kind)
        save(model, tmp_path / kind)
        expected[kind] = facts_of(model)
    python("-W", "ignore", __file__, tool, tmp_path)
    for kind, facts in expected.items():
        assert_equal(torch.load(tmp_path / kind / "loaded.pt", weights_only=True), facts)


@pytest.mark.parametrize("kind", ["qr", "counts"])
def test_training_is_resumed_by_accelerate(kind: str, tmp_path: Path) -> None:
    accelerator_class = pytest.importorskip("accelerate").Accelerator
    accelerator, model = accelerator_class(cpu=True), trained(kind, tmp_path)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    accelerator.save_state(str(tmp_path / kind))
    train(model, optimizer, range(2, 4))
    again, resumed = accelerator_class(cpu=True), empty(kind, tmp_path)
    resumed, optimizer = again.prepare(resumed, torch.optim.Adam(resumed.parameters(), lr=0.1))
    again.load_state(str(tmp_path / kind))
    train(resumed, optimizer, range(2, 4))
    assert_equal(facts_of(resumed), facts_of(model))


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("kind", ["qr", "counts"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_training_is_resumed_by_lightning(in_backward: bool, kind: str, tmp_path: Path) -> None:
    models = []
    for make, folder, resume in ((trained, tmp_path, None), (empty, tmp_path / "again", tmp_path / "epoch=0.ckpt")):
        model = make(kind, tmp_path)
        tables = optim.apply_in_backward(model, optim.AMSGrad, lr=0.05) if in_backward else None
        callbacks = [lightning.callback(tables)] if in_backward else []
        fit_by_lightning(lightning_module(model, tables), folder, 3, resume, callbacks)
        models.append(facts_of(model))
    assert_equal(models[1], models[0])


def test_a_checkpoint_of_lightning_without_the_state_of_the_tables_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    tables = optim.apply_in_backward(trained("qr", tmp_path), optim.AMSGrad, lr=0.05)
    with pytest.raises(ValueError, match="checkpoint must hold 'quorem_table_optimizers'"):
        lightning.callback(lambda module: tables).on_load_checkpoint(None, None, {})


if __name__ == "__main__":
    for kind in KINDS:
        folder = Path(sys.argv[2]) / kind
        torch.save(facts_of(TOOLS[sys.argv[1]][1](empty(kind, folder), folder)), folder / "loaded.pt")

"""A Lightning module whose tables are updated within the backward pass: python examples/lightning_module.py

    pip install lightning

The optimizer of the tables takes its steps as each backward pass ends. Lightning does not see it, so two hooks put its
state into the checkpoints.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from replace_tables import ACTIVE_ITEMS, ACTIVE_USERS, DAYS, Recommender
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import quorem


class Module(lightning.LightningModule):
    """The model of ``replace_tables.py``, compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Recommender()
        quorem.compress_(self.model, budget="2MB")
        self.tables = quorem.optim.apply_in_backward(self.model, quorem.optim.Adagrad, lr=0.05)

    def training_step(self, batch: tuple[Tensor, ...], batch_index: int) -> Tensor:
        user, item, day, click = batch
        loss = F.binary_cross_entropy_with_logits(self.model(user, item, day), click)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        stored = {id(p) for group in self.tables.param_groups for p in group["params"]}
        return torch.optim.Adagrad([p for p in self.parameters() if id(p) not in stored], lr=0.05)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tables"] = self.tables.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tables.load_state_dict(checkpoint["tables"])


def fit(folder: Path, epochs: int, resume: Path | None = None) -> tuple[Module, lightning.Trainer]:
    """Train for some epochs, from a checkpoint if there is one."""
    torch.manual_seed(0)
    user, item, day = (torch.randint(n, (2048,)) for n in (ACTIVE_USERS, ACTIVE_ITEMS, DAYS))
    rows = TensorDataset(user, item, day, ((user + item) % 3 == 0).float())
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, default_root_dir=folder, **quiet)
    module = Module()
    trainer.fit(module, DataLoader(rows, batch_size=256), ckpt_path=resume)
    return module, trainer


def main() -> tuple[Module, Module]:
    """Train four epochs at once, and two and two with a checkpoint between: the same in the end."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        straight, _ = fit(folder, 4)
        _, trainer = fit(folder, 2)
        trainer.save_checkpoint(folder / "half.ckpt")
        resumed, trainer = fit(folder, 4, folder / "half.ckpt")
    print(f"loss {trainer.callback_metrics['loss']:.3f}")
    return straight, resumed


if __name__ == "__main__":
    main()

"""Compressed models in torch's own files, read with ``weights_only=True``, and averages of their weights."""

from pathlib import Path

import torch
from foreign_model import batch, check_tool, empty, trained
from torch import nn
from torch.optim.swa_utils import AveragedModel


def save(model: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "state.pt")


def load(model: nn.Module, folder: Path) -> nn.Module:
    state = torch.load(folder / "state.pt", weights_only=True)
    with torch.device("meta"):
        other = empty(folder.name, folder)
    other.load_state_dict(state, assign=True)
    model.load_state_dict(state)
    assert torch.equal(other(*batch(7)), model(*batch(7)))
    return model


def test_models_come_back_in_a_process_without_data(tmp_path: Path) -> None:
    check_tool(__file__, save, tmp_path)


def test_an_averaged_model_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    for kind in ("qr", "counts"):
        model = trained(kind, tmp_path)
        averaged, optimizer, history = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            optimizer.zero_grad()
            model(*batch(step)).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
            history.append({name: p.detach().double() for name, p in model.named_parameters()})
        for name, p in averaged.module.named_parameters():
            mean = torch.stack([each[name] for each in history]).mean(0)
            torch.testing.assert_close(p.double(), mean, rtol=0, atol=1e-6)
        other = AveragedModel(empty(kind, tmp_path))
        other.load_state_dict(averaged.state_dict())
        assert torch.equal(other(*batch(9)), averaged(*batch(9)))

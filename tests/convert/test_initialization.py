"""A model that is initialized after it was compressed, as transformers' ``init_weights`` and RecBole do."""

import pytest
import torch
from torch import nn

import quorem


def initialize_(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | quorem.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)


def test_writes_are_refused_and_reset_parameters_keeps_the_deviation() -> None:
    model = nn.Sequential(nn.Embedding(20_000, 16))
    model.apply(initialize_)
    quorem.compress_(model, quorem.QR(4))
    before = model[0].to_dense()
    with pytest.raises(RuntimeError, match="what is written into it would be lost"):
        model.apply(initialize_)
    assert torch.equal(model[0].to_dense(), before)
    model[0].reset_parameters()
    assert not torch.equal(model[0].to_dense(), before)
    assert abs(model[0].to_dense().std().item() - 0.02) < 1e-3

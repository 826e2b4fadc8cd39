"""What changes while an optimizer trains: inputs, options, groups and dtypes."""

import copy

import pytest
import torch

from quorem import QR, Embedding, EmbeddingBag, optim
from quorem.optim import Adagrad, apply_in_backward

IDS = torch.tensor([1, 5, 99])


@pytest.mark.parametrize("written", ["ids", "weights"])
def test_inputs_that_are_overwritten_before_the_backward_are_refused(written):
    table = EmbeddingBag(100, 8, QR(4), mode="sum")
    apply_in_backward(table, Adagrad, lr=0.1)
    ids, weights = IDS.clone(), torch.ones(3)
    out = table(ids, torch.tensor([0]), weights)
    (ids if written == "ids" else weights).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("in_backward", [False, True])
def test_maximize_that_is_set_later_is_followed(in_backward):
    table = Embedding(100, 8, QR(4), sparse=not in_backward)
    dense = Embedding(100, 8, QR(4))
    dense.load_state_dict(table.state_dict())
    make = apply_in_backward if in_backward else lambda module, kind, lr: kind(module.parameters(), lr=lr)
    ours, theirs = make(table, Adagrad, lr=0.1), torch.optim.Adagrad(dense.parameters(), lr=0.1)
    for step in range(4):
        for module, optimizer in ((table, ours), (dense, theirs)):
            optimizer.param_groups[0]["maximize"] = step > 1
            optimizer.zero_grad()
            module(IDS).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(table.to_dense(), dense.to_dense())


def test_a_refused_group_leaves_nothing_behind():
    table, other = (Embedding(100, 8, QR(4), sparse=True) for _ in range(2))
    optimizer = Adagrad(table.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight_decay \(0\.1\) must be 0"):
        optimizer.add_param_group({"params": other.parameters(), "weight_decay": 0.1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["Adagrad", "RowWiseAdagrad", "Adam", "AMSGrad", "SGD"])
def test_optimizers_survive_that_a_model_becomes_double(name, in_backward):
    """The rest is then trained in float64, from the state that there is."""
    table = Embedding(100, 8, QR(4), sparse=not in_backward)
    twin = copy.deepcopy(table).double()
    modules = []
    for module in (table, twin):
        if in_backward:
            modules.append((module, apply_in_backward(module, getattr(optim, name), lr=0.1)))
        else:
            modules.append((module, getattr(optim, name)(module.parameters(), lr=0.1)))
    for step in range(4):
        if step == 2:
            table.double()
        for module, optimizer in modules:
            optimizer.zero_grad()
            module(IDS).square().sum().backward()
            optimizer.step()
    assert table.stored.dtype == torch.float64
    torch.testing.assert_close(table.to_dense(), twin.to_dense(), rtol=1e-5, atol=1e-6)

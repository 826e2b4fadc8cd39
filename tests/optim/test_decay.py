"""Weight decay, which moves every row in every step: that of AdamW, and what others refuse."""

import pytest
import torch
from optimizers import collection, run

import quorem
from quorem import optim
from quorem.ops.lagging import in_memory
from quorem.optim import SGD, AdamW

OPTIONS = {"lr": 5e-3, "weight_decay": 0.1}


def test_a_step_writes_the_rows_touched():
    """And the rows in turn, here one."""
    module = quorem.Embedding(1000, 4, quorem.Full(), sparse=True)
    optimizer = AdamW(module.parameters(), **OPTIONS)
    for ids in ([3, 5], [900, 7]):
        before = in_memory(module.stored).clone()
        optimizer.zero_grad()
        module(torch.tensor(ids)).sum().backward()
        optimizer.step()
        changed = (in_memory(module.stored) != before).any(1).nonzero().flatten().tolist()
        assert set(ids) <= set(changed) <= {*ids, 0, 1}


def test_groups_of_tables_decay_by_options_of_their_own():
    def model():
        torch.manual_seed(0)
        return [quorem.Embedding(50, 8, quorem.QR(4), dtype=torch.float64) for _ in range(2)]

    tables, dense = model(), model()
    for table in tables:
        table.sparse = True
    groups = [[{"params": [a.stored], "weight_decay": 0.0}, {"params": [b.stored]}] for a, b in (tables, dense)]
    ours, theirs = AdamW(groups[0], lr=0.1), torch.optim.AdamW(groups[1], lr=0.1)
    for step in range(20):
        for (a, b), optimizer in ((tables, ours), (dense, theirs)):
            optimizer.zero_grad()
            (a(torch.tensor([step])) * b(torch.tensor([49 - step]))).sum().backward()
            optimizer.step()
    ours.flush()
    for a, b in zip(tables, dense, strict=True):
        torch.testing.assert_close(a.stored, b.stored, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AdamW(p, lr=10.0, weight_decay=0.1), r"lr \* weight_decay \(10.0 \* 0.1\) must be below 1"),
        (lambda p: optim.Adam(p, weight_decay=0.1), r"weight_decay \(0.1\) must be 0 for tables: under Adam it"),
        (lambda p: optim.RowWiseAdagrad(p, weight_decay=0.1), r"must be 0 for tables: under RowWiseAdagrad it"),
        (lambda p: SGD(p, weight_decay=0.1), r"weight_decay \(0.1\) must be 0 for tables: under SGD it .*use AdamW"),
        (lambda p: SGD(p, momentum=0.9), r"momentum \(0.9\) must be 0 for tables: under SGD it would move rows"),
        (lambda p: SGD([{"params": p, "dampening": 0.5}]), r"dampening \(0.5\) must be 0: quorem"),
        (lambda p: SGD(p, nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda p: AdamW([{"params": p, "amsgrad": True}]), r"amsgrad \(True\) must be False: quorem.optim.AdamW has"),
        (lambda p: optim.AMSGrad([{"params": p, "maximize": True}]), r"maximize \(True\) must be False"),
        (lambda p: optim.Adam(p, betas=(0.99, 0.9)), r"betas \(0.99, 0.9\) must have beta1\*\*2 < beta2"),
    ],
)
def test_what_would_move_every_row_is_refused(make, message):
    """And other options that tables cannot have."""
    module = collection()
    with pytest.raises(ValueError, match=message):
        make([module.stored])


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("option", ["momentum", "weight_decay", "maximize"])
def test_options_of_sgd_that_are_set_later_are_refused(option, in_backward):
    module = collection()
    module.sparse = not in_backward
    optimizer = optim.apply_in_backward(module, SGD) if in_backward else SGD([module.stored])
    run(module, optimizer, 1)
    optimizer.param_groups[0][option] = 0.5
    with pytest.raises(ValueError, match=rf"{option} \(0.5\) must be (0|False) for tables"):
        run(module, optimizer, 1)

"""Weight decay, which moves every row in every step: that of AdamW, and what others refuse."""

import copy

import pytest
import torch
from optimizers import UNIT, collection, run

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


def test_rows_that_never_had_a_gradient_decay_too():
    module = quorem.Embedding(100, 4, quorem.Full(), sparse=True)
    before = module.weight.detach().clone()
    optimizer = AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(module(torch.tensor([42])), before[42:43] * 0.95**10, rtol=100 * UNIT, atol=0)


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
    ],
)
def test_what_would_move_every_row_is_refused(make, message):
    module = collection()
    with pytest.raises(ValueError, match=message):
        make([module.stored])


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("option", ["momentum", "weight_decay"])
def test_options_of_sgd_that_are_set_later_are_refused(option, in_backward):
    module = collection()
    module.sparse = not in_backward
    optimizer = optim.apply_in_backward(module, SGD) if in_backward else SGD([module.stored])
    run(module, optimizer, 1)
    optimizer.param_groups[0][option] = 0.5
    with pytest.raises(ValueError, match=rf"{option} \(0.5\) must be 0 for tables"):
        run(module, optimizer, 1)


def test_parameters_with_dense_gradients_take_the_momentum_of_torch():
    module = quorem.Embedding(9, 4, quorem.QR(3), dtype=torch.float64)
    dense = copy.deepcopy(module)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    for m, optimizer in (
        (module, SGD(module.parameters(), **options)),
        (dense, torch.optim.SGD(dense.parameters(), **options)),
    ):
        for _ in range(5):
            optimizer.zero_grad()
            m(torch.arange(5)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.stored, dense.stored, rtol=0, atol=1e-12)


def test_hot_and_cold_ids_of_a_shared_pool():
    """Rows that two tables share, and ids in no order of frequency, whose ranks are looked up."""
    counts = torch.randint(50, (300,), generator=torch.Generator().manual_seed(2))
    tables = [
        quorem.Table("a", 300, 4, quorem.HotCold(20, cold=quorem.Pool(60), num_rest=30), frequencies=counts),
        quorem.Table("b", 200, 4, quorem.HotCold(10, cold=quorem.Pool(60))),
    ]
    dense = quorem.EmbeddingCollection(tables, dtype=torch.float64)
    sparse = quorem.EmbeddingCollection(tables, dtype=torch.float64, sparse=True)
    in_backward = quorem.EmbeddingCollection(tables, dtype=torch.float64)
    for module in (sparse, in_backward):
        module.load_state_dict(dense.state_dict())
    ours, theirs = AdamW([sparse.stored], **OPTIONS), torch.optim.AdamW(dense.parameters(), **OPTIONS)
    optim.apply_in_backward(in_backward, AdamW, **OPTIONS)
    draw = torch.Generator().manual_seed(3)
    for _ in range(40):
        ids = torch.randint(200, (6, 2), generator=draw)
        for module in (dense, sparse, in_backward):
            module.zero_grad()
            module(ids).square().sum().backward()
        ours.step(), theirs.step()
    for module in (sparse, in_backward):
        torch.testing.assert_close(module.state_dict(), dense.state_dict(), rtol=1e-12, atol=1e-12)

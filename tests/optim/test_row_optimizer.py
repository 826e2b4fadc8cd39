"""The optimizers among modules: checkpoints, reads from outside, parameter groups, and what is refused."""

import copy
import inspect
import pickle
from typing import get_args

import pytest
import torch
from optimizers import CLASSES, NAMES, batches, collection, loss_of, oracle, run, twin, use
from oracles import reloaded
from torch import nn

import quorem
from quorem import QR, Embedding, optim
from quorem.ops import rules
from quorem.ops.cpu import kernels
from quorem.ops.state import RULES
from quorem.optimizer_names import Optimizer


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    use("plain", monkeypatch)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), ("Adagrad", {"state_dtype": "bfloat16"}), ("Adagrad", {"state_dtype": "log8"})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_loaded_or_copied_run_continues_bit_for_bit(name, options, dtype, in_backward):
    def made(seed, **more):
        module = collection(dtype, not in_backward, seed)
        make = optim.apply_in_backward if in_backward else lambda m, kind, **o: kind(m.parameters(), **o)
        return module, make(module, CLASSES[name], **options, **more)

    module, optimizer = made(0, lr=0.01)
    run(module, optimizer, 40)
    saved_optimizer, saved_module = reloaded((optimizer.state_dict(), module.state_dict()))
    loaded, other = made(5, lr=1.0)
    run(loaded, other, 3)  # the steps these rows missed must not reach the loaded ones
    other.load_state_dict(saved_optimizer)
    loaded.load_state_dict(saved_module)
    pairs = [(loaded, other)]
    if not in_backward:  # a copy of a module is updated by step() alone
        pairs.append(copy.deepcopy((module, optimizer)))
        assert pairs[1][1].param_groups[0]["params"] == [pairs[1][0].stored]
    for m, o in [(module, optimizer), *pairs]:
        run(m, o, 40, seed=2)
    expected = module.state_dict()
    for m, o in pairs:
        assert all(torch.equal(m.state_dict()[key], expected[key]) for key in expected)
        for a, b in zip(optimizer.state_dict()["state"].values(), o.state_dict()["state"].values(), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "RowWiseAdagrad"])
def test_checkpoints_pass_between_torch_and_quorem(name):
    module, dense, straight = collection(), twin(collection()), twin(collection())
    ours = CLASSES[name]([module.stored], lr=0.01)
    theirs, reference = (oracle(name, m, 0.01) for m in (dense, straight))
    pairs = [(dense, theirs), (module, ours), (dense, theirs)]
    for seed, (m, optimizer) in enumerate(pairs):
        if seed:
            giver, its = pairs[seed - 1]
            optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
            m.load_state_dict(giver.state_dict())
        run(m, optimizer, 30, seed)
        run(straight, reference, 30, seed)
    torch.testing.assert_close(dense.stored, straight.stored, rtol=0, atol=1e-12)


def test_gradients_accumulate_over_backward_passes():
    module = collection()
    dense = twin(module)
    ours, theirs = optim.AMSGrad(module.parameters(), lr=0.01), oracle("AMSGrad", dense, 0.01)
    for m, optimizer in ((module, ours), (dense, theirs)):
        for step, (ids, target) in enumerate(batches(30)):
            loss_of(m, ids, target).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    ours.flush()
    torch.testing.assert_close(module.stored, dense.stored, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_dense_parameters_are_left_to_torch_in_groups(name):
    def model(sparse):
        torch.manual_seed(0)
        tables = quorem.Embedding(50, 8, quorem.Path(4, hidden=(5,), force=True), sparse=sparse, dtype=torch.float64)
        return nn.Sequential(tables, nn.Linear(8, 3, dtype=torch.float64))

    def groups(m):
        return [
            {"params": [m[0].stored]},
            {"params": list(m[0].paths.parameters()), "lr": 0.03},
            {"params": list(m[1].parameters()), "weight_decay": 0.1},
        ]

    module, dense = model(True), model(False)
    ours = CLASSES[name](groups(module), lr=0.01)
    torch_class = ours.torch_class
    theirs = torch_class(groups(dense), lr=0.01, **({"amsgrad": True} if "AMS" in name else {}))
    draw = torch.Generator().manual_seed(0)
    for _ in range(30):
        ids = torch.randint(0, 50, (6,), generator=draw)

        def closure(m, optimizer, ids=ids):
            optimizer.zero_grad()
            loss = m(ids).square().sum()
            loss.backward()
            return loss

        got = ours.step(lambda: closure(module, ours))
        expected = theirs.step(lambda: closure(dense, theirs))
        if name != "RowWiseAdagrad":
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
    if name != "RowWiseAdagrad":
        ours.flush()
        for (key, a), (_, b) in zip(module.named_parameters(), dense.named_parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad", "AMSGrad"])
def test_tables_of_nn_embedding_are_served_where_rows_do_not_lag_behind(name):
    module = nn.Embedding(9, 4, sparse=True)
    before = module.weight.detach().clone()
    optimizer = CLASSES[name](module.parameters(), lr=0.1)
    module(torch.tensor([1, 1, 3])).sum().backward()
    if name == "AMSGrad":  # nothing would bring its rows up to date
        with pytest.raises(ValueError, match=r"must belong to a quorem module: under AMSGrad.* torch.optim.SparseAdam"):
            optimizer.step()
    else:
        optimizer.step()
        assert (module.weight != before).any(1).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_optimizer_has_all_options(name):
    module = quorem.Embedding(50, 4, quorem.QR(4))
    kind = getattr(optim, name)
    defaults = kind([module.stored]).defaults
    options = {key: defaults[key] * 2 for key in inspect.signature(kind).parameters if key in ("lr", "lr_decay", "eps")}
    optimizer = optim.apply_in_backward(module, kind, **options)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.defaults == optimizer.defaults and other.state_dtype == optimizer.state_dtype
        assert {k: v for k, v in other.param_groups[0].items() if k != "params"} == {
            k: v for k, v in optimizer.param_groups[0].items() if k != "params"
        }


def test_learning_rate_may_be_a_tensor():
    module, other = collection(), collection()
    rate = torch.tensor(0.01, dtype=torch.float64)
    a, b = optim.Adam(module.parameters(), lr=rate), optim.Adam(other.parameters(), lr=0.01)
    for step in range(10):
        run(module, a, 2, step)
        run(other, b, 2, step)
        rate.mul_(0.5)
        b.param_groups[0]["lr"] *= 0.5
    assert torch.equal(module.to_dense()["t0"], other.to_dense()["t0"])


def test_row_sums_go_on_with_dense_gradients():
    module = quorem.Embedding(9, 4, quorem.QR(3))
    in_backward = optim.apply_in_backward(module, optim.RowWiseAdagrad, lr=0.1)
    module(torch.arange(9)).square().sum().backward()
    in_backward.remove()
    loaded = copy.deepcopy(module)
    optimizer = optim.RowWiseAdagrad(loaded.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(in_backward.state_dict()))
    for each, steps in ((module, in_backward), (loaded, optimizer)):
        each(torch.arange(9)).square().sum().backward()
        steps.step()
    assert torch.equal(module.stored, loaded.stored)


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_state_of_another_table_is_refused(name: str, in_backward: bool) -> None:
    kind = getattr(optim, name)
    full = torch.nn.Embedding(400, 4)
    truth = kind.torch_class(full.parameters())
    table = Embedding(400, 4, QR(4), sparse=not in_backward)
    make = optim.apply_in_backward if in_backward else lambda table, kind: kind([table.stored])
    optimizer = make(table, kind)
    full(torch.arange(3)).sum().backward()
    truth.step()
    optimizer.load_state_dict(truth.state_dict())
    with pytest.raises(ValueError, match=r"\(400, 4\) of the optimizer's state must be \(104, 4\)"):
        table(torch.arange(3)).sum().backward()
        optimizer.step()


def test_a_refused_group_leaves_nothing_behind():
    table, other = (Embedding(100, 8, QR(4), sparse=True) for _ in range(2))
    optimizer = optim.Adagrad(table.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight_decay \(0\.1\) must be 0"):
        optimizer.add_param_group({"params": other.parameters(), "weight_decay": 0.1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 2


def test_every_optimizer_that_has_a_name_has_an_entry_a_class_and_kernels() -> None:
    assert tuple(RULES) == get_args(Optimizer) == tuple(optim.CLASSES)
    assert {rule.kernel for rule in RULES.values()} == set(rules.STEPS)
    if kernels():
        from quorem.ops.cpu import rules as compiled

        assert {rule.kernel for rule in RULES.values() if rule.fused} == set(compiled.STEPS)

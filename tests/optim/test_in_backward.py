"""Updates within the backward pass: one step a pass, whatever is looked up in it, and no gradient left behind."""

import copy
import warnings

import pytest
import torch
from optimizers import CLASSES, NAMES, batches, collection, loss_of, oracle, run, same, twin, use
from oracles import reloaded
from refusals import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

import quorem
from quorem import optim


@pytest.fixture(params=["plain", "fused"], autouse=True)
def backend(request, monkeypatch):
    use(request.param, monkeypatch)


def pair(name: str = "Adagrad"):
    """A module updated in backward, and the same one with a dense optimizer of torch."""
    module = twin(collection())
    dense = twin(module)
    return module, optim.apply_in_backward(module, CLASSES[name], lr=0.05), dense, oracle(name, dense, 0.05)


@pytest.mark.parametrize("name", NAMES)
def test_lookups_of_one_pass_are_one_step(name):
    """Two lookups and one pooled one, of which the first two share ids."""
    module, _, dense, theirs = pair(name)
    for (ids, target), (others, _) in zip(batches(15), batches(15, seed=2), strict=True):
        theirs.zero_grad()
        for m in (module, dense):
            pooled = m(ids.T.flatten(), torch.arange(0, ids.numel() + 1))
            loss = loss_of(m, ids, target) + loss_of(m, others, target) + loss_of(m, ids, -2 * target) + pooled.sum()
            loss.backward()
        theirs.step()
        assert module.stored.grad is None
    same(module, dense)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("scheme", [quorem.QR(4), quorem.QR(4, operation="feature"), quorem.Path(4, hidden=(5,))])
def test_bags_with_weights_and_path_networks(scheme, mode):
    draw = torch.Generator().manual_seed(0)
    module = quorem.EmbeddingBag(400, 8, scheme, mode=mode, padding_idx=3, dtype=torch.float64)
    dense = copy.deepcopy(module)
    optim.apply_in_backward(module, optim.AMSGrad, lr=0.05)
    networks = [torch.optim.Adam(m.paths.parameters(), lr=0.05, amsgrad=True) for m in (module, dense) if m.paths]
    theirs = torch.optim.Adam([dense.stored], lr=0.05, amsgrad=True)
    for _ in range(12):
        ids = torch.randint(0, 400, (9,), generator=draw)
        grads = []
        for optimizer in (theirs, *networks):
            optimizer.zero_grad()
        for m in (module, dense):
            weights = None if mode == "max" else torch.linspace(0.5, 2, 9, dtype=torch.float64).requires_grad_()
            m(ids, torch.tensor([0, 2, 2, 6]), weights).square().sum().backward()
            grads.append(None if weights is None else weights.grad)
        torch.testing.assert_close(*grads) if mode != "max" else None
        for optimizer in (theirs, *networks):
            optimizer.step()
    assert module.stored.grad is None
    for (key, a), (_, b) in zip(module.state_dict().items(), dense.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")


def test_a_gradient_that_is_not_finite_is_not_hidden():
    module = quorem.Embedding(9, 4, quorem.Full())
    optim.apply_in_backward(module, optim.SGD, lr=0.1)
    module(torch.tensor([1])).backward(torch.full((1, 4), torch.nan))
    assert module.stored.isnan().any(1).nonzero().flatten().tolist() == [1]


def test_schedulers_and_lr_are_read_at_each_backward():
    module, optimizer, dense, theirs = pair("AMSGrad")
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (optimizer, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler knows that a backward was a step
        for step, (ids, target) in enumerate(batches(12)):
            theirs.zero_grad()
            loss_of(module, ids, target).backward()
            loss_of(dense, ids, target).backward()
            theirs.step()
            for scheduler in schedulers:
                scheduler.step()
            if step == 8:
                optimizer.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.2
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    same(module, dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_losses_of_float16_autocast_are_refused(dtype):
    module, scaler = quorem.Embedding(9, 4, quorem.Full()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = optim.apply_in_backward(module, optim.SGD, lr=0.1)
    before = module.to_dense().clone()
    with torch.autocast("cpu", dtype=dtype):
        loss = module(torch.tensor([1])).sum()
    if dtype == torch.bfloat16:
        loss.backward()
        assert not torch.equal(module.to_dense(), before)
    else:
        with pytest.raises(RuntimeError, match="must not be used under float16 autocast, whose losses GradScaler"):
            scaler.scale(loss).backward()
        assert torch.equal(module.to_dense(), before)
        optimizer.remove()
        scaler.scale(module(torch.tensor([1])).sum()).backward()
        scaler.step(optimizer)
        torch.testing.assert_close(before[1] - module.to_dense()[1], torch.full((4,), 0.1))


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_and_remove_gives_the_gradients_back(name):
    module, optimizer, dense, theirs = pair(name)
    run(dense, theirs, 8, 1)
    run(module, optimizer, 8, 1)
    tables, state = reloaded((module.state_dict(), optimizer.state_dict()))
    loaded = twin(collection(seed=3))
    again = optim.apply_in_backward(loaded, CLASSES[name], lr=9.0)
    run(loaded, again, 8, 5)
    loaded.load_state_dict(tables)
    again.load_state_dict(state)
    run(loaded, again, 8, 2)
    run(dense, theirs, 8, 2)
    same(loaded, dense)
    again.remove()
    loaded.sparse = True
    run(loaded, again, 8, 3)
    run(dense, theirs, 8, 3)
    assert loaded.stored.grad.is_sparse
    same(loaded, dense)


def test_remove_leaves_tables_to_an_optimizer_that_came_later():
    module, first, dense, _ = pair("Adagrad")
    first.remove()
    second = optim.apply_in_backward(module, optim.SGD, lr=0.05)
    first.remove()
    run(dense, torch.optim.SGD([dense.stored], lr=0.05), 4)
    run(module, second, 4)
    assert module.stored.grad is None
    same(module, dense)


class Weighted(nn.Module):
    """A table that is read in bags with weights, another one, and a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = quorem.EmbeddingBag(30, 4, quorem.QR(4), mode="sum", dtype=torch.float64)
        self.other = quorem.Embedding(30, 4, quorem.QR(4), dtype=torch.float64)
        self.top = torch.nn.Linear(4, 1, dtype=torch.float64)
        self.weights = torch.nn.Parameter(torch.rand(3, 2, dtype=torch.float64))

    def forward(self):
        ids = torch.tensor([[1, 2], [3, 4], [5, 5]])
        return self.top(self.bag(ids, per_sample_weights=self.weights) * self.other(ids[:, 0])).square().sum()


@pytest.mark.parametrize("ask", ["grad", "backward"])
@pytest.mark.parametrize("name", ["top.weight", "weights", "other.stored"])
def test_only_tables_that_a_pass_was_asked_for_move(name, ask):
    model, dense = Weighted(), Weighted()
    optimizers = [optim.apply_in_backward(table, optim.SGD, lr=0.1) for table in (model.bag, model.other)]
    theirs = torch.optim.SGD(dense.other.parameters(), lr=0.1)
    wanted, expected = (dict(m.named_parameters())[name] for m in (model, dense))
    if ask == "grad" and name == "other.stored":
        with pytest.raises(RuntimeError, match=r"autograd\.grad must not be asked for the gradient of a table that"):
            torch.autograd.grad(model(), wanted)
    elif ask == "grad":
        torch.testing.assert_close(torch.autograd.grad(model(), wanted), torch.autograd.grad(dense(), expected))
    else:
        model().backward(inputs=[wanted])
        dense().backward(inputs=[expected])
        if name == "other.stored":
            theirs.step()
        else:
            torch.testing.assert_close(wanted.grad, expected.grad)
    for (key, value), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
    model().backward()  # and all of them where none is named
    assert not torch.equal(model.bag.stored, dense.bag.stored)
    assert len(optimizers) == 2


def test_empty_batches_are_steps():
    module, optimizer, _, _ = pair("Adam")
    module(torch.zeros(0, 5, dtype=torch.int64)).sum().backward()
    assert int(optimizer.state[module.stored]["step"]) == 1


def test_a_pass_that_fails_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("failed on purpose")

    module, _, dense, theirs = pair("SGD")
    (ids, target), (others, _) = batches(2)
    hook = nn.Parameter(torch.ones((), dtype=torch.float64))
    failing = Fails.apply(hook)  # made first, so reached last
    with pytest.raises(ArithmeticError, match="on purpose"):
        (loss_of(module, ids, target) + failing).backward()
    assert not module.updates.collector._passes
    loss_of(module, others, target).backward()
    loss_of(dense, others, target).backward()
    theirs.step()
    same(module, dense)


def test_a_lookup_from_before_the_last_step_is_refused():
    module, _, _, _ = pair()
    ids, target = next(batches(1))
    loss = loss_of(module, ids, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the tables changed between a lookup and its backward"):
        loss.backward()


def test_checkpointed_lookups_are_one_step_or_refused():
    module, _, dense, theirs = pair("AMSGrad")
    x = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(m, ids, others, target, reentrant):
        inner = checkpoint(lambda x: loss_of(m, ids, target * x), x, use_reentrant=reentrant)
        return inner + loss_of(m, others, target)

    for (ids, target), (others, _) in zip(batches(5), batches(5, seed=2), strict=True):
        theirs.zero_grad()
        loss(module, ids, others, target, False).backward()
        loss(dense, ids, others, target, False).backward()
        theirs.step()
    same(module, dense)
    with pytest.raises(RuntimeError, match="checkpoint with use_reentrant=False"):
        loss(module, ids, others, target, True).backward()


def test_compiled_models_break_the_graph_at_the_lookup():
    module, optimizer, dense, theirs = pair()
    run(torch.compile(module, backend="aot_eager"), optimizer, 3)
    run(dense, theirs, 3)
    same(module, dense)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"updated by quorem.optim are not compiled"):
        torch.compile(module, backend="aot_eager", fullgraph=True)(torch.zeros(1, 5, dtype=torch.int64))


apply = optim.apply_in_backward
test_what_cannot_be_is_refused = refused(
    (lambda: apply(collection(), torch.optim.Adagrad), TypeError, r"optimizer_class .* must be a class of quorem"),
    (lambda: apply(collection(), "Adagrad"), TypeError, r"optimizer_class \('Adagrad'\) must be a class"),
    (lambda: apply(nn.Linear(2, 2), optim.SGD), ValueError, r"module \(Linear\) must contain a quorem table"),
    (lambda: apply([nn.Linear(2, 2)], optim.SGD), TypeError, r"module \(list\) must be an nn.Module"),
    (lambda: apply(collection(), optim.Adam, weight_decay=0.1), ValueError, r"weight_decay \(0.1\) must be 0"),
    (lambda: apply(collection(), optim.SGD, dampening=0.9), TypeError, "unexpected keyword argument 'dampening'"),
    (lambda: apply(quorem.Embedding.from_pretrained(torch.ones(4, 2)), optim.SGD), ValueError, "that is frozen"),
)


def test_tables_are_updated_by_one_optimizer_at_a_time():
    module, optimizer, _, _ = pair()
    with pytest.raises(ValueError, match=r"updated in backward already: remove\(\)"):
        optim.apply_in_backward(module, optim.Adam)
    optimizer.remove()
    optim.apply_in_backward(module, optim.Adam)


@pytest.mark.parametrize("written", ["ids", "weights"])
def test_inputs_that_are_overwritten_before_the_backward_are_refused(written):
    table = quorem.EmbeddingBag(100, 8, quorem.QR(4), mode="sum")
    optim.apply_in_backward(table, optim.Adagrad, lr=0.1)
    ids, weights = torch.tensor([1, 5, 99]), torch.ones(3)
    out = table(ids, torch.tensor([0]), weights)
    (ids if written == "ids" else weights).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["Adagrad", "RowWiseAdagrad", "Adam", "AMSGrad", "SGD"])
def test_optimizers_survive_that_a_model_becomes_double(name, in_backward):
    """The rest is then trained in float64, from the state that there is."""
    table = quorem.Embedding(100, 8, quorem.QR(4), sparse=not in_backward)
    modules = []
    for module in (table, copy.deepcopy(table).double()):
        made = optim.apply_in_backward(module, CLASSES[name]) if in_backward else CLASSES[name](module.parameters())
        made.param_groups[0]["lr"] = 0.1
        modules.append((module, made))
    for step in range(4):
        if step == 2:
            table.double()
        for module, optimizer in modules:
            optimizer.zero_grad()
            module(torch.tensor([1, 5, 99])).square().sum().backward()
            optimizer.step()
    assert table.stored.dtype == torch.float64
    torch.testing.assert_close(table.to_dense(), modules[1][0].to_dense(), rtol=1e-5, atol=1e-6)

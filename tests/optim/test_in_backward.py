"""Updates within the backward pass: one step a pass, whatever is looked up in it, and no gradient left behind."""

import copy
import io
import math
import warnings

import pytest
import torch
from optimizers import CLASSES, NAMES, batches, collection, loss_of, oracle, twin, use
from torch import nn
from torch.utils.checkpoint import checkpoint

import quorem
from quorem import optim


@pytest.fixture(params=["plain", "fused"], autouse=True)
def backend(request, monkeypatch):
    use(request.param, monkeypatch)


def pair(name: str = "Adagrad", **options):
    """A module updated in backward, and the same one with a dense optimizer of torch."""
    module = twin(collection())
    dense = twin(module)
    return module, optim.apply_in_backward(module, CLASSES[name], lr=0.05, **options), dense, oracle(name, dense, 0.05)


def same(module, dense, tolerance=1e-12):
    for (key, a), (_, b) in zip(module.named_tables(), dense.named_tables(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_lookups_of_one_pass_are_one_step(name):
    """Two lookups and one pooled one, of which the first two share ids."""
    module, _, dense, theirs = pair(name)
    for (ids, target), (others, _) in zip(batches(15), batches(15, seed=2), strict=True):
        theirs.zero_grad()
        for m in (module, dense):
            pooled = m(ids.T.flatten(), torch.arange(0, ids.numel() + 1))
            (
                loss_of(m, ids, target) + loss_of(m, others, target) + loss_of(m, ids, -2 * target) + pooled.sum()
            ).backward()
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


def test_every_table_of_a_model_and_nothing_else():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = quorem.Embedding(90, 8, quorem.QR(4)), quorem.Embedding(50, 8, quorem.Full())
            self.shared = self.items
            self.top = nn.Linear(8, 1)

        def forward(self, ids):
            return self.top(self.users(ids) * self.items(ids % 50) + self.shared(ids % 7))

    model = Model()
    expected = copy.deepcopy(model)
    optim.apply_in_backward(model, optim.SGD, lr=0.1)
    theirs = torch.optim.SGD([expected.users.stored, expected.items.stored], lr=0.1)
    ids = torch.tensor([1, 2, 1, 89])
    model(ids).sum().backward()
    expected(ids).sum().backward()
    theirs.step()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["top.weight", "top.bias"]
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_clipping_by_value_is_that_of_the_summed_gradient(name):
    module, _, dense, theirs = pair(name, clip_value=0.5)
    for ids, target in batches(12):
        theirs.zero_grad()
        loss_of(module, ids, target).backward()
        loss_of(dense, ids, target).backward()
        torch.nn.utils.clip_grad_value_([dense.stored], 0.5)
        theirs.step()
    same(module, dense)


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
@pytest.mark.parametrize("name", NAMES)
def test_loss_scaling_is_undone(name, scale):
    module, optimizer, dense, theirs = pair(name, loss_scale=1.0)
    optimizer.loss_scale = scale
    for ids, target in batches(12):
        theirs.zero_grad()
        (loss_of(module, ids, target) * 1024).backward()
        loss_of(dense, ids, target).backward()
        theirs.step()
    same(module, dense)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_overflows_under_loss_scaling_takes_its_gradient_as_zero(name):
    module, _, dense, theirs = pair(name, loss_scale=4.0)
    for step, (ids, target) in enumerate(batches(9)):
        ids = torch.arange(3)[:, None].expand(3, ids.shape[1]) + 10 * (step % 2)
        target[:, :4] = 0  # the last table alone has a gradient, so one id is one row
        theirs.zero_grad()
        loss_of(dense, ids, target * torch.tensor([1.0, 0.0, 1.0])[:, None, None]).backward()
        theirs.step()
        target[1] = torch.inf
        target[1, :4] = 0
        out = module(ids)
        out.backward(target * 4)
    same(module, dense)


@pytest.mark.parametrize("name", ["SGD", "RowWiseAdagrad", "AMSGrad"])
@pytest.mark.parametrize("lookups", [1, 2])
def test_a_row_overflows_as_a_whole_where_another_table_is_narrower(name, lookups):
    """One infinite element in a row of eight columns, which are two rows of ``stored``."""
    module, _, dense, theirs = pair(name, loss_scale=4.0)
    assert module.stored.shape[1] == 4
    ids, grad = torch.arange(3)[:, None].expand(3, 5), torch.zeros(3, 5, 8, dtype=torch.float64)
    grad[:, 4] = torch.tensor([[1.0], [0.0], [1.0]])
    theirs.zero_grad()
    dense(ids).backward(lookups * grad)
    theirs.step()
    grad[1, 4], grad[1, 4, 6] = 1.0, torch.inf
    sum(module(ids) for _ in range(lookups)).backward(4 * grad)
    same(module, dense)


def test_an_unscaled_gradient_that_is_not_finite_is_not_hidden():
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
                optimizer.lr = theirs.param_groups[0]["lr"] = 0.2
    assert optimizer.lr == theirs.param_groups[0]["lr"]
    same(module, dense)


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_and_remove_gives_the_gradients_back(name):
    module, optimizer, dense, theirs = pair(name)

    def train(m, o, seed):
        for ids, target in batches(8, seed=seed):
            o.zero_grad()
            loss_of(m, ids, target).backward()
            o.step()

    train(dense, theirs, 1)
    train(module, optimizer, 1)
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    tables, state = torch.load(file)
    loaded = twin(collection(seed=3))
    again = optim.apply_in_backward(loaded, CLASSES[name], lr=9.0)
    train(loaded, again, 5)
    loaded.load_state_dict(tables)
    again.load_state_dict(state)
    train(loaded, again, 2)
    train(dense, theirs, 2)
    same(loaded, dense)
    again.remove()
    loaded.sparse = True
    train(loaded, again, 3)
    train(dense, theirs, 3)
    assert loaded.stored.grad.is_sparse
    same(loaded, dense)


def test_no_step_without_a_gradient_for_the_tables():
    module, optimizer, dense, _ = pair("Adam")
    ids, target = next(batches(1))
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        loss_of(module, ids, target)
    torch.autograd.grad(loss_of(module, ids, target) * x, x)
    assert int(optimizer.state[module.stored]["step"]) == 0
    same(module, dense, 0)


class Weighted(torch.nn.Module):
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


def test_a_gradient_of_a_gradient_is_refused():
    module, _, _, _ = pair()
    ids, target = next(batches(1))
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        loss_of(module, ids, target).backward(create_graph=True)


def test_compiled_models_break_the_graph_at_the_lookup():
    module, _, dense, theirs = pair()
    compiled = torch.compile(module, backend="aot_eager")
    for ids, target in batches(3):
        theirs.zero_grad()
        loss_of(compiled, ids, target).backward()
        loss_of(dense, ids, target).backward()
        theirs.step()
    same(module, dense)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="apply_in_backward is not compiled"):
        torch.compile(module, backend="aot_eager", fullgraph=True)(ids)


@pytest.mark.parametrize(
    ("module", "optimizer_class", "options", "error", "message"),
    [
        (collection(), torch.optim.Adagrad, {}, TypeError, r"optimizer_class .* must be a class of quorem.optim"),
        (collection(), "Adagrad", {}, TypeError, r"optimizer_class \('Adagrad'\) must be a class"),
        (nn.Linear(2, 2), optim.SGD, {}, ValueError, r"module \(Linear\) must contain a quorem table"),
        ([nn.Linear(2, 2)], optim.SGD, {}, TypeError, r"module \(list\) must be an nn.Module"),
        (collection(), optim.SGD, {"clip_value": -1.0}, ValueError, r"clip_value \(-1.0\) must be positive"),
        (collection(), optim.SGD, {"loss_scale": 0.0}, ValueError, r"loss_scale \(0.0\) must be positive and finite"),
        (collection(), optim.SGD, {"loss_scale": math.nan}, ValueError, r"loss_scale \(nan\) must be positive and"),
        (collection(), optim.SGD, {"loss_scale": torch.ones(2)}, ValueError, r"loss_scale has shape \(2,\) but must"),
        (twin(collection()), optim.Adam, {"weight_decay": 0.1}, ValueError, r"weight_decay \(0.1\) must be 0"),
        (collection(), optim.SGD, {"dampening": 0.9}, TypeError, "unexpected keyword argument 'dampening'"),
        (collection(), optim.SGD, {"rounding_seed": 0.5}, TypeError, r"rounding_seed \(0.5\) must be an integer"),
        (quorem.Embedding.from_pretrained(torch.ones(4, 2)), optim.SGD, {}, ValueError, "that is frozen"),
    ],
)
def test_what_cannot_be_is_refused(module, optimizer_class, options, error, message):
    with pytest.raises(error, match=message):
        optim.apply_in_backward(module, optimizer_class, **options)


def test_tables_are_updated_by_one_optimizer_at_a_time():
    module, optimizer, _, _ = pair()
    with pytest.raises(ValueError, match=r"updated in backward already: remove\(\)"):
        optim.apply_in_backward(module, optim.Adam)
    optimizer.remove()
    optim.apply_in_backward(module, optim.Adam)

"""Under Adam and AMSGrad rows lag behind: whoever reads or writes them meets rows that are up to date.

The oracle is a dense twin under ``torch.optim``, in float64, which takes the same steps and is read in the same way.
"""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from oracles import reloaded
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, optim
from quorem.ops.lagging import LaggingParameter, in_memory

N, D = 40, 4
IDS = torch.tensor([1, 31, 39])
OPTIMIZERS = {
    "Adam": (optim.Adam, torch.optim.Adam, {}),
    "AMSGrad": (optim.AMSGrad, torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
}


class Pair:
    """A table whose rows lag behind, its dense twin, and their optimizers."""

    def __init__(self, name: str = "Adam", *, in_backward: bool = False, module: nn.Module | None = None) -> None:
        ours, theirs, options = OPTIMIZERS[name]
        torch.manual_seed(0)
        self.table = module or Embedding(N, 4, QR(4), sparse=not in_backward, dtype=torch.float64)
        self.twin = copy.deepcopy(self.table)
        self.twin.sparse = False
        own = {key: value for key, value in options.items() if key != "amsgrad"}
        if in_backward:
            self.optimizer = optim.apply_in_backward(self.table, ours, lr=0.1, **own)
        else:
            self.optimizer = ours(self.table.parameters(), lr=0.1, **own)
        self.truth = theirs(self.twin.parameters(), lr=0.1, **options)
        self.step(range(0, N, 3))

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.table, self.twin

    def check(self) -> None:
        torch.testing.assert_close(self.table.stored, self.twin.stored, rtol=0, atol=1e-10)
        torch.testing.assert_close(self.table.to_dense(), self.twin.to_dense(), rtol=0, atol=1e-10)

    def step(self, *batches: object) -> None:
        for ids in batches or ([1, 2], [3], [2, 39]):
            for module, optimizer in ((self.table, self.optimizer), (self.twin, self.truth)):
                optimizer.zero_grad()
                shape = (-1, 2) if isinstance(module, EmbeddingCollection | EmbeddingBag) else (-1,)
                module(torch.tensor([*ids, *ids]).view(shape)).square().sum().backward()  # type: ignore[misc]
                optimizer.step()

    def lag(self) -> None:
        self.step()
        assert type(self.table.stored) is LaggingParameter and isinstance(self.table.stored, nn.Parameter)
        assert not torch.allclose(in_memory(self.table.stored), self.twin.stored, rtol=0, atol=1e-6)


def parameter(module: nn.Module) -> nn.Parameter:
    return next(module.parameters())


def saved(value: object) -> Tensor:
    loaded: Tensor = reloaded({"value": value}, weights_only=True)["value"]
    assert type(loaded) in (Tensor, nn.Parameter)
    return loaded


def copied_out(module: nn.Module) -> Tensor:
    return torch.zeros(parameter(module).shape, dtype=torch.float64).copy_(parameter(module).detach())


READERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "stored": lambda m: m.stored + 0,
    "parameters_to_vector": lambda m: parameters_to_vector(m.parameters()),
    "functional_call": lambda m: functional_call(m, dict(m.named_parameters()), torch.arange(N)),
    "functional_call with values": lambda m: functional_call(
        m, {k: v.detach().clone() for k, v in m.named_parameters()}, torch.arange(N)
    ),
    "detach": lambda m: parameter(m).detach().clone(),
    "data": lambda m: parameter(m).data.clone(),
    "numpy": lambda m: torch.from_numpy(parameter(m).detach().numpy().copy()),
    "copy_": copied_out,
    "foreach": lambda m: torch._foreach_mul([parameter(m)], 2.0)[0],
    "norm": lambda m: torch.linalg.vector_norm(parameter(m)),
    "item": lambda m: torch.tensor(parameter(m)[5, 1].item()),
    "list": lambda m: torch.tensor(parameter(m).tolist()),
    "deepcopy of the module": lambda m: copy.deepcopy(m).stored,
    "deepcopy of the parameter": lambda m: copy.deepcopy(parameter(m)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).stored,
    "torch.save": lambda m: saved(parameter(m)),
    "state_dict": lambda m: torch.cat([saved(v).double().flatten() for v in m.state_dict().values()]),
    "autograd": lambda m: torch.autograd.grad(parameter(m).square().sum(), parameter(m))[0],
    "compile": lambda m: torch.compile(lambda p: p * 2, backend="eager")(parameter(m)),
    "to": lambda m: parameter(m).to(torch.float32),
    "float": lambda m: copy.deepcopy(m).float().stored,
    "to_dense": lambda m: m.to_dense(),
    "named_tables": lambda m: torch.cat([table.flatten() for _, table in m.named_tables()]),
    "vmap": lambda m: torch.vmap(m)(IDS[None]),
    "inference mode": lambda m: torch.inference_mode()(lambda: m(torch.arange(N)))(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_readers_see_rows_that_are_up_to_date(name: str, reader: str) -> None:
    pair = Pair(name)
    for _ in range(2):
        pair.lag()
        torch.testing.assert_close(READERS[reader](pair.table), READERS[reader](pair.twin), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_average_of_weights_is_that_of_dense_training(name: str, in_backward: bool) -> None:
    pair = Pair(name, in_backward=in_backward)
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in pair.both]
    for _ in range(5):
        pair.lag()
        for average, module in zip(averages, pair.both, strict=True):
            average.update_parameters(module)
    torch.testing.assert_close(averages[0].module.stored, averages[1].module.stored, rtol=0, atol=1e-10)
    pair.check()


def test_an_average_over_integers_is_refused() -> None:
    """torch averages them as float32 and cuts them off, so that ids would read other rows."""
    module = Embedding(1000, 8, QR(7, operation="add"))
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    assert torch.equal(average(IDS), module(IDS))
    for _ in range(3):
        average.update_parameters(module)
    with pytest.raises(RuntimeError, match=r"integers of 'Embedding' were overwritten.*average parameters only"):
        average(IDS)
    with pytest.raises(RuntimeError, match="were overwritten"):
        average.module.row_numbers(IDS)
    assert module(IDS).isfinite().all()


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_under_vmap(in_backward: bool) -> None:
    pair = Pair(in_backward=in_backward)
    pair.lag()
    for module, optimizer in zip(pair.both, (pair.optimizer, pair.truth), strict=True):
        optimizer.zero_grad()
        (torch.vmap(module) if module is pair.table else module)(IDS[None]).square().sum().backward()
        optimizer.step()
    pair.check()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_takes_over(name: str, foreach: bool) -> None:
    pair = Pair(name)
    pair.lag()
    pair.table.sparse = False
    pair.optimizer = torch.optim.SGD(pair.table.parameters(), lr=0.1, foreach=foreach)
    pair.truth = torch.optim.SGD(pair.twin.parameters(), lr=0.1, foreach=foreach)
    pair.step()
    pair.step()
    pair.check()


def test_a_view_from_before_the_steps_is_read_by_functional_call() -> None:
    pair = Pair()
    views = [{name: p.detach() for name, p in m.named_parameters()} for m in pair.both]
    pair.lag()
    outputs = [functional_call(m, v, torch.arange(N)) for m, v in zip((pair.table, pair.twin), views, strict=True)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.mul_(0.5),
        lambda p: p.__setitem__(3, 0.0),
        lambda p: p.data.mul_(0.5),
        lambda p: p.detach()[::2].zero_(),
        lambda p: p.copy_(torch.ones(p.shape)),
        lambda p: setattr(p, "data", torch.ones_like(p)),
        lambda p: torch._foreach_mul_([p], 0.5),
        lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(3)),
    ],
)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_others_write_stays(write: Callable[[Tensor], object], name: str, in_backward: bool) -> None:
    """And training goes on as under torch's optimizer: averages decay by the steps that the rows missed."""
    pair = Pair(name, in_backward=in_backward)
    pair.lag()
    with torch.no_grad():
        for module in pair.both:
            write(parameter(module))
    pair.check()
    pair.step()
    pair.check()


def test_training_loops_do_not_bring_every_row_up_to_date() -> None:
    """Gradients, shapes and norms of gradients are asked for in every step."""
    pair = Pair(in_backward=True)
    pair.lag()
    before, p = in_memory(pair.table.stored).clone(), pair.table.stored
    assert (p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, len(p)) == (
        *(before.shape, before.dtype, before.device),
        *(True, True, len(before)),
    )
    nn.utils.clip_grad_norm_(pair.table.parameters(), 1.0)
    pair.table.zero_grad()
    pair.optimizer.zero_grad()
    assert {p: 1}[p] == 1 and torch.zeros_like(p).sum() == 0
    pair.table(torch.tensor([1]))
    assert torch.equal(in_memory(p)[20:], before[20:])


def test_a_parameter_is_plain_where_no_row_lags_behind() -> None:
    table = Embedding(N, 4, QR(4), sparse=True)
    run = [optim.Adagrad(table.parameters()), optim.Adam(table.parameters()), optim.SGD(table.parameters(), lr=0.1)]
    kinds = []
    for optimizer in run:
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        kinds.append(type(table.stored))
    assert kinds == [nn.Parameter, LaggingParameter, nn.Parameter]
    assert type(copy.deepcopy(table).stored) is nn.Parameter


def test_a_conversion_ends_the_lag_and_a_step_begins_it_again() -> None:
    pair = Pair()
    pair.lag()
    pair.table.float()
    assert type(pair.table.stored) is nn.Parameter
    torch.testing.assert_close(pair.table.stored.double(), pair.twin.stored, rtol=1e-6, atol=1e-7)
    pair.table.double()
    pair.lag()
    torch.testing.assert_close(pair.table.stored, pair.twin.stored, rtol=1e-5, atol=1e-6)
    stored = pair.table.stored
    pair.table.to(torch.float64)  # changes nothing
    assert pair.table.stored is stored and type(stored) is LaggingParameter


class OwnParameter(nn.Parameter):
    pass


def test_a_parameter_of_another_class_is_refused() -> None:
    table = Embedding(N, 4, QR(4), sparse=True)
    table.stored = OwnParameter(table.stored.detach().clone())
    with pytest.raises(ValueError, match=r"parameter \(OwnParameter\) must be an nn.Parameter: under AMSGrad rows lag"):
        optim.AMSGrad(table.parameters())
    optim.Adagrad(table.parameters())


def test_a_compiled_reader_of_a_whole_graph_is_refused() -> None:
    pair = Pair()
    pair.lag()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda p: p * 2, backend="eager", fullgraph=True)(pair.table.stored)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize("capture", ["export", "trace"])
def test_captured_graphs_hold_rows_that_are_up_to_date(capture: str, kind: type[Embedding], in_backward: bool) -> None:
    pair = Pair("AMSGrad", in_backward=in_backward, module=kind(N, D, QR(4), sparse=not in_backward).double())
    pair.lag()
    ids = IDS[:, None] if kind is EmbeddingBag else IDS
    if capture == "trace":
        traced = torch.jit.trace(pair.table, (ids,))
        graph = str(traced.graph)
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="rows that lag behind must not be read"):
            torch.export.export(pair.table, (ids,), strict=True)
        exported = torch.export.export(pair.table, (ids,), strict=False)
        traced, graph = exported.module(), str(exported.graph)
    torch.testing.assert_close(traced(ids), pair.twin(ids), rtol=0, atol=1e-10)
    assert "catch_up" not in graph
    pair.check()


def test_what_is_written_just_before_a_step_stays() -> None:
    pair = Pair()
    pair.lag()
    for module in pair.both:
        module.zero_grad()
        module(IDS).sum().backward()
        with torch.no_grad():
            parameter(module).fill_(0.25)
    pair.optimizer.step()
    pair.truth.step()
    pair.check()


@pytest.mark.parametrize("other", [optim.Adam, optim.Adagrad])
def test_two_optimizers_may_take_turns(other: type[optim.RowOptimizer]) -> None:
    pair = Pair()
    first, pair.optimizer = pair.optimizer, other(pair.table.parameters(), lr=0.05)
    dense, pair.truth = pair.truth, other.torch_class(pair.twin.parameters(), lr=0.05)
    for _ in range(3):
        pair.step()
        first, pair.optimizer, dense, pair.truth = pair.optimizer, first, pair.truth, dense
    pair.check()


LOSSES = {
    "to_dense": lambda table: table.to_dense().square().sum(),
    "weight": lambda table: (torch.eye(D) @ table.weight.T).logsumexp(1).sum(),
    "score": lambda table: table.score(torch.eye(D)).logsumexp(1).sum(),
    "stored": lambda table: table.stored.square().sum(),
}


@pytest.mark.parametrize("scheme", [QR(4), Full()], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_the_whole_table_are_applied_in_backward(name: str, scheme: object) -> None:
    """Full softmax and L2 among them, beside lookups in the same pass."""
    torch.manual_seed(0)
    table = Embedding(N, D, scheme)
    dense = copy.deepcopy(table)
    optimizer = optim.apply_in_backward(table, optim.Adagrad, lr=0.1)
    truth = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    for _ in range(3):
        for module in (table, dense):
            (LOSSES[name](module) + module(IDS).sum()).backward()
        truth.step()
        truth.zero_grad()
    assert table.stored.grad is None
    torch.testing.assert_close(table.stored, dense.stored)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        LOSSES[name](table).backward(create_graph=True)
    optimizer.remove()
    LOSSES[name](table).backward()
    assert table.stored.grad is not None

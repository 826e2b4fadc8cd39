"""Optimizers that exist already are followed, wherever they are, or the swap is refused before it changes anything."""

import gc

import pytest
import torch
from torch import Tensor, nn

from quorem import QR, ChineseRemainder, Embedding, HotCold, Path, compress_, decompress_, optim, quantize_
from quorem.paper.schemes import Scheme

IDS = torch.arange(300)
STATE_IS_KEPT = ("Adagrad", "Adam", "AdamW", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
STATE_IS_LOST = ("Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Rprop")


def model_of(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 8, **options), nn.Linear(8, 1, bias=False))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure():
        optimizer.zero_grad()
        loss = (model(IDS) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def moves(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes every parameter of the model."""
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    return all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", (*STATE_IS_KEPT, *STATE_IS_LOST))
@pytest.mark.parametrize("steps", [0, 2])
def test_any_optimizer_of_torch_is_followed_or_refused_with_the_reason(name, steps):
    model = model_of()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    weight, state = model[0].weight.detach().clone(), len(optimizer.state)
    if steps and name in STATE_IS_LOST:
        rule = "history over all parameters" if name == "LBFGS" else "which cannot be converted: change the model"
        with pytest.raises(ValueError, match=rf"optimizer \({name}\) has .*{rule}"):
            compress_(model, QR(4), fit=True)
        assert torch.equal(model[0].weight, weight) and len(optimizer.state) == state
    else:
        compress_(model, QR(4), fit=True)
    assert moves(model, optimizer)


@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_of_dense_gradients_ours_and_torchs_have_the_same_state_afterwards(name):
    states = []
    for module in (optim, torch.optim):
        model = model_of()
        optimizer = getattr(module, name)(model.parameters(), lr=0.1)
        step(model, optimizer)
        report = compress_(model, QR(4, width=4), fit=True)
        assert report.references == [f"{name} now has the rows of 1 tables, and their state"]
        step(model, optimizer)
        states.append({key: value.clone() for key, value in optimizer.state[model[0].stored].items()})
        decompress_(model, optimizer=optimizer)
        assert moves(model, optimizer)
    torch.testing.assert_close(*states)


class Trainer:
    """An object outside the model, as RecBole's and fastai's trainers are."""

    def __init__(self, model):
        self.optim = {"all": torch.optim.Adam(model.parameters(), lr=0.1)}


class Holds(nn.Module):
    """FuxiCTR makes its optimizer in the constructor, DeepCTR-Torch in ``compile``."""

    def __init__(self):
        super().__init__()
        self.tables = model_of()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, ids):
        return self.tables(ids)


class Wrapper(torch.optim.Optimizer):
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()


def test_one_on_the_model_in_a_trainer_or_wrapped_is_followed_without_asking():
    model = Holds()
    compress_(model, QR(4))
    assert moves(model, model.optimizer)
    model = model_of()
    trainer = Trainer(model)
    report = compress_(model, QR(4))
    assert moves(model, trainer.optim["all"])
    assert report.references == ["Adam now has the rows of 1 tables, and their state"]
    model = model_of()
    wrapper = Wrapper(torch.optim.RMSprop(model.parameters()))
    compress_(model, budget="8kB", optimizer=wrapper)
    assert moves(model, wrapper)


def test_the_state_that_will_exist_counts_though_nobody_passed_the_optimizer():
    model = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    report = compress_(model, budget="60kB")
    assert report.state_bytes > 0 and report.bytes_after + report.state_bytes <= 60_000
    assert optimizer.param_groups[0]["params"][0] is model[0].stored
    other = torch.optim.Adagrad(model_of().parameters())
    pair = nn.Sequential(nn.Embedding(3000, 8), nn.Embedding(3000, 8))
    both = torch.optim.Adam([pair[0].weight]), torch.optim.SGD([pair[1].weight], lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer \(Adam, SGD\) must be one whose state can be counted"):
        compress_(pair, budget="60kB")
    with pytest.raises(ValueError, match=r"optimizer \(LBFGS\) must be one whose state can be counted"):
        compress_(model_of(), budget="60kB", optimizer=torch.optim.LBFGS(model.parameters()))
    assert both and other


def test_a_group_without_an_optimizer_is_refused():
    model = model_of()
    groups = [{"params": [model[0].weight], "lr": 0.1}]
    with pytest.raises(ValueError, match=r"a parameter group \(lr, params\) that belongs to no torch.optim.Optimizer"):
        compress_(model, QR(4))
    assert type(model[0]) is nn.Embedding and groups


def test_one_that_keeps_parameters_in_a_list_of_its_own_is_refused():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.all_params = list(model.parameters())  # as ZeroRedundancyOptimizer does
    with pytest.raises(ValueError, match=r"optimizer \(SGD\) also holds a table in all_params: change"):
        compress_(model, QR(4))
    assert type(model[0]) is nn.Embedding


def test_networks_of_paths_have_a_state_under_adagrad_and_the_initial_value_counts_once():
    model = model_of()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    compress_(model, Path(4, (3,), force=True))
    assert (optimizer.state[model[0].stored]["sum"] == 0.5).all()
    assert moves(model, optimizer)


def test_decompress_is_followed_and_asks_before_a_state_is_lost():
    model = model_of()
    compress_(model, QR(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    with pytest.raises(ValueError, match=r"optimizer \(Adam\) has a state of composed .* pass optimizer=optimizer"):
        decompress_(model)
    assert type(model[0]) is Embedding
    decompress_(model, optimizer=optimizer)
    assert type(model[0]) is nn.Embedding and moves(model, optimizer) and len(optimizer.state) == 2


def test_the_state_of_a_full_table_is_kept():
    model = nn.Sequential(Embedding(300, 8), nn.Linear(8, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = optimizer.state[model[0].stored]["exp_avg"].clone()
    decompress_(model)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], state) and moves(model, optimizer)


def test_tables_that_are_updated_in_the_backward_pass_are_not_decompressed():
    model = nn.Sequential(Embedding(300, 8, QR(4)))
    optimizer = optim.apply_in_backward(model, optim.Adagrad, lr=0.1)
    with pytest.raises(ValueError, match=r"0 is updated in the backward pass: remove\(\) that optimizer first"):
        decompress_(model)
    optimizer.remove()


def test_quantized_rows_leave_their_optimizer():
    gc.collect()
    model = nn.Sequential(Embedding(300, 8, QR(4)), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    with pytest.warns(UserWarning, match="Adam no longer trains the tables: rows of 8 bits"):
        quantize_(model)
    assert len(optimizer.param_groups[0]["params"]) == len(optimizer.state) == 2


N, D = 60, 4
SCHEMES = [QR(4), QR(4, operation="add"), QR(4, operation="concat"), ChineseRemainder(3), HotCold(9, cold=QR(3))]


def batches(module: nn.Module) -> list[Tensor]:
    """Ids of which no two read a row of the largest table together, so that squares add up."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(N, (1,), generator=draw) for _ in range(40)]


def slope_step(module: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    slopes = torch.sin(ids[:, None] * torch.arange(1.0, D + 1))
    (module(ids) * slopes).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_state_is_what_the_rows_would_have(kind: type[torch.optim.Optimizer], scheme: Scheme) -> None:
    """A table that is composed, and the composed module, see the same gradients at a learning rate of zero."""
    source = Embedding(N, D, scheme, init_std=1.0)
    source.fit_(source.to_dense().detach() + 0)  # as a fit leaves it
    model = nn.Sequential(nn.Embedding.from_pretrained(source.to_dense().detach(), freeze=False))
    own, other = kind(source.parameters(), lr=0.0), kind(model.parameters(), lr=0.0)
    for ids in batches(source):
        slope_step(source, ids, own)
        slope_step(model, ids, other)
    compress_(model, scheme, fit=True, optimizer=other)
    torch.testing.assert_close(model[0].stored, source.stored, rtol=1e-4, atol=1e-5)
    assert other.param_groups[0]["params"] == [model[0].stored] and list(other.state) == [model[0].stored]
    for name, value in own.state[source.stored].items():
        torch.testing.assert_close(other.state[model[0].stored][name], value, rtol=1e-3, atol=1e-5)


PAIRS = [
    (torch.optim.Adagrad, optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.Adagrad, optim.Adagrad, {"lr": 0.1}),
]


def trained(fused: bool, kind: type, row_kind: type, options: dict[str, float]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 4), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), **options)
    for step in range(8):
        if step == 2:
            compress_(model, QR(4, operation="add"), fit=True)
        if step == 4 and fused:
            optim.apply_in_backward(model, row_kind, state_from=optimizer, **options)
            assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(1, 4), (1,)]
        optimizer.zero_grad()
        model(torch.tensor([step, 7, 59])).square().sum().backward()
        optimizer.step()
    return model[0].to_dense().detach()


@pytest.mark.parametrize(("kind", "row_kind", "options"), PAIRS)
def test_the_rows_move_as_if_nothing_had_changed(kind, row_kind, options):
    torch.testing.assert_close(*(trained(fused, kind, row_kind, options) for fused in (True, False)))


def test_a_state_of_another_rule_is_refused():
    model = nn.Sequential(nn.Embedding(60, 4))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    compress_(model, QR(4))
    with pytest.raises(ValueError, match=r"state_from \(Adam\) must be one of Adam's rule"):
        optim.apply_in_backward(model, optim.Adam, state_from=optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 1

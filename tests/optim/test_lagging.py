"""Under Adam and AMSGrad rows lag behind: whatever reads or writes them meets rows that are up to date."""

import copy

import pytest
import torch

from quorem import QR, Embedding, EmbeddingBag, Full
from quorem.optim import SGD, Adagrad, Adam, AMSGrad, RowOptimizer, apply_in_backward

N, D = 60, 8
IDS = torch.tensor([1, 31, 59])
KINDS = ["sparse", "in backward"]
STEPS = [torch.arange(N), *[torch.tensor([1, 2])] * 5]


class Pair:
    """A table whose rows lag behind, and the same under torch's optimizer, which moves every row in every step."""

    def __init__(self, kind: str, optimizer: type[RowOptimizer] = Adam, module: type[Embedding] = Embedding) -> None:
        torch.manual_seed(0)
        self.table = module(N, D, QR(4), sparse=kind == "sparse", dtype=torch.float64)
        self.dense = Embedding(N, D, QR(4), dtype=torch.float64)
        self.dense.load_state_dict(self.table.state_dict())
        in_backward = kind == "in backward"
        options = {"lr": 0.1}
        make = apply_in_backward if in_backward else lambda table, kind, lr: kind(table.parameters(), lr=lr)
        self.optimizer = make(self.table, optimizer, **options)
        self.truth = torch.optim.Adam(self.dense.parameters(), amsgrad=optimizer is AMSGrad, **options)
        self.train()

    def train(self) -> None:
        for ids in STEPS:
            for table, optimizer in ((self.table, self.optimizer), (self.dense, self.truth)):
                optimizer.zero_grad()
                vectors = table(ids[:, None]) if isinstance(table, EmbeddingBag) else table(ids)
                vectors.square().sum().backward()
                optimizer.step()

    def check(self) -> None:
        torch.testing.assert_close(self.table.to_dense(), self.dense.to_dense())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_rows_that_are_up_to_date(kind: str, strict: bool) -> None:
    pair = Pair(kind)
    exported = torch.export.export(pair.table, (IDS,), strict=strict)
    torch.testing.assert_close(exported.module()(IDS), pair.dense(IDS))
    assert not any("catch_up" in str(node.target) for node in exported.graph.nodes)
    pair.check()


@pytest.mark.parametrize("kind", KINDS)
def test_bags_are_exported_and_traced_up_to_date(kind: str) -> None:
    pair = Pair(kind, AMSGrad, EmbeddingBag)
    traced = torch.jit.trace(pair.table, (IDS[:, None],))
    torch.testing.assert_close(traced(IDS[:, None]), pair.dense(IDS))
    pair.train()
    exported = torch.export.export(pair.table, (IDS[:, None],))
    torch.testing.assert_close(exported.module()(IDS[:, None]), pair.dense(IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_traces_hold_rows_that_are_up_to_date(kind: str) -> None:
    pair = Pair(kind)
    traced = torch.jit.trace(pair.table, (IDS[:2],))
    torch.testing.assert_close(traced(IDS), pair.dense(IDS))
    assert "catch_up" not in str(traced.graph)


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_reads_rows_that_are_up_to_date(kind: str) -> None:
    pair = Pair(kind)
    torch.testing.assert_close(torch.vmap(pair.table)(IDS[None]), pair.dense(IDS[None]))
    pair.truth.zero_grad()
    pair.optimizer.zero_grad()
    torch.vmap(pair.table)(IDS[None]).square().sum().backward()
    pair.dense(IDS[None]).square().sum().backward()
    pair.optimizer.step()
    pair.truth.step()
    pair.check()


def test_what_is_written_just_before_a_step_stays() -> None:
    pair = Pair("sparse")
    for module in (pair.table, pair.dense):
        module.zero_grad()
        module(IDS).sum().backward()
        with torch.no_grad():
            next(module.parameters()).fill_(0.25)
    pair.optimizer.step()
    pair.truth.step()
    pair.check()


@pytest.mark.parametrize("other", [Adam, Adagrad])
def test_two_optimizers_may_take_turns(other: type[RowOptimizer]) -> None:
    pair = Pair("sparse")
    first, pair.optimizer = pair.optimizer, other(pair.table.parameters(), lr=0.05)
    dense, pair.truth = pair.truth, other.torch_class(pair.dense.parameters(), lr=0.05)
    for _ in range(2):
        pair.train()
        first, pair.optimizer, dense, pair.truth = pair.optimizer, first, pair.truth, dense
    pair.train()
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
    apply_in_backward(table, Adagrad, lr=0.1)
    truth = torch.optim.Adagrad(dense.parameters(), lr=0.1)
    for _ in range(3):
        for module in (table, dense):
            (LOSSES[name](module) + module(IDS).sum()).backward()
        truth.step()
        truth.zero_grad()
    assert table.stored.grad is None
    torch.testing.assert_close(table.stored, dense.stored)


def test_after_remove_a_loss_on_the_whole_table_leaves_a_gradient() -> None:
    table = Embedding(N, D, QR(4))
    apply_in_backward(table, SGD, lr=0.1).remove()
    before = table.stored.detach().clone()
    table.to_dense().sum().backward()
    assert table.stored.grad is not None and torch.equal(table.stored, before)


def test_a_gradient_of_a_gradient_of_the_whole_table_is_refused() -> None:
    table = Embedding(N, D, QR(4))
    apply_in_backward(table, SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        table.to_dense().sum().backward(create_graph=True)

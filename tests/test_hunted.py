"""Defects that were found from outside, each as it was found."""

import copy

import pytest
import torch
from torch import nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, HotCold, Path, Pool, Table, optim
from quorem.optim import Adagrad, apply_in_backward

IDS = torch.tensor([1, 5, 99])


class Scaled(Embedding):
    """A subclass with a parameter, a buffer and a state of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(3))
        self.note = "new"

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_state_dict_keeps_what_a_subclass_adds_and_loading_misses_it():
    first, second = Scaled(100, 8, QR(4)), Scaled(100, 8, QR(4))
    with torch.no_grad():
        first.scale.fill_(3)
        first.seen.fill_(7)
    first.note = "kept"
    second.load_state_dict(first.state_dict())
    assert float(second.scale) == 3 and second.seen.tolist() == [7, 7, 7] and second.note == "kept"
    with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
        second.load_state_dict(Embedding(100, 8, QR(4)).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*seen"):
        Embedding(100, 8, QR(4)).load_state_dict(first.state_dict())


@pytest.mark.parametrize("written", ["ids", "weights"])
def test_inputs_that_are_overwritten_before_the_backward_are_refused(written):
    table = EmbeddingBag(100, 8, QR(4), mode="sum")
    apply_in_backward(table, Adagrad, lr=0.1)
    ids, weights = IDS.clone(), torch.ones(3)
    out = table(ids, torch.tensor([0]), weights)
    (ids if written == "ids" else weights).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


SCHEMES = [QR(4), Path(4, (6,)), HotCold(9, cold=Pool(30), num_rest=20)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_integers_survive_what_is_done_to_a_whole_module(scheme):
    table = Embedding(100, 8, scheme)
    expected = table(IDS)
    table.type(torch.float64)
    torch.testing.assert_close(table(IDS), expected.double())
    empty = nn.utils.skip_init(Embedding, 100, 8, scheme)
    assert empty(IDS).shape == (3, 8)
    other = Embedding(100, 8, scheme, device="meta").to_empty(device="cpu")
    other.load_state_dict(table.float().state_dict())
    torch.testing.assert_close(other(IDS), expected)


def test_collections_survive_it_too():
    tables = EmbeddingCollection([Table("a", 100, 8, QR(4)), Table("b", 100, 8, features=("x", "y"))])
    ids = torch.stack([IDS] * 3, 1)
    expected = tables(ids)
    torch.testing.assert_close(tables.type(torch.float64)(ids), expected.double())


@pytest.mark.parametrize("ids", [[0, 1, 2], [1, 0, 2], [1], [3, 1, 2]])
def test_the_maximum_of_a_bag_with_nan_is_torchs(ids):
    """NaN where it comes first, padding aside."""
    table = EmbeddingBag(100, 8, QR(4), mode="max", padding_idx=3)
    with torch.no_grad():
        table.stored[1, :5] = torch.nan
    dense = nn.EmbeddingBag.from_pretrained(table.to_dense().detach(), mode="max", padding_idx=3)
    bags, offsets = torch.tensor([*ids, 5, 6]), torch.tensor([0, len(ids)])
    torch.testing.assert_close(table(bags, offsets).detach(), dense(bags, offsets), equal_nan=True)
    assert table(bags, offsets)[0].isnan().any() == (ids[:1] == [1] or ids[:2] == [3, 1])


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize(
    ("offsets", "match"), [([1, 2], "must be 0"), ([0, 2, 1], "must not decrease"), ([0, 9], "at most the number")]
)
def test_compiled_bags_refuse_the_offsets_that_others_refuse(mode, offsets, match):
    torch._dynamo.reset()
    table = EmbeddingBag(100, 8, QR(4), mode=mode)
    for module in (table, torch.compile(table, fullgraph=True, backend="aot_eager")):
        with pytest.raises((ValueError, RuntimeError), match=match):
            module(IDS, torch.tensor(offsets))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bags_of_paths_have_sparse_gradients_in_half_precision(dtype):
    table = EmbeddingBag(100, 8, Path(20, (6,), force=True), sparse=True, mode="sum", dtype=dtype)
    dense = EmbeddingBag(100, 8, Path(20, (6,), force=True), mode="sum", dtype=dtype)
    dense.load_state_dict(table.state_dict())
    for module in (table, dense):
        module(IDS[None]).sum().backward()
    assert table.stored.grad.is_sparse
    torch.testing.assert_close(table.stored.grad.float().to_dense(), dense.stored.grad.float())
    tables = [Table("a", 100, 8, Path(20, (6,), force=True)), Table("b", 100, 8, QR(4))]
    mixed, twin = (EmbeddingCollection(tables, sparse=sparse, dtype=dtype) for sparse in (True, False))
    twin.load_state_dict(mixed.state_dict())
    for module in (mixed, twin):
        module(torch.cat([IDS, IDS]), torch.tensor([0, 3, 6])).sum().backward()
    gradient = mixed.stored.grad.float()
    torch.testing.assert_close(gradient.to_dense() if gradient.is_sparse else gradient, twin.stored.grad.float())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Embedding(100, 8, HotCold(9, cold=QR(4), num_rest=5), padding_idx=7, sparse=True),
        lambda: EmbeddingBag(100, 8, QR(4), mode="mean", sparse=True),
        lambda: EmbeddingCollection([Table("a", 100, 8, QR(4)), Table("b", 100, 8, Path(20, force=True))], sparse=True),
    ],
    ids=["embedding", "bag", "collection"],
)
def test_lookups_with_sparse_gradients_compile_whole(make):
    """Under Adam, whose rows lag behind: the same rows have gradients, and move as without the compiler."""
    torch._dynamo.reset()
    table = make()
    twin = copy.deepcopy(table)
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    optimizers = [optim.Adam([module.stored], lr=0.1) for module in (table, twin)]
    for size in (5, 2, 9):
        ids = torch.randint(0, 100, (size, 2))
        for optimizer, read in zip(optimizers, (compiled, twin), strict=True):
            optimizer.zero_grad()
            read(ids).square().sum().backward()
        ours, theirs = table.stored.grad, twin.stored.grad
        assert ours.is_sparse and set(ours._indices()[0].tolist()) == set(theirs._indices()[0].tolist())
        torch.testing.assert_close(ours.to_dense(), theirs.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(table.stored, twin.stored)

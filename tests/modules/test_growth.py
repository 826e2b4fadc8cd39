"""``grow_``: old vectors to the bit, new ids composed, training as if the rows had always been there."""

import copy
from typing import Any

import pytest
import torch
from hot_cold_cases import COUNTS
from oracles import CASES, D, N, fill_
from torch import Tensor

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, GeneralizedQR, HotCold, Path, Pool, Table, optim

MORE = 3 * N
GROWS = [case for case in CASES if case.startswith(("full", "hash", "qr", "generalized")) and "rows" not in case]
HOT = {
    "rest": HotCold(5, cold=QR(4), num_rest=10, force=True),
    "cold": HotCold(5, cold=GeneralizedQR(2), force=True),
    "pool rest": HotCold(5, cold=Pool(40), num_rest=10, force=True),
    "network rest": HotCold(5, cold=Path(4, (6,)), num_rest=10, force=True),
}


@pytest.mark.parametrize("case", GROWS)
def test_old_vectors_stay_and_new_ids_have_their_own(case: str) -> None:
    module = fill_(Embedding(N, D, CASES[case], padding_idx=3))
    before, stored = module.to_dense().detach(), module.stored
    assert module.grow_(MORE) is module and module.stored is stored and module.num_embeddings == MORE
    after = module(torch.arange(MORE)).detach()
    assert torch.equal(after[:N], before) and torch.equal(after, module.to_dense().detach())
    assert after.isfinite().all()
    if case != "hash":
        assert len(after.flatten(1).unique(dim=0)) == MORE
    with pytest.raises(IndexError, match=rf"id {MORE} is outside \[0, {MORE}\)"):
        module(torch.tensor([MORE]))
    assert torch.equal(copy.deepcopy(module).to_dense(), module.to_dense())


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("case", HOT)
def test_hot_and_cold(case: str, ranked: bool) -> None:
    module = fill_(Embedding(N, D, HOT[case], frequencies=COUNTS if ranked else None, dtype=torch.float64))
    before = module.to_dense().detach()
    after = module.grow_(MORE)(torch.arange(MORE)).detach()
    assert torch.equal(module.to_dense()[:N].detach(), before)
    torch.testing.assert_close(after, module.to_dense().detach())
    if "rest" in case:
        assert torch.equal(after[N:], module.tables()[0][5].expand(MORE - N, D))
    else:
        assert len(after.unique(dim=0)) == MORE


def test_collections_files_and_exports(tmp_path) -> None:
    tables = [
        Table("user", N, D, QR(4)),
        Table("path", N, D, CASES["path-mlp"]),
        Table("item", N, D, HotCold(3, cold=Pool(40), num_rest=5, force=True), features=("seen", "clicked")),
        Table("day", 7, D, unknown="hash"),
    ]
    module = fill_(EmbeddingCollection(tables))
    ids = torch.randint(7, (20, 5))
    before = module(ids).detach()
    module.grow_("user", 500).grow_("item", 200).grow_("day", 9)
    assert torch.equal(module(ids), before) and [spec.num_embeddings for spec in module.specs] == [500, N, 200, 9]
    wide = torch.tensor([[499, 59, 199, 199, 8]])
    quorem.save(module, tmp_path / "tables.quorem")
    assert torch.equal(quorem.load(tmp_path / "tables.quorem")(wide), module(wide))
    other = EmbeddingCollection(tables)
    for name, n in (("user", 500), ("item", 200), ("day", 9)):
        other.grow_(name, n)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(wide), module(wide))
    with pytest.raises(ValueError, match=r"table \('shop'\) must be one of 'user', 'path', 'item', 'day'"):
        module.grow_("shop", 5)
    with pytest.raises(ValueError, match=r"Path.* cannot take more ids; those that can are Full.* of table 'path'"):
        module.grow_("path", 100)


ROWS = [(optim.Adagrad, {"initial_accumulator_value": 0.1}), (optim.AMSGrad, {}), (optim.RowWiseAdagrad, {})]
WHOLE = [(torch.optim.Adagrad, ROWS[0][1]), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})]


def step(module: EmbeddingCollection, optimizer: torch.optim.Optimizer, ids: Tensor, in_backward: bool) -> None:
    weights = torch.linspace(-1, 1, D)
    (module(ids) * weights).sin().sum().backward()
    if not in_backward:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options", "in_backward"), [(*o, False) for o in ROWS + WHOLE] + [(*o, True) for o in ROWS]
)
def test_training_goes_on_as_if_the_rows_had_always_been_there(kind: Any, options: dict, in_backward: bool) -> None:
    """Against a module that had all rows from the start, and was trained on the old ids first."""
    sparse = issubclass(kind, optim.RowOptimizer) and not in_backward

    def made() -> EmbeddingCollection:
        tables = [Table("user", N, D, QR(4)), Table("item", N, D, quorem.Full()), Table("day", N, D, GeneralizedQR(3))]
        return fill_(EmbeddingCollection(tables, sparse=sparse))

    def optimizer_of(module: EmbeddingCollection) -> torch.optim.Optimizer:
        if in_backward:
            return optim.apply_in_backward(module, kind, lr=0.1, **options)
        return kind(module.parameters(), lr=0.1, **options)

    draw = torch.Generator().manual_seed(0)
    grown, reference = made(), made()
    for table in ("user", "item", "day"):
        reference.grow_(table, MORE)
    trained, expected = optimizer_of(grown), optimizer_of(reference)
    for _ in range(3):
        ids = torch.randint(N, (8, 3), generator=draw)
        step(grown, trained, ids, in_backward)
        step(reference, expected, ids, in_backward)
    for table in ("user", "item", "day"):
        grown.grow_(table, MORE, optimizer=trained)
    with torch.no_grad():  # new rows are drawn: take those of the reference, which no gradient has reached
        grown.stored.copy_(reference.stored)
    for _ in range(3):
        ids = torch.randint(MORE, (8, 3), generator=draw)
        step(grown, trained, ids, in_backward)
        step(reference, expected, ids, in_backward)
    for a, b in zip(grown.to_dense().values(), reference.to_dense().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", ["hash", "qr", "digits", "hot-cold"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_table_grows_again_and_again(case: str, loaded: bool, tmp_path) -> None:
    schemes = {"hash": quorem.Hash(4), "qr": QR(4), "digits": quorem.GeneralizedQR(3, operation="add")}
    module = fill_(Embedding(N, D, schemes.get(case, HotCold(5, cold=QR(4)))))
    for n in (N + 1, 2 * N, 5 * N):
        if loaded:
            quorem.save(module, tmp_path / "table")
            module = quorem.load(tmp_path / "table")
        before = module.to_dense().detach()
        after = module.grow_(n).to_dense().detach()
        assert torch.equal(after[: len(before)], before) and len(after) == n
        assert case == "hash" or len(after.unique(dim=0)) == n


def test_a_loss_from_before_may_be_kept() -> None:
    module = fill_(Embedding(N, D, QR(4)))
    loss = module(torch.arange(N)).sum()
    loss.backward()
    module.grow_(MORE)(torch.arange(MORE)).sum().backward()
    assert module.stored.grad.shape == module.stored.shape


def test_a_table_that_is_too_large_for_the_memory_stays_as_it_was() -> None:
    module = fill_(Embedding(N, D, QR(4)))
    before = module.to_dense()
    with pytest.raises(RuntimeError, match="allocate"):
        module.grow_(2**60)
    assert module.num_embeddings == N and torch.equal(module.to_dense(), before)


def test_what_cannot_grow_says_what_can() -> None:
    with pytest.raises(ValueError, match=r"n \(59\) must be at least num_embeddings \(60\): tables do not shrink"):
        Embedding(N, D, QR(4)).grow_(N - 1)
    for case in ("mixed-mult", "chinese2-add", "generalized-rows-mult"):
        with pytest.raises(ValueError, match=r"scheme .* cannot take more ids; those that can are Full"):
            Embedding(N, D, CASES[case]).grow_(MORE)
    with pytest.raises(ValueError, match=r"a module of 8 bits cannot grow: grow it before quantize_"):
        quorem.quantize_(Embedding(N, D, QR(4)), 8).grow_(MORE)
    with pytest.raises(ValueError, match=r"raw_ids \(True\) must be False: a table of raw ids takes any id"):
        Embedding(N, D, QR(4), raw_ids=True).grow_(MORE)
    for cold in (Pool(60), QR(4)):
        tables = [Table("a", N, D, HotCold(N, cold=cold, force=True)), Table("b", N, D, HotCold(3, cold=Pool(60)))]
        for name in "ab" if isinstance(cold, Pool) else "a":
            with pytest.raises(ValueError, match=rf"cannot take more ids; those that can are .* of table '{name}'"):
                EmbeddingCollection(tables).grow_(name, N + 1)
    module, shared = EmbeddingBag(N, D, QR(4)), EmbeddingBag(N, D, QR(4))
    shared.stored = module.stored
    with pytest.raises(ValueError, match="stored must belong to one module: 2 share it"):
        module.grow_(MORE)
    module = Embedding(N, D, QR(4))
    optim.apply_in_backward(module, optim.Adam, lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer \(None\) must be the one that updates this module's rows"):
        module.grow_(MORE)
    with pytest.raises(ValueError, match=r"optimizer \(SGD\) must be one that updates this module"):
        module.grow_(MORE, optimizer=torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1))

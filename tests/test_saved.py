"""Saving, loading, copying and moving: names, mismatches, and modules that come from nowhere."""

import copy
import io
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from oracles import CASES, FEW, D, N, dense_by_hand, fill_
from torch import nn

from quorem import (
    QR,
    ChineseRemainder,
    Custom,
    Embedding,
    EmbeddingBag,
    EmbeddingCollection,
    Full,
    GeneralizedQR,
    HotCold,
    Pool,
    Table,
    optim,
)
from quorem.models import DLRM
from quorem.partitions import ExplicitPartition
from quorem.serving.torch_export import export_program
from quorem.tables import Tables

IDS = torch.arange(N)


def collection(**options: object) -> EmbeddingCollection:
    tables = [
        Table("user", N, D, CASES["qr-mult"]),
        Table("item.id", N, D, CASES["path-mlp"], padding_idx=3),
        Table("day", 7, D, Full()),
        Table("shop", N, D, CASES["path-mlp"]),
    ]
    return EmbeddingCollection(tables, **options)


def assert_equal(a: Tables, b: Tables) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for feature in range(len(a.specs)):
        assert torch.equal(a.dense(feature), b.dense(feature))
    assert torch.equal(a.slots, b.slots) and torch.equal(a.parts, b.parts) and torch.equal(a.maps, b.maps)


@pytest.mark.parametrize("case", CASES)
def test_state_dict_round_trip(case: str) -> None:
    module, other = (fill_(Embedding(N, D, replace(CASES[case], permute=2)), seed) for seed in (0, 1))
    assert not torch.equal(module.to_dense(), other.to_dense())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(module, other)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("via", ["pickle", "deepcopy", "save"])
def test_copies(case: str, via: str) -> None:
    module = fill_(EmbeddingBag(N, D, CASES[case], padding_idx=3, mode="sum"))
    module(IDS[:, None]).sum().backward()
    if via == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif via == "deepcopy":
        other = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_equal(module, other)
    assert other.mode == "sum" and other.scheme == module.scheme and other.padding_idx == 3
    with torch.no_grad():
        other.stored.zero_()
    assert module.stored.any()


def test_each_table_has_a_name_and_a_place_of_its_own() -> None:
    module = collection()
    state = module.state_dict()
    assert [name for name in state if name.startswith("tables.")] == [
        "tables.user.0",
        "tables.user.1",
        "tables.item.id.0",
        "tables.day.0",
        "tables.shop.0",
    ]
    assert state["tables.user.0"].shape == (15, D) and state["tables.day.0"].shape == (7, D)
    assert list(Embedding(N, D, QR(4)).state_dict()) == ["tables.0", "tables.1"]


@pytest.mark.parametrize("case", CASES)
def test_tables_share_no_element_and_leave_none_out(case: str) -> None:
    tables = [Table("a", N, D, CASES[case]), Table("b", 9, 4), Table("c", N, D, CASES["generalized-dims"])]
    module = EmbeddingCollection(tables)
    with torch.no_grad():
        module.stored.copy_(torch.arange(module.stored.numel()).view_as(module.stored))
    places = torch.cat([table.flatten() for _, table in module.named_tables()])
    assert torch.equal(places.sort().values, torch.arange(module.stored.numel()).float())
    networks = sum(p.numel() for name, p in module.named_parameters() if name != "stored")
    assert module.num_parameters == module.stored.numel() + networks
    assert sum(value.numel() for value in module.state_dict().values()) == module.num_parameters


def test_a_state_dict_shares_memory_as_torch_does() -> None:
    module = Embedding(N, D, QR(4))
    module.state_dict()["tables.1"].fill_(3.0)
    assert (module.tables()[1] == 3).all()
    assert not module.state_dict()["tables.0"].requires_grad
    assert module.state_dict(keep_vars=True)["tables.0"].requires_grad


def test_nested_prefixes() -> None:
    model = nn.Sequential(Embedding(N, D, QR(4)), nn.ModuleDict({"inner": collection()}))
    other = copy.deepcopy(model)
    for p in other.parameters():
        nn.init.zeros_(p)
    assert "1.inner.tables.item.id.0" in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert_equal(model[0], other[0])
    assert_equal(model[1]["inner"], other[1]["inner"])


def test_missing_and_unexpected_keys() -> None:
    module = collection()
    state = module.state_dict()
    state["tables.user.7"] = state.pop("tables.user.1")
    state["weight"] = torch.zeros(3)
    missing = r'Missing key\(s\) in state_dict: "tables.user.1"'
    with pytest.raises(RuntimeError, match=missing):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "tables.user.7", "weight"'):
        module.load_state_dict(state)
    result = module.load_state_dict(state, strict=False)
    assert result.missing_keys == ["tables.user.1"] and result.unexpected_keys == ["tables.user.7", "weight"]
    del state["paths.shop.0.1.bias"]
    state["paths.shop.0.2.bias"] = state["paths.0.weights.9"] = torch.zeros(3)
    result = module.load_state_dict(state, strict=False)
    assert result.missing_keys == ["tables.user.1", "paths.shop.0.1.bias"]
    assert {"paths.shop.0.2.bias", "paths.0.weights.9"} < set(result.unexpected_keys)


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_torch_load_into_full_tables(assign: bool) -> None:
    for theirs, ours in ((nn.Embedding, Embedding), (nn.EmbeddingBag, EmbeddingBag)):
        trained = nn.Sequential(theirs(N, D), nn.Linear(D, 1))
        model = nn.Sequential(ours(N, D, Full(), device="meta" if assign else None), nn.Linear(D, 1))
        model.load_state_dict(trained.state_dict(), assign=assign)
        ids = IDS[:, None] if ours is EmbeddingBag else IDS
        assert torch.equal(model(ids), trained(ids))
        with pytest.raises(RuntimeError, match=r"0.tables.0 is \(7, 12\) in the checkpoint and \(60, 12\) here"):
            model.load_state_dict({**trained.state_dict(), "0.weight": torch.zeros(7, D)})


def test_a_dense_checkpoint_is_not_taken_for_tables() -> None:
    saved = nn.Embedding(N, D).state_dict()
    module, advice = Embedding(N, D, QR(4)), "weight is a full table in the checkpoint: from_pretrained fits"
    match = r'Missing key\(s\).*"tables.0", "tables.1".*\n.*Unexpected.*"weight"'
    with pytest.raises(RuntimeError, match=match), pytest.warns(UserWarning, match=advice):
        module.load_state_dict(saved)
    with pytest.warns(UserWarning, match=advice):
        assert module.load_state_dict(saved, strict=False).unexpected_keys == ["weight"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("saved", "match"),
    [
        (Embedding(N, D, QR(6)), r"tables.0 is \(10, 12\) in the checkpoint and \(15, 12\) here: was it saved under"),
        (Embedding(N, D - 2, QR(4)), r"tables.1 is \(4, 10\) in the checkpoint and \(4, 12\) here"),
        (Embedding(N, D, QR(4, operation="add")), r"tables holds add of 1:15, 15:4 .* and mult of 1:15, 15:4 here"),
        (Embedding(N, D, QR(4, permute=1)), r"tables holds mult of 1:15, 15:4 after \d+ i \+ \d+ in the checkpoint"),
        (Embedding(N - 4, D, QR(4, force=True)), r"tables.0 is \(14, 12\) in the checkpoint and \(15, 12\) here"),
    ],
    ids=["rows", "width", "operation", "permutation", "ids"],
)
def test_another_scheme(saved: Embedding, match: str, strict: bool) -> None:
    module = fill_(Embedding(N, D, QR(4)))
    before = module.stored.detach().clone()
    with pytest.raises(RuntimeError, match=match):
        module.load_state_dict(saved.state_dict(), strict=strict)
    assert torch.equal(module.stored, before)


def test_tables_without_rows_to_load_may_have_another_scheme() -> None:
    def module(scheme: QR) -> EmbeddingCollection:
        return EmbeddingCollection([Table("a", N, D, QR(4)), Table("b", N, D, scheme)])

    saved, loaded = fill_(module(QR(4))), module(QR(4, operation="add"))
    state = saved.state_dict()
    for name in [name for name in state if name.startswith("tables.b.")]:
        del state[name]
    assert loaded.load_state_dict(state, strict=False).missing_keys == ["tables.b.0", "tables.b.1"]
    assert torch.equal(loaded.to_dense()["a"], saved.to_dense()["a"])


@pytest.mark.parametrize("names", ["ba", "b"])
def test_tables_of_a_pool_keep_their_order(names: str) -> None:
    def module(names: str) -> EmbeddingCollection:
        return EmbeddingCollection([Table(name, N, D, HotCold(5, cold=Pool(60), force=True)) for name in names])

    saved = fill_(module("ab"))
    loaded = module(names)
    with pytest.raises(RuntimeError, match=r"tables.b holds numbers from \d+ of \d+ in pool 'pool' in the checkpoint"):
        loaded.load_state_dict(saved.state_dict(), strict=False)
    same = module("ab")
    same.load_state_dict(saved.state_dict())
    assert torch.equal(same.to_dense()["b"], saved.to_dense()["b"])


def test_another_index_map_is_another_scheme() -> None:
    first, second = (
        Embedding(6, 4, Custom([ExplicitPartition(index)], check=False))
        for index in ([0, 1, 0, 1, 2, 2], [0, 1, 2, 0, 1, 2])
    )
    with pytest.raises(RuntimeError, match=r"tables holds table of index [0-9a-f]{8} in the checkpoint"):
        first.load_state_dict(second.state_dict())


def test_schemes_that_store_the_same_load_each_other() -> None:
    """The name of the scheme does not matter, nor the number of ids: only the rows that an id takes."""
    first = fill_(Embedding(100, D, QR(10)))
    second = Embedding(98, D, GeneralizedQR(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.to_dense()[:98], second.to_dense())
    coprime = fill_(Embedding(N, D, ChineseRemainder(2)))
    plain = dict(coprime.state_dict())  # without metadata, as other formats keep it, only shapes are compared
    Embedding(N, D, ChineseRemainder(2, operation="add")).load_state_dict(plain)


def test_values_that_are_no_tensors() -> None:
    module = Embedding(N, D, QR(4))
    with pytest.raises(RuntimeError, match=r"tables.0 is list in the checkpoint and \(15, 12\) here"):
        module.load_state_dict({"tables.0": [1.0], "tables.1": torch.zeros(4, D)})


def test_load_hooks_run() -> None:
    module = Embedding(N, D, QR(4))
    renamed = {f"old.{key}": value + 1 for key, value in module.state_dict().items()}

    def rename(module: nn.Module, state: dict[str, torch.Tensor], *_: object) -> None:
        for key in list(state):
            state[key.removeprefix("old.")] = state.pop(key)

    before = module.stored.detach().clone()
    module.register_load_state_dict_pre_hook(rename)
    module.load_state_dict(renamed)
    assert torch.equal(module.stored, before + 1)


def test_loading_converts_dtype() -> None:
    module = fill_(Embedding(N, D, QR(4), dtype=torch.float64))
    half = Embedding(N, D, QR(4), dtype=torch.bfloat16)
    half.load_state_dict(module.state_dict())
    assert half.stored.dtype == torch.bfloat16 and torch.equal(half.stored, module.stored.bfloat16())


@pytest.mark.parametrize("case", FEW)
def test_assigning_from_meta(case: str) -> None:
    real = fill_(Embedding(N, D, CASES[case], padding_idx=3))
    module = Embedding(N, D, CASES[case], padding_idx=3, device="meta")
    assert all(t.is_meta for t in [*module.parameters(), *module.buffers()])
    module.load_state_dict(real.state_dict(), assign=True)
    assert not any(t.is_meta for t in [*module.parameters(), *module.buffers()])
    assert isinstance(module.stored, nn.Parameter) and module.stored.requires_grad
    assert_equal(module, real)
    torch.testing.assert_close(module(IDS), real(IDS))
    module(IDS).sum().backward()


def test_assigning_takes_the_dtype_of_the_checkpoint() -> None:
    module = Embedding(N, D, QR(4)).requires_grad_(False)
    module.load_state_dict(Embedding(N, D, QR(4), dtype=torch.float64).state_dict(), assign=True)
    assert module.stored.dtype == torch.float64 and not module.stored.requires_grad


def test_copying_onto_meta_is_refused() -> None:
    """torch warns that it is a no-op; a module half on meta would give garbage."""
    state = collection().state_dict()
    with pytest.raises(RuntimeError, match="stored is on the meta device: it takes every table at once, and"):
        collection(device="meta").load_state_dict({k: v for k, v in state.items() if "tables" in k}, strict=False)
    del state["tables.user.0"]
    with pytest.raises(RuntimeError, match="stored is on the meta device"):
        collection(device="meta").load_state_dict(state, strict=False, assign=True)


@pytest.mark.parametrize("case", FEW)
def test_from_meta_by_reset_parameters(case: str) -> None:
    module = Embedding(N, D, CASES[case], padding_idx=3, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in module.buffers():
            tensor.fill_(-9)  # what empty memory might hold
        for tensor in module.parameters():
            tensor.fill_(torch.nan)
    module.reset_parameters()
    assert torch.isfinite(module.to_dense()).all()
    torch.testing.assert_close(module(IDS).view(N, -1), dense_by_hand(module).view(N, -1))
    torch.testing.assert_close(module.slots, Embedding(N, D, CASES[case], padding_idx=3).slots)


def test_loading_into_empty_memory() -> None:
    real = fill_(collection())
    module = collection(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in module.buffers():
            tensor.fill_(-9)
    module.load_state_dict(real.state_dict())
    assert_equal(module, real)


def test_a_default_device_of_meta() -> None:
    with torch.device("meta"):
        module = collection()
    assert module.stored.is_meta
    module.load_state_dict(collection().state_dict(), assign=True)
    assert module(torch.zeros(2, 4, dtype=torch.int64)).isfinite().all()
    with torch.device("meta"):
        elsewhere = collection(device="cpu")
    assert elsewhere(torch.zeros(2, 4, dtype=torch.int64)).isfinite().all()


def test_a_module_need_not_be_on_the_default_device() -> None:
    scheme = HotCold(5, cold=QR(4), num_rest=10, force=True)
    tables = [Table("a", N, D, scheme, frequencies=torch.arange(N)), Table("b", N, D)]
    trained, ids, dense = torch.randn(N, D), torch.tensor([[0, 59], [7, 8]]), torch.zeros(2, 13)
    with torch.device("meta"):
        table = Embedding(N, D, scheme, frequencies=torch.arange(N, device="cpu"), device="cpu").fit_(trained)
        optimizer = optim.apply_in_backward(table, optim.Adam)
        table(ids).sum().backward()
        full = table.grow_(N + 3, optimizer=optimizer).to_dense()
        model = DLRM(EmbeddingCollection(tables, device="cpu"), device="cpu")
        program = export_program(model)
        logits = program.module()(dense, ids)["logits"]
    assert torch.equal(full[ids], table(ids)) and len(full) == N + 3
    torch.testing.assert_close(logits, model(dense, ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_moving_to_a_dtype(dtype: torch.dtype) -> None:
    module = fill_(collection()).to(dtype)
    assert all(p.dtype == dtype for p in module.parameters())
    assert all(b.dtype in (torch.int64, torch.int32) for b in module.buffers())
    assert module(torch.zeros(2, 4, dtype=torch.int64)).dtype == dtype


def test_no_buffer_is_saved_and_none_is_lost() -> None:
    module = collection()
    assert set(module.state_dict()) == {name for name, _ in module.named_tables()} | {
        f"paths.{table}.0.{layer}.{kind}"
        for table in ("item.id", "shop")
        for layer in (0, 1)
        for kind in ("weight", "bias")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(module.state_dict())

"""Saving, loading, copying and moving: what is saved, what is refused, and modules that come from nowhere."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracles import CASES, FEW, D, N, dense_by_hand, fill_, reloaded
from torch import nn
from torch.nn.utils import prune

import quorem
from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, HotCold, Path, Pool, Table, optim
from quorem.models import DLRM
from quorem.modules.lookup import Tables
from quorem.paper.partitions import ExplicitPartition
from quorem.paper.schemes import Scheme

IDS = torch.arange(N)
HOT_COLD = HotCold(5, cold=QR(4), num_rest=10, force=True)


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
    module, other = (fill_(Embedding(N, D, CASES[case]), seed) for seed in (0, 1))
    assert not torch.equal(module.to_dense(), other.to_dense())
    other.load_state_dict(reloaded(module.state_dict(), weights_only=True))
    assert_equal(module, other)


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize(
    "copied",
    [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, lambda m: reloaded(m, weights_only=False)],
    ids=["pickle", "deepcopy", "save"],
)
def test_copies(case: str, copied: Callable[[Tables], Tables]) -> None:
    module = fill_(EmbeddingBag(N, D, CASES[case], padding_idx=3, mode="sum"))
    module(IDS[:, None]).sum().backward()
    other = copied(module)
    assert_equal(module, other)
    assert other.mode == "sum" and other.scheme == module.scheme and other.padding_idx == 3
    with torch.no_grad():
        other.stored.zero_()
    assert module.stored.any()


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
    floats = [value for value in module.state_dict().values() if value.is_floating_point()]
    assert sum(value.numel() for value in floats) == module.num_parameters


def test_loading_converts_dtype_and_assigning_takes_it() -> None:
    module = fill_(Embedding(N, D, QR(4), dtype=torch.float64))
    half = Embedding(N, D, QR(4), dtype=torch.bfloat16).requires_grad_(False)
    half.load_state_dict(module.state_dict())
    assert half.stored.dtype == torch.bfloat16 and torch.equal(half.stored, module.stored.bfloat16())
    half.load_state_dict(module.state_dict(), assign=True)
    assert half.stored.dtype == torch.float64 and not half.stored.requires_grad


def test_schemes_that_store_the_same_load_each_other() -> None:
    first, second = fill_(Embedding(100, D, QR(10))), Embedding(100, D, quorem.GeneralizedQR(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.to_dense(), second.to_dense())


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
        program = torch.export.export(model.eval(), (dense, ids))
        logits = program.module()(dense, ids)
    assert torch.equal(full[ids], table(ids)) and len(full) == N + 3
    torch.testing.assert_close(logits, model(dense, ids))


def test_parameters_and_persistent_buffers_are_saved_under_their_own_names() -> None:
    module = collection()
    persistent = {name for name, _ in module.named_buffers() if name in module.state_dict()}
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()} | persistent
    assert persistent == {"meaning"} and module.meaning.dtype == torch.int32
    assert list(Embedding(N, D, QR(4)).state_dict()) == ["stored", "meaning"]
    ranked = Embedding(N, D, HOT_COLD, frequencies=torch.arange(N))
    assert list(ranked.state_dict()) == ["stored", "ranks", "meaning"]
    assert ranked.state_dict()["stored"].data_ptr() == ranked.stored.data_ptr()
    assert not hasattr(ranked.state_dict(), "_metadata") or set(ranked.state_dict()._metadata[""]) == {"version"}


QR4 = QR(4)
INDEX = [quorem.Custom([ExplicitPartition(index)], check=False) for index in ([0, 1, 0, 1, 2, 2], [0, 1, 2, 0, 1, 2])]
PATHS = [replace(CASES["path-mlp"], activation=name) for name in ("relu", "sigmoid")]
DIMS = [QR(4, operation="concat", dims=dims) for dims in ((4, 8), (8, 4))]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("n", "saved", "loaded", "match"),
    [
        (N, QR(6), QR4, "table holds other partitions in the checkpoint and the partitions of QR.* here"),
        (N, QR(4, operation="add"), QR4, "table holds add of .*numbers for ids in the checkpoint and mult of"),
        (6, *INDEX, r"holds other partitions in the checkpoint and the partitions of Custom.* here"),
        (N, *PATHS, "holds relu path of .* in the checkpoint and sigmoid path of .* here"),
        (N, *DIMS, "other partitions in the checkpoint and the partitions of QR.* here"),
        (N, HotCold(5, cold=QR4), HotCold(6, cold=QR(4)), "holds other sizes.* in the checkpoint and .*, 6 hot and 0"),
    ],
    ids=["rows", "operation", "index", "activation", "dims", "hot"],
)
def test_rows_of_another_meaning_are_refused(n: int, saved: Scheme, loaded: Scheme, match: str, strict: bool) -> None:
    """Also from a plain dict, as most formats give it; then nothing is changed."""
    module, other = (Embedding(n, D, replace(scheme, force=True)) for scheme in (loaded, saved))
    before = module.stored.detach().clone()
    with pytest.raises(RuntimeError, match=match):
        module.load_state_dict(dict(other.state_dict()), strict=strict)
    assert torch.equal(module.stored, before) and torch.equal(module(torch.arange(n)), module.to_dense())


def test_tables_of_a_collection_are_told_apart_by_name_and_order() -> None:
    def module(*names: str, scheme: Scheme = QR4) -> EmbeddingCollection:
        return EmbeddingCollection([Table(name, N, D, scheme) for name in names])

    state = module("a", "b").state_dict()
    with pytest.raises(RuntimeError, match="stored: table 'b' holds the rows of 'a' in the checkpoint and the rows of"):
        module("b", "a").load_state_dict(state)
    with pytest.raises(RuntimeError, match="table 'c' holds the rows of another table in the checkpoint"):
        module("a", "c").load_state_dict(state)
    with pytest.raises(RuntimeError, match="stored holds 2 tables in the checkpoint and 1 here"):
        module("a").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"1\.stored: table 'b' holds one row of .* in the checkpoint and mult of"):
        nn.Sequential(nn.Identity(), module("b")).load_state_dict(
            {f"1.{name}": value for name, value in module("b", scheme=Full()).state_dict().items()}
        )


def test_tables_of_a_pool_keep_their_numbers() -> None:
    def module(*sizes: int) -> EmbeddingCollection:
        scheme = HotCold(5, cold=Pool(60), force=True)
        return EmbeddingCollection([Table(f"t{i}", n, D, scheme) for i, n in enumerate(sizes)])

    saved, same = fill_(module(40, 50)), module(40, 50)
    same.load_state_dict(saved.state_dict())
    assert torch.equal(same.to_dense()["t1"], saved.to_dense()["t1"])
    with pytest.raises(RuntimeError, match=r"table 't1' holds other sizes, other partitions in .* from number 45 of"):
        module(50, 40).load_state_dict(saved.state_dict())


def test_a_meaning_that_is_none_is_refused() -> None:
    module = Embedding(N, D, QR(4))
    for wrong in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64), [1]):
        with pytest.raises(RuntimeError, match=r"meaning must be int32 \[tables, 4\]"):
            module.load_state_dict({**module.state_dict(), "meaning": wrong})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "meaning"'):
        module.load_state_dict({"stored": module.stored})


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_torch_load_into_full_tables(assign: bool) -> None:
    for theirs, ours in ((nn.Embedding, Embedding), (nn.EmbeddingBag, EmbeddingBag)):
        trained = nn.Sequential(theirs(N, D), nn.Linear(D, 1))
        model = nn.Sequential(ours(N, D, Full(), device="meta" if assign else None), nn.Linear(D, 1))
        model.load_state_dict(trained.state_dict(), assign=assign)
        ids = IDS[:, None] if ours is EmbeddingBag else IDS
        assert torch.equal(model(ids), trained(ids))
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.stored"):
            model.load_state_dict({**trained.state_dict(), "0.weight": torch.zeros(7, D)})


def test_a_dense_checkpoint_is_not_taken_for_tables() -> None:
    state, module = nn.Embedding(N, D).state_dict(), Embedding(N, D, QR(4))
    advice = "weight is a full table: from_pretrained fits a scheme's rows to it"
    with pytest.raises(RuntimeError, match=r'Missing.*"stored"'), pytest.warns(UserWarning, match=advice):
        module.load_state_dict(state)
    with pytest.warns(UserWarning, match=advice):
        assert module.load_state_dict(state, strict=False).unexpected_keys == ["weight"]


@pytest.mark.parametrize(
    "scheme", [HOT_COLD, HotCold(5, cold=Pool(40), force=True), HotCold(0, cold=QR(4), num_rest=9)]
)
@pytest.mark.parametrize("given", [None, "loaded", "others"])
def test_lists_of_ids_come_from_the_state(scheme: Scheme, given: str | None) -> None:
    """Whatever the module was built with: in order of frequency, with nothing, or with lists of its own."""
    counts = {None: None, "loaded": "loaded", "others": torch.arange(N).flip(0)}[given]
    saved = fill_(Embedding(N, D, scheme, frequencies=torch.randperm(N)))
    for device in ("cpu", "meta"):
        module = Embedding(N, D, scheme, frequencies=counts, device=device, unknown="hash")
        module.load_state_dict(dict(saved.state_dict()), assign=device == "meta")
        assert torch.equal(module(IDS), saved(IDS)) and torch.equal(module.to_dense(), saved.to_dense())
        assert list(module.state_dict()) == list(saved.state_dict())
        assert torch.equal(module.ranks, saved.ranks)
    in_order = fill_(Embedding(N, D, scheme))
    module.load_state_dict(in_order.state_dict())
    assert torch.equal(module(IDS), in_order(IDS)) and "ranks" not in module.state_dict()


def test_lists_that_were_not_loaded_are_not_read() -> None:
    tables = [Table("user", N, D, HOT_COLD, frequencies="loaded"), Table("day", 7, D)]
    module, ids = EmbeddingCollection(tables), torch.zeros(1, 2, dtype=torch.int64)
    for read in (module, lambda ids: module.to_dense(), lambda ids: copy.deepcopy(module)(ids)):
        with pytest.raises(RuntimeError, match="table 'user' has frequencies='loaded': load a state_dict, which lists"):
            read(ids)
    with pytest.raises(ValueError, match="frequencies \\('counted'\\) must be 'loaded' or counts"):
        Embedding(N, D, HOT_COLD, frequencies="counted")


def test_damaged_lists_are_refused() -> None:
    saved = Embedding(N, D, HOT_COLD, frequencies=torch.arange(N))
    module, state = Embedding(N, D, HOT_COLD), saved.state_dict()
    for wrong, match in (
        (state["ranks"][1:], r"ranks \(\[49\]\) must list 50 ids"),
        (state["ranks"].flip(0), r"frequencies.hot must rise and lie in \[0, 60\)"),
    ):
        with pytest.raises(RuntimeError, match=match):
            module.load_state_dict({**state, "ranks": wrong})
    assert torch.equal(module(IDS), module.to_dense())


def test_pruned_rows_are_saved() -> None:
    saved, module = (fill_(Embedding(N, D, QR(4)), seed) for seed in (0, 1))
    for each in (saved, module):
        prune.l1_unstructured(each, "stored", amount=0.5)
    module.load_state_dict(saved.state_dict())
    assert set(saved.state_dict()) == {"stored_orig", "stored_mask", "meaning"}
    assert torch.equal(module(IDS), saved(IDS))


SOME = torch.tensor([1, 5, 99])


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


@pytest.mark.parametrize("scheme", [QR(4), Path(4, (6,)), HotCold(9, cold=Pool(30), num_rest=20)], ids=str)
def test_integers_survive_what_is_done_to_a_whole_module(scheme):
    table = Embedding(100, 8, scheme)
    expected = table(SOME)
    table.type(torch.float64)
    torch.testing.assert_close(table(SOME), expected.double())
    empty = nn.utils.skip_init(Embedding, 100, 8, scheme)
    assert empty(SOME).shape == (3, 8)
    other = Embedding(100, 8, scheme, device="meta").to_empty(device="cpu")
    other.load_state_dict(table.float().state_dict())
    torch.testing.assert_close(other(SOME), expected)

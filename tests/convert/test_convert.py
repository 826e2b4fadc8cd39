"""``compress_`` in models written without quorem in mind."""

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from quorem import QR, Embedding, EmbeddingBag, Full, Hash, Path, compress_, decompress_
from quorem.modules.tied import TiedLinear


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(2000, 8, padding_idx=0)
        self.tags = nn.EmbeddingBag(1000, 8, mode="sum", sparse=True, include_last_offset=True)
        self.day = nn.Embedding(7, 8)
        self.seen = self.user  # a shared module
        self.penalized = [self.user.weight, self.tags.weight]  # as DeepCTR keeps its regularized parameters
        self.groups = {"tables": (self.tags.weight,)}
        self.top = nn.Linear(24, 1)

    def forward(self, user, tags, offsets, day):
        return self.top(torch.cat([self.seen(user), self.tags(tags, offsets), self.day(day)], 1))


INPUTS = (torch.tensor([0, 5]), torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([6, 0]))


def test_modules_are_replaced_with_their_options_and_the_report_says_so():
    model = Recommender().double()
    model.user.weight.requires_grad_(False)
    calls = []
    model.user.register_forward_hook(lambda *_: calls.append(1))
    model.day.eval()
    report = compress_(model, QR(4), threshold=7)
    assert type(model.user) is Embedding and model.seen is model.user and type(model.tags) is EmbeddingBag
    assert model.user.padding_idx == 0 and model.user.stored.dtype == torch.float64
    assert not model.user.stored.requires_grad
    assert (model.tags.mode, model.tags.sparse, model.tags.include_last_offset) == ("sum", True, True)
    assert type(model.day) is nn.Embedding and not model.day.training
    assert report.swapped == ["user", "tags"] and report.left == {"day": "7 ids are at most the threshold (7)"}
    assert report.bytes_after < report.bytes_before / 3.5
    text = str(report)
    assert "QR(num_collisions=4)" in text and "as it was" in text and "7 ids are at most" in text
    assert model(*INPUTS).shape == (2, 1) and calls == [1] and not model.user(torch.tensor([0])).any()


def test_lists_dicts_and_tuples_of_parameters_follow_and_the_memory_is_freed():
    model = Recommender()
    old = [weakref.ref(model.user.weight), weakref.ref(model.tags.weight)]
    report = compress_(model, QR(4))
    assert model.penalized[0] is model.user.stored and model.penalized[1] is model.tags.stored
    assert model.groups["tables"][0] is model.tags.stored
    assert {line.split()[0] for line in report.references} == {"penalized", "groups"}
    gc.collect()
    assert [reference() for reference in old] == [None, None]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(500, 8)
        self.also = nn.Embedding(500, 8)
        self.also.weight = self.items.weight
        self.head = nn.Linear(8, 500)
        self.head.weight = self.items.weight

    def forward(self, ids):
        return self.head(self.items(ids) + self.also(ids))


def test_tied_weights_stay_tied():
    model = Tied()
    compress_(model, QR(4, operation="add"), fit=True)
    assert model.also.stored is model.items.stored and type(model.head) is TiedLinear
    ids = torch.tensor([1, 3, 499])
    table = model.items.to_dense()
    expected = F.linear(2 * F.embedding(ids, table), table, model.head.bias)
    torch.testing.assert_close(model(ids), expected)
    loss = F.cross_entropy(model(ids), ids)
    got = torch.autograd.grad(loss, model.items.stored)[0]
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(expected, ids), model.items.stored)[0])
    assert len(list(model.parameters())) == 2
    decompress_(model)
    assert type(model.head) is nn.Linear and model.head.weight is model.items.weight is model.also.weight
    torch.testing.assert_close(model(ids), expected)


def test_what_cannot_be_replaced_is_reported_with_the_reason():
    class Own(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2

    class Scaled(nn.Embedding):
        @property
        def scale(self) -> float:
            return 2.0

    class Started(nn.Embedding):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    class Holds(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.kernel = weight

    reasons = {
        "norm": "max_norm",
        "freq": "scale_grad_by_freq",
        "own": "Own has methods of its own (forward)",
        "scaled": "Scaled has methods of its own (scale)",
        "held": "holder (Holds)",
        "pruned": "parametrized",
        "hooked": "its weight has hooks that expect the gradient of the whole table",
        "small": "would store",
    }
    special = {"norm": {"max_norm": 1.0}, "freq": {"scale_grad_by_freq": True}}
    kinds = {"own": Own, "scaled": Scaled, "started": Started}
    model = nn.ModuleDict(
        {
            name: kinds.get(name, nn.Embedding)(3 if name == "small" else 99, 4, **special.get(name, {}))
            for name in (*reasons, "started")
        }
    )
    model["holder"] = Holds(model["held"].weight)
    nn.utils.parametrizations.weight_norm(model["pruned"])
    model["hooked"].weight.register_hook(lambda grad: grad * 0)
    model["started"].note = "mine"
    left = compress_(model, QR(4)).left
    assert left.keys() == reasons.keys() and all(reason in left[name] for name, reason in reasons.items())
    assert type(model["started"]) is Embedding and model["started"].note == "mine"
    assert compress_(nn.Sequential(nn.Embedding(99, 4)), QR(4, operation="feature")).left["0"].startswith("feature")
    report = compress_(nn.Sequential(nn.Embedding(99, 4), nn.Embedding(99, 1)), QR(4, width=2))
    assert report.swapped == ["0"] and report.left == {"1": "rows of 2 numbers are no narrower than its vectors"}


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10**9, 16))
    report = compress_(model, QR(1000))
    assert model[0].stored.is_meta and report.bytes_before == 64 * 10**9
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    assert model(torch.tensor([10**9 - 1])).isfinite().all()


def test_the_deviation_of_the_table_is_kept():
    model = nn.Sequential(nn.Embedding(4000, 16))
    nn.init.normal_(model[0].weight, std=0.3)
    for scheme in (QR(4), QR(4, operation="add"), QR(4, operation="concat"), Hash(4)):
        copy = nn.Sequential(nn.Embedding.from_pretrained(model[0].weight.detach().clone()))
        compress_(copy, scheme)
        assert abs(float(copy[0].to_dense().std()) - 0.3) < 0.02


@pytest.mark.parametrize(
    "write",
    [
        lambda w: nn.init.normal_(w),
        lambda w: w.data.copy_(torch.zeros_like(w)),
        lambda w: w.data[0].fill_(0),
        lambda w: setattr(w, "data", torch.zeros(300, 8)),
        lambda w: w.detach().zero_(),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.mul_(2),
        lambda w: torch.add(w, 1, out=w),
        lambda w: w.view(-1)[3:].zero_(),
    ],
)
def test_a_write_into_a_composed_weight_is_refused(write):
    table = Embedding(300, 8, QR(4))
    before = table.stored.detach().clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight is composed from stored"):
        write(table.weight)
    assert torch.equal(table.stored, before)


def test_a_table_that_is_assigned_is_fitted():
    table, wanted = Embedding(300, 8, QR(4, operation="add")), Embedding(300, 8, QR(4, operation="add"), init_std=1.0)
    table.weight = nn.Parameter(wanted.to_dense().detach())
    torch.testing.assert_close(table.weight + 0, wanted.weight + 0)
    with pytest.raises(ValueError, match=r"weight \(\(3, 8\)\) must be a table \[300, 8\]"):
        table.weight = torch.zeros(3, 8)
    full = Embedding(300, 8, Full())
    assert full.weight is full.stored
    nn.init.zeros_(full.weight)
    assert not full.stored.any()


test_errors = refused(
    (lambda: compress_(Recommender()), ValueError, "exactly one of scheme_or_plan, scheme, plan and budget"),
    (lambda: compress_(Recommender(), QR(4), budget=9), ValueError, "exactly one of"),
    (lambda: compress_(nn.Embedding(9, 4), QR(4)), TypeError, "cannot be replaced in place"),
    (lambda: compress_(Recommender(), {"users": QR(4)}), ValueError, r"scheme_or_plan \('users'\)"),
    (lambda: compress_(Recommender(), 3), TypeError, r"scheme_or_plan \(int\)"),
    (lambda: compress_(Recommender(), QR(4), frequencies={"x": torch.ones(3)}), ValueError, r"frequencies \('x'\)"),
    (lambda: compress_(Recommender(), QR(4), frequencies=[1]), TypeError, r"frequencies \(list\) must be"),
    (lambda: compress_(Recommender(), QR(4), filter_fn="user"), TypeError, r"filter_fn \('user'\) must be"),
    (lambda: compress_(Recommender(), QR(4), optimizer=3), TypeError, r"optimizer \(int\) must be an optimizer, its"),
    (lambda: compress_(Recommender(), budget=9, optimizer="lion"), ValueError, r"optimizer \('lion'\) must be None or"),
    (lambda: compress_(3, QR(4)), TypeError, r"model \(int\)"),
    (lambda: decompress_(Recommender(), optimizer="adam"), TypeError, r"optimizer \(str\) must be an optimizer or"),
    (lambda: decompress_(3), TypeError, r"model \(int\)"),
    (lambda: decompress_(Embedding(9, 4, Full())), TypeError, "cannot be replaced in place"),
)


def tied_tables(padding_idx: int | None = None) -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Embedding(60, 4, padding_idx=padding_idx), "b": nn.Embedding(60, 4)})
    model["b"].weight = model["a"].weight
    return model


def test_networks_of_tied_tables_are_tied_and_trained() -> None:
    model = tied_tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compress_(model, Path(4, (3,), force=True), optimizer=optimizer)
    assert torch.equal(model["a"].weight, model["b"].weight)
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()} == {*model["a"].parameters()}
    frozen = tied_tables().requires_grad_(False)
    compress_(frozen, Path(4, (3,), force=True))
    assert not any(p.requires_grad for p in frozen.parameters())


def test_padding_of_one_may_be_an_id_of_another() -> None:
    model, ids = tied_tables(padding_idx=3), torch.arange(60)
    with torch.no_grad():
        model["a"].weight[3] = 1.0
    trained = model["b"](ids).detach()
    compress_(model, QR(1, operation="add", force=True), fit=True)
    torch.testing.assert_close(model["b"](ids), trained)
    report = decompress_(model)
    assert not report.swapped and "another padding_idx, scheme or matrix: no weight is both tables" in str(report)
    assert not model["a"](ids[3]).any()


@pytest.mark.parametrize(
    "schemes", [(QR(4, width=4), QR(4, width=4)), (QR(4), QR(4, operation="add"))], ids=["matrix", "operation"]
)
def test_modules_that_read_shared_rows_in_other_ways_stay(schemes) -> None:
    model = nn.ModuleDict({name: Embedding(100, 8, scheme) for name, scheme in zip("ab", schemes, strict=True)})
    model["b"].stored = model["a"].stored
    before = model["b"](torch.arange(100)).detach()
    assert not decompress_(model).swapped and torch.equal(model["b"](torch.arange(100)), before)


IDS = torch.arange(300)


def model_of(**options) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(300, 8, **options), nn.Linear(8, 1))


@pytest.mark.parametrize("name", ["scheme", "plan"])
def test_scheme_and_plan_are_names_too(name):
    model = model_of()
    assert compress_(model, **{name: {"0": QR(4)}}).swapped == ["0"] and model[0].scheme == QR(4)
    with pytest.raises(ValueError, match="exactly one of scheme_or_plan, scheme, plan and budget"):
        compress_(model_of(), QR(4), **{name: {"0": QR(4)}})


def patched(module: nn.Module) -> None:
    """As accelerate's hooks do it."""
    old = module.forward
    module.forward = functools.update_wrapper(functools.partial(lambda m, ids: old(ids) * 2, module), old)


@pytest.mark.parametrize("patch", [lambda m: m.compile(backend="eager"), patched], ids=["compiled", "patched"])
def test_a_module_that_is_compiled_or_patched_stays_and_the_report_says_so(patch):
    model = model_of()
    patch(model[0])
    expected = model(IDS)
    left = compress_(model, QR(4)).left
    assert type(model[0]) is nn.Embedding and torch.equal(model(IDS), expected)
    assert left["0"] == "it is compiled, or its forward was replaced: compress it first"


def test_a_model_whose_parent_is_compiled_uses_the_new_table():
    model = model_of()
    model.compile(backend="eager")
    model(IDS)
    compress_(model, QR(4))
    model(IDS).sum().backward()
    assert model[0].stored.grad.any()


def test_a_model_inside_ddp_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = model_of()
        ddp = nn.parallel.DistributedDataParallel(model)
        for change in (lambda: compress_(model, QR(4)), lambda: compress_(ddp, QR(4)), lambda: decompress_(model)):
            with pytest.raises(ValueError, match=r"must not be inside DistributedDataParallel.*first, then wrap it"):
                change()
        assert type(model[0]) is nn.Embedding
    finally:
        torch.distributed.destroy_process_group()


def test_a_padding_vector_that_was_not_zero_is_reported():
    model = model_of(padding_idx=3)
    assert compress_(model, QR(4)).references == []
    model = model_of(padding_idx=3)
    nn.init.xavier_normal_(model[0].weight)
    report = compress_(model, QR(4))
    assert report.references == ["0: the vector of padding_idx (3) was not zero and is zero now"]
    assert not model[0](torch.tensor([3])).any()


def test_hooks_on_the_state_dict_are_kept():
    model, calls = model_of(), []
    model[0].register_state_dict_post_hook(lambda module, *rest: calls.append(("saved", module)))
    model[0].register_load_state_dict_pre_hook(lambda module, *rest: calls.append(("load", module)))
    model[0].register_load_state_dict_post_hook(lambda module, keys: calls.append(("loaded", module)))
    compress_(model, QR(4))
    model.load_state_dict(model.state_dict())
    assert calls == [("saved", model[0]), ("load", model[0]), ("loaded", model[0])]


def test_queries_of_another_dtype_are_refused_by_name():
    table = Embedding(300, 8, QR(4))
    with pytest.raises(TypeError, match=r"queries \(torch.float16\) must be torch.float32, the dtype"):
        TiedLinear(table)(torch.ones(2, 8, dtype=torch.float16))
    with torch.autocast("cpu", torch.bfloat16):
        assert TiedLinear(table)(torch.ones(2, 8, dtype=torch.bfloat16)).shape == (2, 300)


class Representation(nn.Module):
    """As PyKEEN resets and constrains its tables."""

    def __init__(self):
        super().__init__()
        self.table, self.data = nn.Embedding(300, 8), None

    def constrain(self):
        self.table.weight.data = F.normalize(self.table.weight.data)


def test_a_table_whose_data_is_assigned_stays_and_the_report_says_who():
    model = nn.Sequential(Representation())
    reason = "Representation.constrain assigns to data, and a composed weight has none of its own"
    assert compress_(model, QR(4)).left == {"0.table": reason}
    model[0].constrain()
    del Representation.constrain  # what is left assigns to an attribute of its own
    assert compress_(model, QR(4)).swapped == ["0.table"]


def test_embeddings_out_of_reach_and_results_computed_before_are_reported():
    """In a plain dict, which torch does not list as a submodule; scripted; and as RecBole's LightGCN keeps a table."""
    model = nn.Sequential(nn.Embedding(300, 8), torch.jit.script(nn.Embedding(500, 8)))
    model[0].others, model.cached = {"user": nn.Embedding(500, 8)}, model[0].weight.detach() * 2
    text = str(compress_(model, QR(4)))
    assert text.startswith("cached is a tensor of the shape of 0: if it was computed from the old table")
    assert "1 is a scripted embedding: not compressed" in text
    assert "0.others holds 1 embeddings that are no submodules: not compressed" in text


def test_what_goes_on_using_the_old_table_is_said_in_the_first_line():
    model = model_of()
    score = functools.partial(F.linear, weight=model[0].weight)
    report = compress_(model, QR(4))
    assert "(dict) holds it and will go on using it" in str(report).splitlines()[0]
    assert score(torch.ones(8)).shape == (300,)
    model = model_of()
    weight = model[0].weight
    model.head = lambda x: x @ weight.T
    report = compress_(model, QR(4))
    assert "the old table of 0: something outside the model (cell" in str(report).splitlines()[0]


class Feature:
    """As torch-rechub describes a feature: a plain object that holds the module."""

    def __init__(self, name):
        self.name, self.embed = name, nn.Embedding(2000, 8)


class Features(nn.Module):
    """torch-rechub: features in lists, and modules by the names of the features."""

    def __init__(self):
        super().__init__()
        self.features = [Feature("a"), Feature("b")]
        self.embed_dict = nn.ModuleDict({feature.name: feature.embed for feature in self.features})


def test_plain_objects_that_hold_a_module_are_given_the_new_one():
    model = Features()
    shared = model.features[0]
    shared.peers = [model.features, shared]  # a cycle
    report = compress_(model, QR(4))
    assert [feature.embed for feature in model.features] == list(model.embed_dict.values())
    assert "features referred to 2 replaced modules or weights: it refers to the new ones now" in report.references

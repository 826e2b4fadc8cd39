"""What a swap takes over from a module, what it refuses by name, and what the report says of the rest."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quorem import QR, Embedding, compress_, decompress_
from quorem.modules.tied import TiedLinear

IDS = torch.arange(300)


def model_of(**options) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(300, 8, **options), nn.Linear(8, 1))


@pytest.mark.parametrize("name", ["scheme", "plan"])
def test_scheme_and_plan_are_names_too(name):
    model = model_of()
    assert compress_(model, **{name: {"0": QR(4)}}).swapped == ["0"] and model[0].scheme == QR(4)
    with pytest.raises(ValueError, match="exactly one of scheme_or_plan, scheme, plan and budget"):
        compress_(model_of(), QR(4), **{name: {"0": QR(4)}})


def test_filter_fn_takes_the_module_first():
    model = nn.ModuleDict({"small": nn.Embedding(100, 8), "large": nn.Embedding(300, 8)})
    assert compress_(model, QR(4), filter_fn=lambda module, name: module.num_embeddings > 200).swapped == ["large"]


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


class Scaled(nn.Embedding):
    """BART and Gemma: vectors times a constant."""

    def forward(self, ids):
        return super().forward(ids) * 3


def test_a_budget_that_cannot_be_met_says_why_of_each_table():
    model = nn.ModuleDict({"a": Scaled(300, 8), "b": nn.Embedding(300, 8, max_norm=1.0)})
    with pytest.raises(ValueError, match=r"no table can be replaced \(a: Scaled has methods .*forward\); b: max_norm"):
        compress_(model, budget="1kB")


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


class Bert(nn.Module):
    """Hugging Face: the decoder's weight is the embedding's, its bias is also an attribute of its parent."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(2000, 8, padding_idx=0)
        self.bias = nn.Parameter(torch.zeros(2000))
        self.decoder = nn.Linear(8, 2000)
        self.decoder.weight, self.decoder.bias = self.word_embeddings.weight, self.bias

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(self.word_embeddings(ids)), ids * 3 % 2000)


def test_plain_objects_that_hold_a_module_are_given_the_new_one():
    model = Features()
    shared = model.features[0]
    shared.peers = [model.features, shared]  # a cycle
    report = compress_(model, QR(4))
    assert [feature.embed for feature in model.features] == list(model.embed_dict.values())
    assert "features referred to 2 replaced modules or weights: it refers to the new ones now" in report.references


def test_a_tied_head_is_saved_moved_and_trained_once():
    model = Bert()
    assert list(model.state_dict()) == ["bias", "word_embeddings.weight", "decoder.weight", "decoder.bias"]
    compress_(model, QR(4))
    assert type(model.decoder) is TiedLinear and model.decoder.bias is model.bias
    assert list(model.state_dict()) == ["bias", "word_embeddings.stored", "word_embeddings.meaning", "decoder.bias"]
    other = Bert()
    compress_(other, QR(4))
    other.load_state_dict(model.state_dict())
    ids = torch.tensor([3, 1999])
    assert torch.equal(other.double().loss(ids), model.double().loss(ids))


def test_the_report_says_that_a_tied_head_scores_padding_as_zeros():
    model = nn.ModuleDict({"words": nn.Embedding(1000, 8, padding_idx=3), "head": nn.Linear(8, 1000, bias=False)})
    model["head"].weight = model["words"].weight
    report = compress_(model, QR(4))
    assert any("composed table, where padding (3) is zeros" in line for line in report.references)
    assert not model["head"](torch.ones(8))[3].any()

"""``compress_`` in the styles of other libraries; ``test_foreign.py`` trains the models of the libraries themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quorem import QR, compress_
from quorem.modules.tied import TiedLinear

IDS, DIM = 2000, 8


class Feature:
    """As torch-rechub describes a feature: a plain object that holds the module."""

    def __init__(self, name):
        self.name, self.embed = name, nn.Embedding(IDS, DIM)


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
        self.word_embeddings = nn.Embedding(IDS, DIM, padding_idx=0)
        self.bias = nn.Parameter(torch.zeros(IDS))
        self.decoder = nn.Linear(DIM, IDS)
        self.decoder.weight, self.decoder.bias = self.word_embeddings.weight, self.bias

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(self.word_embeddings(ids)), ids * 3 % IDS)


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

"""``compress_`` in the styles of other libraries, trained before and after; no library is needed.

``test_foreign.py`` does the same with the libraries themselves.
"""

import gc
import weakref

import pytest
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
        self.top = nn.Linear(2 * DIM, 1)

    def loss(self, ids: Tensor) -> Tensor:
        vectors = [self.embed_dict[feature.name](ids) for feature in self.features]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(vectors, 1))[:, 0], (ids % 3 == 0).float())


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


class Regularized(nn.Module):
    """DeepCTR-Torch: tuples of a list of parameters and their penalties."""

    def __init__(self):
        super().__init__()
        self.embedding_dict = nn.ModuleDict({"a": nn.Embedding(IDS, DIM), "b": nn.Embedding(IDS, DIM)})
        self.top = nn.Linear(DIM, 1)
        self.regularization_weight = [(list(self.embedding_dict.parameters()), 0.0, 1e-5)]
        named = [(name, p) for name, p in self.top.named_parameters() if "weight" in name]
        self.regularization_weight.append((named, 0.0, 1e-5))

    def loss(self, ids: Tensor) -> Tensor:
        vectors = self.embedding_dict["a"](ids) * self.embedding_dict["b"](IDS - 1 - ids)
        loss = F.binary_cross_entropy_with_logits(self.top(vectors)[:, 0], (ids % 3 == 0).float())
        for weights, _, l2 in self.regularization_weight:
            for weight in weights:
                loss = loss + l2 * (weight[1] if isinstance(weight, tuple) else weight).square().sum()
        return loss


def trained(model, optimizer, steps=20):
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(torch.randint(1, 100, (64,), generator=draw))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("style", [Features, Bert, Regularized])
def test_a_model_trains_on_and_its_tables_are_freed(style):
    torch.manual_seed(0)
    model = style()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    before = trained(model, optimizer)
    old = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)]
    report = compress_(model, QR(4, operation="add"), fit=True, optimizer=optimizer)
    gc.collect()
    assert [reference() for reference in old] == [None] * len(old)
    assert len(report.swapped) == len(old) and not report.outdated
    after = trained(model, optimizer)
    assert before[-1] < before[0] and after[-1] < min(after[0], before[0])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


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

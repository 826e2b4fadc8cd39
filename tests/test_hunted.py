"""Defects that were found from outside, each as it was found."""

import pytest
import torch
from torch import nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, HotCold, Path, Pool, Table
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

"""``Embedding`` beside ``nn.Embedding``: what is the same, what is refused, and ids that are none."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import CASES, FEW, D, N, assert_same_gradients, fill_
from torch import nn

from quorem import QR, Embedding, EmbeddingBag, Full, Path

TABLE = Embedding(N, D, QR(4))


def test_a_full_table_is_torchs() -> None:
    """Same options, same outputs, same gradients, padding included."""
    theirs = nn.Embedding(N, D, padding_idx=5)
    ours = Embedding.from_pretrained(theirs.weight.detach(), freeze=False, padding_idx=5)
    ids = torch.tensor([[5, 0, 59], [5, 5, 7]])
    for module in (ours, theirs):
        module(ids).pow(2).sum().backward()
    assert torch.equal(ours(ids), theirs(ids))
    assert torch.equal(ours.stored.grad, theirs.weight.grad)
    assert ours.compression == 1 and ours.num_parameters == N * D
    assert (ours.num_embeddings, ours.embedding_dim, ours.padding_idx) == (N, D, 5)


@pytest.mark.parametrize("case", CASES)
def test_weight_is_the_table_it_stands_for(case: str) -> None:
    """[n, D], composed when read, with the gradient of the lookup of every id."""
    module = fill_(EmbeddingBag(N, D, CASES[case], dtype=torch.float64))
    weight = module.weight
    assert weight.shape[0] == N and weight.shape[-1] == D and torch.equal(weight, module.to_dense())
    grad = torch.randn_like(weight)
    weight.backward(grad)
    twin = copy.deepcopy(module)
    twin.zero_grad()
    Embedding.forward(twin, torch.arange(N)).backward(grad)
    assert_same_gradients(module, twin)


def test_the_weight_of_a_full_table_is_the_parameter() -> None:
    table = Embedding(N, D, Full(), padding_idx=3)
    assert table.weight is table.stored and not table.weight[3].any() and table.weight[2].all()
    assert [name for name, _ in table.named_parameters()] == ["stored"]
    head = nn.Linear(D, N, bias=False)
    table.weight = head.weight
    assert table.stored is head.weight and torch.equal(table(torch.tensor([4])), head.weight[4:5])


def test_compression_and_repr() -> None:
    table = Embedding(1000, 16, QR(4), padding_idx=0)
    assert table.num_parameters == 254 * 16 == sum(p.numel() for p in table.parameters())
    assert table.compression == 1000 / 254
    assert repr(table) == f"Embedding(1000, 16, {QR(4)}, padding_idx=0, compression=3.9)"
    path = Embedding(1000, 16, Path(4, (8,)))
    assert path.num_parameters == sum(p.numel() for p in path.parameters()) == 250 * 16 + 4 * (16 * 8 + 8 + 8 * 16 + 16)


@pytest.mark.parametrize("bad", [N, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("case", FEW)
def test_ids_out_of_range(case: str, bad: int) -> None:
    for padding in (None, 0):
        table = Embedding(N, D, CASES[case], padding_idx=padding)
        with pytest.raises(IndexError, match=rf"id {bad} is outside \[0, 60\) of Embedding"):
            table(torch.tensor([[0, 3], [bad, N + 7]]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: TABLE(torch.ones(1)), TypeError, r"input dtype \(torch.float32\) must be torch.int32 or torch.int64"),
        (lambda: TABLE(torch.tensor([True])), TypeError, r"input dtype \(torch.bool\) must be"),
        (lambda: TABLE(torch.ones(1, dtype=torch.int16)), TypeError, r"input dtype \(torch.int16\) must be"),
        (lambda: TABLE(3), TypeError, r"input \(int\) must be a Tensor"),
        (lambda: TABLE(np.array([1])), TypeError, r"input \(ndarray\) must be a Tensor"),
        (lambda: Embedding(N, D, QR(4), max_norm=1.0), ValueError, r"max_norm \(1.0\) must be None: a composed vector"),
        (lambda: Embedding(N, D, QR(4), scale_grad_by_freq=True), ValueError, r"scale_grad_by_freq \(True\) must be"),
        (lambda: Embedding(N, D, QR(4), padding_idx=N), ValueError, r"padding_idx \(60\) must be in \[-60, 59\]"),
        (lambda: Embedding(N, D, QR(4), padding_idx=-N - 1), ValueError, r"padding_idx \(-61\) must be in"),
        (lambda: Embedding(N, D, QR(4), padding_idx=1.5), TypeError, r"padding_idx \(1.5\) must be an integer"),
        (lambda: Embedding(N, D, QR(4), dtype=torch.int64), ValueError, r"dtype \(torch.int64\) must be one of"),
        (lambda: Embedding(N, D, QR(4), on_invalid_id="skip"), ValueError, r"on_invalid_id \('skip'\) must be one of"),
        (lambda: Embedding(N, D, 5), TypeError, r"scheme \(5\) must be a Scheme, such as quorem.QR"),
        (lambda: Embedding(-1, D, QR(4)), ValueError, r"num_embeddings \(-1\) must be at least 1"),
        (lambda: Embedding.from_pretrained(torch.zeros(3)), ValueError, r"embeddings has shape \(3,\) but must be 2-D"),
        (
            lambda: Embedding.from_pretrained(torch.zeros(N, D), Path(4, (1,))),
            ValueError,
            "must not be path-based: its networks have no closed-form fit",
        ),
        (
            lambda: Embedding.from_pretrained(torch.zeros(9, 2, dtype=torch.int64)),
            TypeError,
            r"embeddings \(torch.strided, torch.int64\) must be a dense tensor of floating-point numbers",
        ),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()

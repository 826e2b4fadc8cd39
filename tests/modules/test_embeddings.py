"""``Embedding`` beside ``nn.Embedding``: what is the same, what is refused, and ids that are none."""

import copy

import numpy as np
import pytest
import torch
from oracles import CASES, FEW, D, N, assert_same_gradients, fill_
from refusals import refused
from torch import nn

from quorem import QR, Embedding, EmbeddingBag, EmbeddingCollection, Full, Path, Table

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


test_refusals = refused(
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
    (lambda: Embedding.from_pretrained(torch.zeros(N, D), Path(4, (1,))), ValueError, "must not be path-based"),
    (
        lambda: Embedding.from_pretrained(torch.zeros(9, 2, dtype=torch.int64)),
        TypeError,
        r"embeddings \(torch.strided, torch.int64\) must be a dense tensor of floating-point numbers",
    ),
)


IDS, OFFSETS = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])
BAGS = EmbeddingBag(N, D, QR(4), mode="sum")
LAST = EmbeddingBag(N, D, QR(4), include_last_offset=True)
MAX = EmbeddingBag(N, D, QR(4), mode="max")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_full_table_of_bags_is_torchs(mode: str) -> None:
    options = {"mode": mode, "padding_idx": 2, "include_last_offset": True}
    theirs = nn.EmbeddingBag(N, D, **options)
    ours = EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, **options)
    ids, offsets = torch.tensor([5, 2, 7, 7, 2, 59]), torch.tensor([0, 3, 3, 5, 6])
    for module in (ours, theirs):
        module(ids, offsets).pow(2).sum().backward()
    torch.testing.assert_close(ours(ids, offsets), theirs(ids, offsets))
    torch.testing.assert_close(ours.stored.grad, theirs.weight.grad)
    assert f"mode={mode!r}" in repr(ours)


def test_weights_are_taken_in_the_dtype_of_the_tables() -> None:
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    assert torch.equal(BAGS(IDS, OFFSETS, weights), BAGS(IDS, OFFSETS, weights.float()))


def test_offsets_and_ids_may_differ_in_dtype() -> None:
    expected = BAGS(IDS, OFFSETS)
    assert torch.equal(BAGS(IDS.int(), OFFSETS), expected) and torch.equal(BAGS(IDS, OFFSETS.int()), expected)
    assert EmbeddingBag(N, D).mode == nn.EmbeddingBag(N, D).mode


@pytest.mark.parametrize("bad", [N, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("case", FEW)
def test_ids_out_of_range_in_bags(case: str, mode: str, bad: int) -> None:
    for padding in (None, 0):
        bags = EmbeddingBag(N, D, CASES[case], mode=mode, padding_idx=padding)
        match = rf"id {bad} is outside \[0, 60\) of EmbeddingBag"
        with pytest.raises(IndexError, match=match):
            bags(torch.tensor([[0, 3], [0, bad]]))
        with pytest.raises(IndexError, match=match):
            bags(torch.tensor([0, 3, bad]), torch.tensor([0, 2]))


test_refused_bags = refused(
    (lambda: BAGS(IDS), ValueError, "offsets must be given for a 1-D input"),
    (lambda: BAGS(IDS.view(2, 2), OFFSETS), ValueError, r"offsets \(2,\) must be None for a 2-D input \(2, 2\)"),
    (lambda: BAGS(IDS.view(1, 2, 2)), ValueError, r"input has shape \(1, 2, 2\) but must be 1-D or 2-D"),
    (lambda: BAGS(IDS.float(), OFFSETS), TypeError, r"input dtype \(torch.float32\) must be"),
    (lambda: BAGS(IDS, OFFSETS.float()), TypeError, r"offsets dtype \(torch.float32\) must be"),
    (lambda: BAGS(IDS, OFFSETS[None]), ValueError, r"offsets has shape \(1, 2\) but must be 1-D"),
    (lambda: BAGS(IDS, OFFSETS + 1), ValueError, r"offsets\[0\] \(1\) must be 0"),
    (lambda: BAGS(IDS, torch.tensor([0, 3, 2])), ValueError, r"offsets \(\[0, 3, 2\].*\) must not decrease"),
    (lambda: BAGS(IDS, torch.tensor([0, 5])), ValueError, r"offsets\[-1\] \(5\) must be at most the number of ids"),
    (lambda: LAST(IDS, torch.tensor([0, 5])), ValueError, r"offsets\[-1\] \(5\) must be at most the number of ids"),
    (lambda: LAST(IDS, OFFSETS[:0]), ValueError, "offsets must hold at least one entry with include_last_offset"),
    (lambda: BAGS(IDS, OFFSETS, IDS), TypeError, r"per_sample_weights \(torch.int64\) must be a floating-point"),
    (lambda: BAGS(IDS, OFFSETS, [0.5] * 4), TypeError, r"per_sample_weights \(list\) must be a floating-point Ten"),
    (lambda: BAGS(IDS, OFFSETS, torch.ones(3)), ValueError, r"per_sample_weights \(3,\) must have the shape"),
    (lambda: MAX(IDS, OFFSETS, torch.ones(4)), ValueError, "per_sample_weights must be None for mode='max'"),
    (lambda: EmbeddingBag(N, D, QR(4), mode="min"), ValueError, r"mode \('min'\) must be one of 'sum'"),
    (lambda: EmbeddingBag(N, D, QR(4), mode="max", sparse=True), ValueError, r"sparse \(True\) must be False"),
)


SOME = torch.tensor([1, 5, 99])


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize(
    ("offsets", "match"), [([1, 2], "must be 0"), ([0, 2, 1], "must not decrease"), ([0, 9], "at most the number")]
)
def test_compiled_bags_refuse_the_offsets_that_others_refuse(mode, offsets, match):
    torch._dynamo.reset()
    table = EmbeddingBag(100, 8, QR(4), mode=mode)
    for module in (table, torch.compile(table, fullgraph=True, backend="aot_eager")):
        with pytest.raises((ValueError, RuntimeError), match=match):
            module(SOME, torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bags_of_paths_have_sparse_gradients_in_half_precision(dtype):
    table = EmbeddingBag(100, 8, Path(20, (6,), force=True), sparse=True, mode="sum", dtype=dtype)
    dense = EmbeddingBag(100, 8, Path(20, (6,), force=True), mode="sum", dtype=dtype)
    dense.load_state_dict(table.state_dict())
    for module in (table, dense):
        module(SOME[None]).sum().backward()
    assert table.stored.grad.is_sparse
    torch.testing.assert_close(table.stored.grad.float().to_dense(), dense.stored.grad.float())
    tables = [Table("a", 100, 8, Path(20, (6,), force=True)), Table("b", 100, 8, QR(4))]
    mixed, twin = (EmbeddingCollection(tables, sparse=sparse, dtype=dtype) for sparse in (True, False))
    twin.load_state_dict(mixed.state_dict())
    for module in (mixed, twin):
        module(torch.cat([SOME, SOME]), torch.tensor([0, 3, 6])).sum().backward()
    gradient = mixed.stored.grad.float()
    torch.testing.assert_close(gradient.to_dense() if gradient.is_sparse else gradient, twin.stored.grad.float())

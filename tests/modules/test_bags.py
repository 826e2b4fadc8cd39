"""``EmbeddingBag``: its forms and refusals; the values are in ``test_conformance``."""

from collections.abc import Callable

import pytest
import torch
from oracles import CASES, FEW, D, N
from torch import Tensor, nn

from quorem import QR, EmbeddingBag, EmbeddingCollection, Path, Table

IDS, OFFSETS = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])
BAGS = EmbeddingBag(N, D, QR(4), mode="sum")
LAST = EmbeddingBag(N, D, QR(4), include_last_offset=True)
MAX = EmbeddingBag(N, D, QR(4), mode="max")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_full_table_is_torchs(mode: str) -> None:
    theirs = nn.EmbeddingBag(N, D, mode=mode, padding_idx=2, include_last_offset=True)
    ours = EmbeddingBag.from_pretrained(
        theirs.weight.detach(), freeze=False, mode=mode, padding_idx=2, include_last_offset=True
    )
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
def test_ids_out_of_range(case: str, mode: str, bad: int) -> None:
    for padding in (None, 0):
        bags = EmbeddingBag(N, D, CASES[case], mode=mode, padding_idx=padding)
        match = rf"id {bad} is outside \[0, 60\) of EmbeddingBag"
        with pytest.raises(IndexError, match=match):
            bags(torch.tensor([[0, 3], [0, bad]]))
        with pytest.raises(IndexError, match=match):
            bags(torch.tensor([0, 3, bad]), torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
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
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Tensor], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


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

"""Composed rows times matrices: fused and in plain PyTorch, with gradients."""

import contextlib
from typing import Literal

import pytest
import torch
from torch import nn

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table, optim, quantize_
from quorem.ops import cpu
from quorem.ops import projection as truth
from quorem.ops.narrow import project
from quorem.ops.pieces import SplitGradient, pieces_of, whole
from quorem.ops.rows import IdBatch

PIECES = pieces_of([4, 3, 1, 5, 4], [16, 7, 20, 5, 16], [0, 1, 2, -1, 0])  # the first and the last share a matrix


def inputs(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    matrices = [torch.randn(shape, dtype=dtype) for shape in ((4, 16), (3, 7), (1, 20))]
    return torch.randn(size, 17, dtype=dtype), matrices


@pytest.mark.kernels(device="cpu")
@pytest.mark.parametrize("size", [0, 1, 127, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fused_products_equal_the_plain_ones(size: int, dtype: torch.dtype) -> None:
    composed, matrices = inputs(size, dtype)
    expected = truth.project(composed.double(), PIECES, [m.double() for m in matrices]).to(dtype)
    assert "project" in cpu.kernels()
    torch.testing.assert_close(project(composed, PIECES, matrices), expected)
    transposed = composed.T.contiguous().T
    torch.testing.assert_close(project(transposed, PIECES, [m.T.contiguous().T for m in matrices]), expected)


TABLES = [
    Table("a", 900, 16, QR(4, width=4)),
    Table("b", 50, 48, Full()),
    Table("c", 900, 32, HotCold(30, cold=Pool(200), width=8), features=("c", "d"), padding_idx=3),
    Table("e", 900, 16, HotCold(30, cold=QR(3, operation="concat"))),
]


@pytest.mark.kernels(device="cpu")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("streamed", [False, True])
def test_lookups_project_as_they_do_with_gradients(
    bits: Literal[8, 4] | None, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streamed:
        monkeypatch.setattr("quorem.ops.cpu.projection.STREAMED", 0)
    module: nn.Module = EmbeddingCollection(TABLES)
    module = module if bits is None else quantize_(module, bits)
    for size in (1, 300):
        ids = torch.randint(0, 50, (size, 5))
        composed = module._lookup(IdBatch(ids)).detach().flatten(1)
        expected = truth.project(composed, module.pieces, module.matrices())
        with torch.no_grad():
            torch.testing.assert_close(module(ids), expected)
            ids[-1, 1] = 50
            with pytest.raises(IndexError, match=r"id 50 is outside \[0, 50\) of table b"):
                module(ids)


@pytest.mark.kernels(device="cpu")
def test_gradients_equal_those_of_plain_products_twice() -> None:
    composed, matrices = inputs(9, torch.float64)
    leaves = [composed.requires_grad_(), *(m.requires_grad_() for m in matrices)]
    assert torch.autograd.gradcheck(lambda x, *ms: project(x, PIECES, ms), leaves)
    assert torch.autograd.gradgradcheck(lambda x, *ms: project(x, PIECES, ms), leaves)


@pytest.mark.kernels(device="cpu")
@pytest.mark.parametrize("way", ["dense", "sparse", "in backward", "profiled"])
def test_gradients_of_lookups_equal_those_of_plain_products(way: str) -> None:
    torch.manual_seed(0)
    module = EmbeddingCollection(TABLES, dtype=torch.float64, sparse=way == "sparse")
    ids = torch.randint(0, 50, (3000, 5))
    expected = truth.project(module._lookup(IdBatch(ids)).flatten(1), module.pieces, module.matrices())
    grad, leaves = torch.randn(expected.shape, dtype=expected.dtype), (module.stored, *module.matrices())
    wanted, *of_matrices = torch.autograd.grad(expected, leaves, grad)
    before = module.stored.detach().clone()
    if way == "in backward":
        optim.apply_in_backward(module, optim.SGD, lr=1.0)
    with torch.profiler.profile() if way == "profiled" else contextlib.nullcontext():
        vectors = module(ids)
    torch.testing.assert_close(vectors, expected)
    vectors.backward(grad)
    actual = module.stored.grad if module.stored.grad is not None else before - module.stored.detach()
    torch.testing.assert_close(actual.to_dense(), wanted.to_dense())
    for matrix, of_matrix in zip(module.matrices(), of_matrices, strict=True):
        torch.testing.assert_close(matrix.grad, of_matrix)


@pytest.mark.kernels(device="cpu")
def test_threads_do_not_change_the_bits() -> None:
    composed, matrices = inputs(120_000, torch.float32)
    module, ids = EmbeddingCollection(TABLES), torch.randint(0, 50, (40_000, 5))
    grad, threads = torch.randn(len(ids), 16 + 48 + 32 + 32 + 16), torch.get_num_threads()

    def results(count: int) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        vectors = module(ids)
        gradients = torch.autograd.grad(vectors, (module.stored, *module.matrices()), grad)
        return [project(composed, PIECES, matrices), vectors, *gradients]

    try:
        assert all(map(torch.equal, results(1), results(4)))
    finally:
        torch.set_num_threads(threads)


def test_a_split_gradient_as_one_tensor() -> None:
    pieces = pieces_of([4, 2, 4], [6, 2, 6], [0, -1, 1])
    narrow, vectors = torch.arange(8.0)[None], torch.arange(10.0, 24)[None]
    gradient = whole(SplitGradient(narrow, vectors, pieces), 2)
    assert gradient.tolist() == [[[0, 1], [2, 3], [16, 17], [4, 5], [6, 7]]]

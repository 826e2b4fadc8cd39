"""Composed rows times matrices: fused and in plain PyTorch, with gradients."""

import pytest
import torch

from quorem.ops import cpu
from quorem.ops.projection import pieces_of, project, projected

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
    expected = projected(composed.double(), PIECES, [m.double() for m in matrices]).to(dtype)
    assert "project" in cpu.kernels()
    torch.testing.assert_close(project(composed, PIECES, matrices), expected)
    out = torch.full_like(expected, float("nan"))
    assert project(composed, PIECES, matrices, out) is out
    torch.testing.assert_close(out, expected)
    transposed = composed.T.contiguous().T
    torch.testing.assert_close(project(transposed, PIECES, [m.T.contiguous().T for m in matrices]), expected)


@pytest.mark.kernels(device="cpu")
def test_gradients_equal_those_of_plain_products_twice() -> None:
    composed, matrices = inputs(9, torch.float64)
    leaves = [composed.requires_grad_(), *(m.requires_grad_() for m in matrices)]
    assert torch.autograd.gradcheck(lambda x, *ms: project(x, PIECES, ms), leaves)
    assert torch.autograd.gradgradcheck(lambda x, *ms: project(x, PIECES, ms), leaves)


@pytest.mark.kernels(device="cpu")
def test_threads_do_not_change_the_bits() -> None:
    composed, matrices = inputs(120_000, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = project(composed, PIECES, matrices)
        torch.set_num_threads(4)
        assert torch.equal(project(composed, PIECES, matrices), alone)
    finally:
        torch.set_num_threads(threads)

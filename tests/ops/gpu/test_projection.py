"""The Triton kernels of narrow rows against plain products: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from gpu_cases import DEVICE, assert_close

from quorem.ops import projection as truth
from quorem.ops.pieces import pieces_of

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import projection

pytestmark = [pytest.mark.kernels(device="gpu"), pytest.mark.usefixtures("nan_filled")]
PIECES = pieces_of([4, 3, 1, 5, 4], [16, 7, 20, 5, 16], [0, 1, 2, -1, 0])  # the first and the last share a matrix


@pytest.mark.parametrize("size", [0, 1, 63, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_and_gradients(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = ((4, 16), (3, 7), (1, 20))
    matrices = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    composed, grad = (torch.randn(size, n, device=DEVICE).to(dtype) for n in (17, 64))
    exact = [m.double() for m in matrices]
    expected = truth.project(composed.double(), PIECES, exact)
    assert_close(projection.project(composed, PIECES, matrices), expected, dtype, "vectors")
    of_composed, of_matrices = projection.project_backward(grad, composed, PIECES, matrices)
    exact_composed, exact_matrices = truth.project_backward(grad.double(), composed.double(), PIECES, exact)
    assert_close(of_composed, exact_composed, dtype, "composed")
    for n, (actual, wanted) in enumerate(zip(of_matrices, exact_matrices, strict=True)):
        assert_close(actual, wanted, dtype, f"matrix {n}")


def test_what_the_kernels_do_not_support_is_left_to_plain_pytorch() -> None:
    composed, matrices = torch.randn(3, 2, dtype=torch.float64, device=DEVICE), [torch.randn(2, 4, device=DEVICE)]
    assert projection.project(composed, pieces_of([2], [4], [0]), matrices) is NotImplemented
    wide = [torch.randn(2, 300, device=DEVICE)]
    assert projection.project(composed.float(), pieces_of([2], [300], [0]), wide) is NotImplemented

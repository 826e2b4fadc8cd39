"""The Triton kernels of narrow rows against plain products: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from gpu_cases import DEVICE, N, assert_close, batch

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops import projection as truth
from quorem.ops.lookup import lookup
from quorem.ops.pieces import pieces_of
from quorem.ops.rows import IdBatch

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


@pytest.mark.parametrize(
    ("dtype", "keep"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_rows_are_composed_and_multiplied_at_once(dtype: torch.dtype, keep: bool) -> None:
    torch.manual_seed(0)
    pool = Pool(70)
    tables = [
        Table("full", 50, 16),
        Table("qr", 300, 16, QR(4, width=4)),
        Table("hot", N, 16, HotCold(20, cold=pool, num_rest=30, width=4), frequencies=torch.randperm(N), padding_idx=7),
        Table("cold", N, 16, HotCold(10, cold=pool, width=4), features=("seen", "bought")),
        Table("two", 300, 16, QR(4, width=8)),
        Table("small", 300, 20, Full(width=4)),
    ]
    module = EmbeddingCollection(tables, device=DEVICE, dtype=dtype)
    for size in (0, 1, 70):
        ids = batch(module, size) if size else torch.empty(0, 7, dtype=torch.int64, device=DEVICE)
        invalid, counted = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
        read, stored = IdBatch(ids), module.stored.detach()
        matrices = [matrix.detach() for matrix in module.matrices()]
        inputs = (read, stored, module.layout, module.pieces, matrices)
        kept, vectors = projection.lookup_split(*inputs, names="", keep=keep, invalid=invalid)
        composed = lookup(read, stored.double(), module.layout, counted).flatten(1)
        expected = truth.project(composed, module.pieces, [matrix.double() for matrix in matrices])
        assert_close(vectors, expected, dtype, "vectors")
        assert int(invalid) == int(counted) == (size > 0)
        for piece in module.pieces if keep else ():
            if piece.matrix >= 0:
                columns = slice(piece.start, piece.start + piece.width)
                assert_close(kept[:, columns], composed[:, columns], dtype, "composed rows")
    for operation in ("concat", "feature"):  # slots of several rows
        apart = EmbeddingCollection([Table("a", 300, 16, QR(4, operation=operation, width=4))], device=DEVICE)
        other = (IdBatch(ids[:, :1]), apart.stored.detach(), apart.layout, apart.pieces, apart.matrices())
        assert projection.lookup_split(*other, names="") is NotImplemented
    if dtype != torch.float32:  # composed rows of 16 bytes, which a GPU writes slowly
        assert projection.lookup_split(*inputs, names="", keep=True) is NotImplemented

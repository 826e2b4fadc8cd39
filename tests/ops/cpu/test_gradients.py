"""Row gradients: which ids get one, in which dtype they are summed, and which slots are summed together."""

import pytest
import torch
from kernel_cases import Case, fused

from quorem import QR, Embedding, Full
from quorem.ops import cpu
from quorem.ops.rows import IdBatch

pytestmark = pytest.mark.kernels(device="cpu")


def test_invalid_ids_get_no_gradient():
    case = Case([(QR(4), 1000, None)])
    ids = torch.tensor([[5], [10**12], [-7], [999]])
    grad = case.grad(4)
    dense = fused("backward", grad, IdBatch(ids), case.stored, case.layout)
    valid = [0, 3]
    assert torch.equal(dense, fused("backward", grad[valid], IdBatch(ids[valid]), case.stored, case.layout))


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize("dtype, total", [(torch.bfloat16, 3008), (torch.float16, 3000)])
def test_sparse_gradients_are_summed_before_they_are_rounded(dtype, total, backend, monkeypatch):
    if backend == "plain":
        monkeypatch.setattr(cpu, "kernels", dict)
    table = Embedding(10, 2, Full(), sparse=True, dtype=dtype)
    table(torch.zeros(3000, dtype=torch.int64)).sum().backward()
    assert table.stored.grad.coalesce().values().tolist() == [[total, total]]

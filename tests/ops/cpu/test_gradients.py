"""Row gradients: which ids get one, in which dtype they are summed, and which slots are summed together."""

import pytest
import torch
from kernel_cases import Case, fused

from quorem import QR, Embedding, EmbeddingCollection, Full, HotCold, Pool, Table
from quorem.ops import cpu
from quorem.ops.cpu.gradients import sharing_of
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


def test_slots_of_one_pool_or_one_table_are_one_group_and_columns_of_the_same_rows_one_slot():
    tables = [
        Table("a", 400, 8, QR(4), features=("b", "c")),
        Table("d", 400, 24, QR(4), features=("e", "f")),
        Table("g", 400, 8, HotCold(20, cold=Pool(80))),
        Table("h", 50, 16, Full()),
        Table("i", 400, 8, HotCold(20, cold=Pool(80))),
    ]
    groups = sharing_of(EmbeddingCollection(tables).layout).groups
    assert groups == [[0, 1], [2, 5], [8, 11], [9]]

"""Row gradients: which ids get one, and in which dtype they are summed."""

import pytest
import torch
from kernel_cases import Case, fused

from quorem import QR

pytestmark = pytest.mark.kernels(device="cpu")


def test_invalid_ids_get_no_gradient():
    case = Case([(QR(4), 1000, None)])
    ids = torch.tensor([[5], [10**12], [-7], [999]])
    grad = case.grad(4)
    dense = fused("lookup_backward", grad, ids, case.stored, case.layout)
    valid = [0, 3]
    assert torch.equal(dense, fused("lookup_backward", grad[valid], ids[valid], case.stored, case.layout))

"""Derivatives that the ops do not have are refused."""

import pytest
import torch
from kernel_cases import MIX, Case
from torch.autograd import forward_ad

from quorem.ops import autograd
from quorem.ops.rows import IdBatch
from quorem.ops.updates import Updates


@pytest.mark.parametrize("bag", [False, True])
def test_forward_mode_is_refused_even_without_a_gradient(bag):
    case = Case(MIX[:1])
    ids = case.ids(3)
    with torch.no_grad(), forward_ad.dual_level():
        stored = forward_ad.make_dual(case.stored, torch.ones_like(case.stored))
        with pytest.raises(NotImplementedError, match="jvp"):
            batch = IdBatch(ids[:, 0], torch.arange(4), mean=True) if bag else IdBatch(ids)
            autograd.lookup(batch, stored, case.layout, Updates(), {"names": ""})

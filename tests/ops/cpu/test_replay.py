"""Rows that lag behind are brought up to date."""

import pytest
from kernel_cases import LR, MIX, Case, fresh, fused

from quorem.ops.rows import lookup_reads

pytestmark = pytest.mark.kernels(device="cpu")


def test_catch_up_reaches_every_row_that_is_read():
    case = Case(MIX[:2])
    state, constants = fresh("amsgrad", case)
    options = {"rule": "amsgrad", "constants": constants}
    ids = case.ids(100)
    for batch in (ids, case.ids(3), case.ids(3)):
        fused("lookup_update_", case.grad(len(batch)), batch, case.stored, LR, state, case.layout, **options)
    assert (state.last[state.last > 0] < state.step).any()
    fused("lookup_catch_up_", ids, case.stored, state, case.layout, **options)
    reads = lookup_reads(ids, case.layout)
    assert (state.last[reads.rows[reads.valid]] == state.step).all()

"""Rows that lag behind are brought up to date."""

import pytest
import torch
from kernel_cases import LR, MIX, Case, fresh, fused, truth

from quorem import Full
from quorem.ops.rows import IdBatch, lookup_reads

pytestmark = pytest.mark.kernels(device="cpu")


def test_catch_up_reaches_every_row_that_is_read():
    case = Case(MIX[:2])
    rule = fresh("amsgrad", case)
    state = rule.state
    ids = case.ids(100)
    for batch in (ids, case.ids(3), case.ids(3)):
        fused("update_", case.grad(len(batch)), IdBatch(batch), case.stored, case.layout, rule)
    assert (state.last[state.last > 0] < state.step).any()
    fused("catch_up_", IdBatch(ids), case.stored, case.layout, rule)
    reads = lookup_reads(ids, case.layout)
    assert (state.last[reads.rows[reads.valid]] == state.step).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "run, name, betas, steps",
    [
        (fused, "amsgrad", (0.99, 0.7), 2400),
        (fused, "amsgrad", (0.999, 0.5), 1300),
        (fused, "amsgrad", (0.9, 0.03), 400),
        (fused, "adam", (0.5, 0.26), 1400),
        (fused, "adam", (0.9, 0.82), 1400),
        (truth, "adam", (0.5, 0.26), 700),
        (truth, "adam", (0.1, 0.02), 100),
    ],
)
def test_powers_of_small_betas_neither_overflow_nor_vanish(run, name, betas, steps, dtype):
    """A row gets gradients up to step 30 and none after, until powers of the betas have left the range of float64."""
    case = Case([(Full(), steps + 1, None)], width=3, dtype=dtype)
    rule = fresh(name, case, betas)
    row = torch.tensor([steps])  # the last whose turn it would be
    dense = torch.nn.Parameter(case.stored[row].double())
    adam = torch.optim.Adam([dense], lr=float(LR), betas=betas, eps=rule.constants.eps, amsgrad=name == "amsgrad")
    for step in range(steps):
        gradient = torch.randn(1, 3, dtype=dtype) * (step < 30)
        dense.grad = gradient.double()
        adam.step()
        run("rows_update_", row if step < 30 else row - 1, gradient, case.stored, rule)
    assert rule.state.last[row] == 30
    run("rows_catch_up_", row, case.stored, rule)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(case.stored[row].double(), dense.detach(), rtol=0, atol=tolerance)

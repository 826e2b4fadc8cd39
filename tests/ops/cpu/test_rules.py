"""Every rule, fused, against the truth: lookups, bags and plain rows."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, LR, MIX, RULES, Case, fresh, fused, same, truth
from row_rules import copied

from quorem import QR, Full
from quorem.ops import state
from quorem.ops.rows import IdBatch, accumulator, lookup_reads

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates(rule, dtype):
    check_updates(Case([MIX[0], MIX[1], MIX[4], MIX[8]], dtype=dtype, widths=[16, 48, 16, 32]), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranked", [False, True])
def test_updates_of_shared_rows(rule, ranked):
    if rule == "rowwise_adagrad":  # its kernel takes rows of one width, so no concatenation
        case = Case(HOT_COLD[6:], features=[0, 1, 0, 2, 3, 3], ranked=ranked)
    else:
        case = Case(HOT_COLD, width=32 if ranked else 16, features=HOT_COLD_FEATURES, ranked=ranked)
    check_updates(case, rule)


def check_updates(case, name):
    dtype, lags = case.stored.dtype, state.RULES[name].lags
    rule, stored = fresh(name, case), case.stored

    def take(op, *before, after=(case.layout,)):
        """One op, fused and by the truth. Both continue from what the truth makes of the state."""
        results = []
        for run in (fused, truth):
            target, own = stored.clone(), copied(rule)
            if op == "rows_update_" and name == "rowwise_adagrad" and own.state.extents[:, 1].max() > 1:
                run = truth  # it is left to it
            run(op, *before, target, *after, own)
            if "catch_up" in op:  # it may bring more rows up to date than those that valid ids read
                truth("rows_catch_up_", None, target, own)
            results.append((target, own.state))
        (actual, actual_state), (expected, expected_state) = results
        same(f"{op} stored", actual, expected)
        for field, a, b in zip(actual_state._fields, actual_state, expected_state, strict=True):
            if b is not None:
                same(f"{op} {field}", a, b)
        rule.state = expected_state
        stored.copy_(expected)

    for step in range(12):
        ids, grad = case.ids(40), case.grad(40)
        if lags:
            take("catch_up_", IdBatch(ids))
        take("update_", grad, IdBatch(ids))
        ids, offsets = case.bags(15)
        bags = IdBatch(ids, offsets, torch.rand(len(ids)).to(dtype), mean=step % 2 == 0)
        if lags:
            take("catch_up_", bags)
        take("update_", case.grad(15), bags)
        rows = torch.randint(-1, len(stored), (30,))
        values = torch.randn(30, case.storage.width).to(accumulator(stored))
        take("rows_update_", rows, values, after=())
        if lags:
            take("rows_catch_up_", torch.randint(0, len(stored), (20,)), after=())
    if lags:
        take("rows_catch_up_", None, after=())


def test_updates_take_gradients_from_stored_as_it_was():
    case = Case([(QR(2, operation="mult", force=True), 4, None)], width=1)
    case.stored[:] = torch.tensor([[2.0], [3.0], [5.0], [7.0]])  # remainder 0, 1; quotient 0, 1
    ids, grad = torch.tensor([[0], [0], [3]]), torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    rule = fresh("sgd", case, lr=1.0)
    fused("update_", grad, IdBatch(ids), case.stored, case.layout, rule)
    assert case.stored.flatten().tolist() == [2 - 11 * 5, 3 - 100 * 7, 5 - 11 * 2, 7 - 100 * 3]


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

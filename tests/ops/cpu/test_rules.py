"""Every rule, fused, against the truth: lookups, bags and plain rows, clipped and unscaled."""

import pytest
import torch
from kernel_cases import HOT_COLD, HOT_COLD_FEATURES, LR, MIX, RULES, Case, fresh, fused, same, truth

from quorem import QR, Full
from quorem.ops.rows import IdBatch, accumulator
from quorem.ops.state import CATCHES_UP

pytestmark = pytest.mark.kernels(device="cpu")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_updates(rule, dtype):
    check_updates(Case([MIX[0], MIX[1], MIX[4], MIX[8]], dtype=dtype, widths=[16, 48, 16, 32]), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranked", [False, True])
def test_updates_of_shared_rows(rule, ranked):
    check_updates(Case(HOT_COLD, width=32 if ranked else 16, features=HOT_COLD_FEATURES, ranked=ranked), rule)


def check_updates(case, rule):
    dtype = case.stored.dtype
    state, constants = fresh(rule, case)
    stored, rule_options = case.stored, {"rule": rule, "constants": constants}

    def take(op, *before, after=(case.layout,), **options):
        """One op, fused and by the truth. Both continue from what the truth makes of the state."""
        results = []
        for run in (fused, truth):
            target = stored.clone()
            target_state = type(state)(*[t if t is None else t.clone() for t in state])
            if op == "rows_update_" and rule == "rowwise_adagrad":
                run = truth  # what the fused version leaves to it: here rows of a table are several of ``stored``
            rate = () if "catch_up" in op else (LR,)
            run(op, *before, target, *rate, target_state, *after, **rule_options, **options)
            if "catch_up" in op:  # it may bring more rows up to date than those that valid ids read
                truth("rows_catch_up_", None, target, target_state, **rule_options)
            results.append((target, target_state))
        (actual, actual_state), (expected, expected_state) = results
        same(f"{op} stored", actual, expected)
        for name, old, a, b in zip(state._fields, state, actual_state, expected_state, strict=True):
            if old is not None:
                same(f"{op} {name}", a, b)
                old.copy_(b)
        stored.copy_(expected)

    for step in range(12):
        clip = {"clip_value": 0.2} if step % 3 == 1 else {}
        scale = {"loss_scale": torch.tensor(4.0)} if step % 4 == 2 else {}
        ids, grad = case.ids(40), case.grad(40)
        if step == 6:
            grad[3] = torch.inf  # overflowed, where there is a loss scale
        if rule in CATCHES_UP:
            take("catch_up_", IdBatch(ids))
        take("update_", grad, IdBatch(ids), **clip, **scale)
        ids, offsets = case.bags(15)
        bags = IdBatch(ids, offsets, torch.rand(len(ids)).to(dtype), mean=step % 2 == 0)
        if rule in CATCHES_UP:
            take("catch_up_", bags)
        take("update_", case.grad(15), bags, **clip, **scale)
        rows = torch.randint(-1, len(stored), (30,))
        values = torch.randn(30, case.storage.width).to(accumulator(stored))
        take("rows_update_", rows, values, after=(), **clip)
        if rule in CATCHES_UP:
            take("rows_catch_up_", torch.randint(0, len(stored), (20,)), after=())
    if rule in CATCHES_UP:
        take("rows_catch_up_", None, after=())


def test_updates_take_gradients_from_stored_as_it_was():
    case = Case([(QR(2, operation="mult", force=True), 4, None)], width=1)
    case.stored[:] = torch.tensor([[2.0], [3.0], [5.0], [7.0]])  # remainder 0, 1; quotient 0, 1
    ids, grad = torch.tensor([[0], [0], [3]]), torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    lr = torch.tensor(1.0, dtype=torch.float64)
    state, constants = fresh("sgd", case)
    fused("update_", grad, IdBatch(ids), case.stored, lr, state, case.layout, rule="sgd", constants=constants)
    assert case.stored.flatten().tolist() == [2 - 11 * 5, 3 - 100 * 7, 5 - 11 * 2, 7 - 100 * 3]


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("run", [fused, truth])
def test_a_row_of_a_table_overflows_as_a_whole(rule, bag, run):
    """Of a row that is three rows of ``stored``, one element is infinite: no column of it moves, all others do."""
    case = Case([(QR(4, force=True), 40, None), (Full(), 40, None)], widths=[48, 16])
    state, constants = fresh(rule, case)
    ids, grad = torch.tensor([[0, 0], [13, 1]]), torch.full((2, 4, 16), 8.0)
    grad[0, 1, 5] = torch.inf
    options = {"rule": rule, "constants": constants, "loss_scale": torch.tensor(4.0)}
    before = case.stored.clone()
    batch = IdBatch(ids.T.flatten(), torch.arange(5)) if bag else IdBatch(ids)
    run("update_", grad, batch, case.stored, LR, state, case.layout, **options)
    moved = [table.of(before) != table.of(case.stored) for feature in case.storage.extents for table in feature]
    rows = [torch.nonzero(table.any(1)).flatten().tolist() for table in moved]
    assert rows == [[3], [1], [0, 1]]  # of id 13 by 10 remainders; rows 0 of the wide tables overflowed
    assert all(bool(table[row].all()) for table, changed in zip(moved, rows, strict=True) for row in changed)

"""What reaches a kernel, what the truth takes over, and what is refused."""

import sys
from typing import Any

import pytest
import torch
from kernel_cases import LR, MIX, Case, fresh, fused, same, truth
from torch import Tensor

from quorem import Custom, Embedding
from quorem.ops import cpu
from quorem.ops.declare import OPS, call
from quorem.ops.layout import Layout
from quorem.partitions import Partition

pytestmark = pytest.mark.kernels(device="cpu")


def test_what_is_not_supported_falls_back():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    expected = truth("lookup", ids, case.stored, case.layout)
    assert torch.equal(call("lookup", ids.short(), case.stored, case.layout, names=""), expected)
    strided = Layout(*[torch.stack([t, t], -1)[..., 0] for t in case.layout])
    assert torch.equal(call("lookup", ids, case.stored, strided, names=""), expected)
    dense = call("lookup_backward", grad.double(), ids, case.stored, case.layout)
    same("stored", dense, fused("lookup_backward", grad, ids, case.stored, case.layout))


def test_rows_and_state_that_are_not_contiguous_fall_back():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    strided = torch.empty(2, *reversed(case.stored.shape)).transpose(1, 2)
    stored, sum_ = strided[0].copy_(case.stored), strided[1].zero_()
    state, constants = fresh("adagrad", case)
    options = {"rule": "adagrad", "constants": constants}
    other = state._replace(sum=sum_, step=state.step.clone())
    call("lookup_update_", grad, ids, stored, LR, other, case.layout, **options)
    fused("lookup_update_", grad, ids, case.stored, LR, state, case.layout, **options)
    same("stored", stored, case.stored)
    same("sum", sum_, state.sum)


def test_arguments_that_do_not_fit_reach_no_kernel():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    with pytest.raises((IndexError, RuntimeError)):  # torch's own: there is no second column
        call("lookup", ids[:, :1], case.stored, case.layout, names="")
    dense = call("lookup_backward", torch.ones(1, 1, 1), ids, case.stored, case.layout)
    same("stored", dense, fused("lookup_backward", torch.ones_like(grad), ids, case.stored, case.layout))
    bag_ids, offsets = case.bags(4)
    for wrong in (offsets.flip(0), offsets + 10**9):
        args = (bag_ids, wrong, None, case.stored, case.layout)
        assert cpu.kernels()["bag"](*args, mean=True, names="") is NotImplemented


@pytest.mark.parametrize("op", ["rows_update_", "rows_catch_up_"])
def test_rows_out_of_range(op):
    case = Case(MIX[:2])
    state, constants = fresh("adam", case)
    rows = torch.tensor([0, len(case.stored)])
    values, lr = ((torch.ones(2, 16),), (LR,)) if op == "rows_update_" else ((), ())
    with pytest.raises(IndexError, match=rf"rows \({len(case.stored)}\) must be below the number of rows"):
        fused(op, rows, *values, case.stored, *lr, state, rule="adam", constants=constants)


def each_op(case: Case, stored: Tensor, layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Every op that finds rows by a layout, with its arguments."""
    ids, grad, (bag_ids, offsets) = case.ids(9), case.grad(9), case.bags(9)
    state, _ = fresh("adam", case)
    bag = (bag_ids, offsets, None, stored, layout)
    return {
        "lookup": (ids, stored, layout),
        "lookup_backward": (grad, ids, stored, layout),
        "lookup_row_grads": (grad, ids, stored, layout),
        "bag": bag,
        "bag_backward": (grad, *bag),
        "bag_row_grads": (grad, *bag),
        "bag_sample_weights_backward": (grad, bag_ids, offsets, stored, layout),
        "lookup_update_": (grad, ids, stored, LR, state, layout),
        "bag_update_": (grad, bag_ids, offsets, None, stored, LR, state, layout),
        "lookup_catch_up_": (ids, stored, state, layout),
        "bag_catch_up_": (bag_ids, offsets, stored, state, layout),
    }


def options(op: str, case: Case) -> dict[str, Any]:
    """The options that an op needs."""
    needed = {"rule": "adam", "constants": fresh("adam", case)[1]} if op.endswith("_") else {}
    if "bag" in op and "catch_up" not in op:
        needed["mean"] = True
    return {**needed, "names": ""} if op in ("lookup", "bag") else needed


OPS_BY_LAYOUT = tuple(each_op(Case(MIX[:1]), torch.empty(0), Case(MIX[:1]).layout))


@pytest.mark.parametrize("op", OPS_BY_LAYOUT)
def test_rows_that_are_missing_are_not_read(op):
    case = Case(MIX[:3])
    short = case.stored[:-1]
    with pytest.raises(ValueError, match=rf"stored \({len(short)} rows\) must have every row that its layout names"):
        fused(op, *each_op(case, short, case.layout)[op], **options(op, case))


@pytest.mark.parametrize("op", OPS_BY_LAYOUT)
def test_a_layout_of_another_dtype_is_refused(op):
    case = Case(MIX[:2])
    layout = Layout(*[t.double() for t in case.layout])
    with pytest.raises(TypeError, match=r"layout \(torch.float64, .*\) must be torch.int64"):
        fused(op, *each_op(case, case.stored, layout)[op], **options(op, case))


def test_a_layout_on_another_device_reaches_no_kernel(monkeypatch):
    case = Case(MIX[:2])
    layout = Layout(*[t.to("meta") for t in case.layout])
    monkeypatch.setitem(cpu.kernels(), "lookup", lambda *args, **options: pytest.fail("a kernel would read address 0"))
    assert call("lookup", case.ids(3), case.stored, layout, names="").shape == (3, 2, 16)


@pytest.mark.parametrize("name", Layout._fields[:4])
def test_a_layout_of_uninitialized_integers_is_refused(name):
    case = Case([MIX[0], MIX[8]])
    layout = case.layout._replace(**{name: torch.full_like(getattr(case.layout, name), 2**62 + 12345)})
    if name == "maps":  # its values are not looked at, but its length is
        layout = case.layout._replace(maps=case.layout.maps[:-1])
    with pytest.raises(ValueError, match="must have every row that its layout names"):
        fused("lookup", case.ids(3), case.stored, layout, names="")


def test_thousands_of_partitions_run_in_plain_torch():
    parts = tuple(Partition(1, 2) for _ in range(20_000))
    table = Embedding(2, 1, Custom(parts, operation="add", check=False, force=True))
    ids = torch.tensor([1, 0, 1])
    expected = torch.stack([column[ids] for column in table.tables()]).sum(0)
    torch.testing.assert_close(table(ids), expected)


@pytest.mark.parametrize("hindrance", ["missing", "disabled"])
def test_without_numba_the_truth_runs(hindrance, monkeypatch):
    case = Case(MIX[:2])
    ids = case.ids(10)
    if hindrance == "missing":
        for name in [name for name in sys.modules if name.startswith("quorem.ops.cpu.launch")]:
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(cpu, name.rpartition(".")[2])
        monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.setitem(sys.modules, "numba.core", None)
    else:
        monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    cpu.kernels.cache_clear()
    try:
        assert cpu.kernels() == {}
        out = call("lookup", ids, case.stored, case.layout, names="")
        assert torch.equal(out, truth("lookup", ids, case.stored, case.layout))
        with pytest.raises(IndexError, match="id 1000 is outside"):
            call("lookup", torch.tensor([[1000, 0]]), case.stored, case.layout, names="")
    finally:
        monkeypatch.undo()
        cpu.kernels.cache_clear()
    assert "lookup" in cpu.kernels()


def test_every_kernel_is_an_op():
    assert set(cpu.kernels()) <= set(OPS)

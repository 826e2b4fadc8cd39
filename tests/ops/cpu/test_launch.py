"""What reaches a kernel, what the truth takes over, and what is refused."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import pytest
import torch
from kernel_cases import MIX, Case, fresh, fused, same, truth
from torch import Tensor

from quorem import Custom, Embedding
from quorem.ops import cpu
from quorem.ops.cpu import compiled, lookup
from quorem.ops.declare import call
from quorem.ops.layout import Layout
from quorem.ops.rows import IdBatch
from quorem.paper.partitions import Partition

pytestmark = pytest.mark.kernels(device="cpu")


def test_what_is_not_supported_falls_back():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    expected = truth("lookup", IdBatch(ids), case.stored, case.layout)
    assert torch.equal(call("lookup", IdBatch(ids.short()), case.stored, case.layout, names=""), expected)
    strided = Layout(*[torch.stack([t, t], -1)[..., 0] for t in case.layout])
    assert torch.equal(call("lookup", IdBatch(ids), case.stored, strided, names=""), expected)
    dense = call("backward", grad.double(), IdBatch(ids), case.stored, case.layout)
    same("stored", dense, fused("backward", grad, IdBatch(ids), case.stored, case.layout))


def test_rows_and_state_that_are_not_contiguous_fall_back():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    strided = torch.empty(2, *reversed(case.stored.shape)).transpose(1, 2)
    stored, sum_ = strided[0].copy_(case.stored), strided[1].zero_()
    rule, other = fresh("adagrad", case), fresh("adagrad", case)
    other.state = other.state._replace(sum=sum_)
    call("update_", grad, IdBatch(ids), stored, case.layout, other)
    fused("update_", grad, IdBatch(ids), case.stored, case.layout, rule)
    same("stored", stored, case.stored)
    same("sum", sum_, rule.state.sum)


def test_arguments_that_do_not_fit_reach_no_kernel():
    case = Case(MIX[:2])
    ids, grad = case.ids(20), case.grad(20)
    with pytest.raises((IndexError, RuntimeError)):  # torch's own: there is no second column
        call("lookup", IdBatch(ids[:, :1]), case.stored, case.layout, names="")
    dense = call("backward", torch.ones(1, 1, 1), IdBatch(ids), case.stored, case.layout)
    same("stored", dense, fused("backward", torch.ones_like(grad), IdBatch(ids), case.stored, case.layout))
    bag_ids, offsets = case.bags(4)
    for wrong in (offsets.flip(0), offsets + 10**9):
        batch = IdBatch(bag_ids, wrong, mean=True)
        assert cpu.kernels()["lookup"](batch, case.stored, case.layout, names="") is NotImplemented


@pytest.mark.parametrize("op", ["rows_update_", "rows_catch_up_"])
def test_rows_out_of_range(op):
    case = Case(MIX[:2])
    rows, values = torch.tensor([0, len(case.stored)]), [torch.ones(2, 16)] if op == "rows_update_" else []
    with pytest.raises(IndexError, match=rf"rows \({len(case.stored)}\) must be below the number of rows"):
        fused(op, rows, *values, case.stored, fresh("adam", case))


def each_op(case: Case, stored: Tensor, layout: Layout) -> dict[str, Callable[[], Any]]:
    """Every kernel that finds rows by a layout, for single ids and for bags, as functions without arguments."""
    grad, rule = case.grad(9), fresh("adam", case)
    ops: dict[str, Callable[[], Any]] = {}
    for name, batch in {"ids": IdBatch(case.ids(9)), "bags": IdBatch(*case.bags(9), mean=True)}.items():
        ops |= {
            f"lookup of {name}": partial(fused, "lookup", batch, stored, layout, names=""),
            f"backward of {name}": partial(fused, "backward", grad, batch, stored, layout),
            f"row_grads of {name}": partial(fused, "row_grads", grad, batch, stored, layout),
            f"update_ of {name}": partial(fused, "update_", grad, batch, stored, layout, rule),
            f"catch_up_ of {name}": partial(fused, "catch_up_", batch, stored, layout, rule),
        }
    return ops


OPS_BY_LAYOUT = tuple(each_op(Case(MIX[:1]), torch.empty(0), Case(MIX[:1]).layout))


@pytest.mark.parametrize("op", OPS_BY_LAYOUT)
def test_rows_that_are_missing_and_a_layout_of_another_dtype_are_not_read(op):
    case = Case(MIX[:3])
    short, layout = case.stored[:-1], Layout(*[t.double() for t in case.layout])
    with pytest.raises(ValueError, match=f"stored has {len(short)} rows but must have {len(case.stored)}"):
        each_op(case, short, case.layout)[op]()
    with pytest.raises(TypeError, match=r"layout \(torch.float64, .*\) must be torch.int64"):
        each_op(case, case.stored, layout)[op]()


def test_a_layout_on_another_device_reaches_no_kernel(monkeypatch):
    case = Case(MIX[:2])
    layout = Layout(*[t.to("meta") for t in case.layout])
    monkeypatch.setitem(cpu.kernels(), "lookup", lambda *args, **options: pytest.fail("a kernel would read address 0"))
    assert call("lookup", IdBatch(case.ids(3)), case.stored, layout, names="").shape == (3, 2, 16)


@pytest.mark.parametrize("name", Layout._fields[:4])
def test_a_layout_of_uninitialized_integers_is_refused(name):
    case = Case([MIX[0], MIX[8]])
    integers = getattr(case.layout, name)
    wrong = torch.full_like(integers, torch.iinfo(integers.dtype).max - 12345)
    layout = case.layout._replace(**{name: wrong})
    with pytest.raises(ValueError, match="the module's integers describe no layout"):
        fused("lookup", IdBatch(case.ids(3)), case.stored, layout, names="")


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
        monkeypatch.setitem(sys.modules, "numba", None)
        monkeypatch.setitem(sys.modules, "numba.core", None)
    else:
        monkeypatch.setattr("numba.core.config.DISABLE_JIT", 1)
    cpu.kernels.cache_clear()
    try:
        assert cpu.kernels() == {}
        out = call("lookup", IdBatch(ids), case.stored, case.layout, names="")
        assert torch.equal(out, truth("lookup", IdBatch(ids), case.stored, case.layout))
        with pytest.raises(IndexError, match="id 1000 is outside"):
            call("lookup", IdBatch(torch.tensor([[1000, 0]])), case.stored, case.layout, names="")
    finally:
        monkeypatch.undo()
        cpu.kernels.cache_clear()
    assert "lookup" in cpu.kernels()


def test_a_kernel_is_kept_under_the_stamp_of_all_its_sources():
    names = {name for name, _, _ in compiled.source_stamp()}
    assert {"vector.py", "rows.py", "lookup.py", "rules.py", "layout.py", "state.py"} <= names
    assert lookup.lookup_kernel._cache._cache_file._source_stamp == compiled.source_stamp()


@pytest.mark.parametrize("quiet, rank, lines", [("", "0", 1), ("0", "0", 1), ("1", "0", 0), ("", "1", 0)])
def test_compiling_a_kernel_is_announced_once(quiet, rank, lines, monkeypatch, capsys):
    monkeypatch.setenv("QUOREM_QUIET", quiet)
    monkeypatch.setenv("RANK", rank)
    compilations = compiled.Compilations()
    numba.core.event.register("numba:compile", compilations)
    try:
        other, *kernels = (numba.njit(function) for function in (lambda x: x + 1, lambda x: x + 2, lambda x: x + 3))
        compilations.kernels |= set(map(id, kernels))
        assert other(1) == 2 and not capsys.readouterr().err
        assert [kernel(1) for kernel in kernels] == [3, 4]
    finally:
        numba.core.event.unregister("numba:compile", compilations)
    assert capsys.readouterr().err.splitlines() == [compiled.TEXT] * lines
    assert os.environ["QUOREM_QUIET"] == ("1" if lines else quiet)  # child processes do not repeat it

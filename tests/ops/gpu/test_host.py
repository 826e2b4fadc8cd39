"""Arrays that a kernel would read or write out of bounds are refused before it runs."""

from functools import partial

import pytest
import torch
from gpu_cases import DEVICE, assert_close, batch, collection, gradient, jagged, row_rule
from torch import Tensor

from quorem.ops import lookup as truth
from quorem.ops.layout import BASE, FEATURE, LIMIT, MAP, SIZE, STRIDE, Layout
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import gradients, lookup, replay, rules
from quorem.ops.gpu.host import reciprocals

pytestmark = pytest.mark.kernels(device="gpu")
NOT_A_LAYOUT = "the module's integers describe no layout"


def calls(stored: Tensor, layout: Layout, rule: str = "adagrad"):  # type: ignore[no-untyped-def]
    """Every op on ``stored``, as functions without arguments."""
    module = collection(4, names="qr map")
    bags, ids, grad = jagged(module, 3), IdBatch(batch(module, 3)), gradient(module, 3)
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    update, adam = row_rule(rule, stored), row_rule("adam", stored)
    ops = {
        "sample_weights": partial(gradients.sample_weights_backward, grad, bags, stored, layout),
        "count_invalid_": partial(lookup.count_invalid_, ids, count, layout),
    }
    for name, read in {"ids": ids, "bags": bags}.items():
        ops |= {
            f"lookup of {name}": partial(lookup.lookup, read, stored, layout),
            f"backward of {name}": partial(gradients.backward, grad, read, stored, layout),
            f"update_ of {name}": partial(rules.update_, grad, read, stored, layout, update),
            f"catch_up_ of {name}": partial(replay.catch_up_, read, stored, layout, adam),
        }
    return ops


OPS = list(calls(torch.zeros(1, 4), Layout(*[torch.empty(0)] * len(Layout._fields))))


@pytest.mark.parametrize("op", [op for op in OPS if op != "count_invalid_"])
def test_stored_rows_that_are_too_few_are_refused(op: str) -> None:
    """As after ``module.stored = nn.Parameter(module.stored[:5])``; the layout is known already."""
    module = collection(4, names="qr map")
    stored = module.stored.detach()
    lookup.lookup(IdBatch(batch(module, 3)), stored, module.layout)
    with pytest.raises(ValueError, match=rf"stored has 5 rows but must have {len(stored)}"):
        calls(stored[:5].clone(), module.layout)[op]()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [0, -(2**63), 2**63 - 1, None])
def test_integers_of_no_layout_are_refused(op: str, value: int | None) -> None:
    """As after ``to_empty()``, or after ``module.type(torch.float64)``."""
    module = collection(4, names="qr map")
    if value is None:
        layout = Layout(*(tensor.double() for tensor in module.layout))
        refused = pytest.raises(TypeError, match=r"layout \(torch.float64, .*\) must be torch.int64")
    else:
        layout = Layout(*(torch.full_like(tensor, value, dtype=torch.int64) for tensor in module.layout))
        refused = pytest.raises(ValueError, match=NOT_A_LAYOUT)
    with refused:
        calls(module.stored.detach(), layout)[op]()


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("slots", FEATURE, 2),
        ("slots", LIMIT, 10**6),
        ("parts", STRIDE, 0),
        ("parts", SIZE, 2**62),
        ("parts", BASE, -2),
        ("parts", MAP, 1999),
        ("spans", 0, 99),
        ("maps", ..., 40),
        ("maps", ..., -1),
    ],
)
def test_each_integer_is_checked(name: str, column: int, value: int) -> None:
    module = collection(4, names="qr map")
    layout = Layout(*(tensor.to(torch.int64, copy=True) for tensor in module.layout))
    getattr(layout, name)[..., column] = value
    with pytest.raises(ValueError, match=NOT_A_LAYOUT):
        lookup.lookup(IdBatch(batch(module, 3)), module.stored.detach(), layout)


@pytest.mark.parametrize(("rows", "dtype"), [(-1, torch.float32), (None, torch.float64)])
@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "amsgrad"])
def test_state_that_does_not_fit_is_refused(rule: str, rows: int | None, dtype: torch.dtype) -> None:
    module = collection(3, names="qr map")
    stored = module.stored.detach().clone()
    wrong = row_rule(rule, stored)
    wrong.state = wrong.state._replace(**{wrong.state._fields[0]: wrong.state[0][:rows].to(dtype)})
    inputs = (IdBatch(batch(module, 3)), stored, module.layout, wrong)
    with pytest.raises(ValueError, match=r"the optimizer's state has \d+ rows of torch.float\d+ but must have"):
        rules.update_(gradient(module, 3), *inputs)
    if rule == "amsgrad":
        with pytest.raises(ValueError, match=r"the optimizer's state has"):
            replay.catch_up_(*inputs)


def test_what_the_kernels_cannot_address_is_left_to_the_truth() -> None:
    module = collection(4, names="qr map")
    stored, ids, count = module.stored.detach(), batch(module, 3), torch.zeros((), dtype=torch.int64, device=DEVICE)
    assert lookup.lookup(IdBatch(ids), stored.T.contiguous().T, module.layout) is NotImplemented
    assert lookup.lookup(IdBatch(ids), stored.to(torch.complex64), module.layout) is NotImplemented
    longer = torch.cat([stored, stored])  # more rows than the layout reads do no harm
    expected = truth.lookup(IdBatch(ids), stored, module.layout, count)
    assert_close(lookup.lookup(IdBatch(ids), longer, module.layout), expected, torch.float32, "out")


def test_reciprocals_divide_every_number_below_2_to_the_31() -> None:
    powers = [2**n + more for n in range(31) for more in (-1, 0, 1)]
    divisors = sorted(
        {d for d in [*powers, *range(1, 200), *torch.randint(1, 2**31, (300,)).tolist()] if 0 < d < 2**31}
    )
    parts = torch.tensor([[[d, d, 0, 1, -1]] for d in divisors])
    for d, (by_stride, by_size, shifts) in zip(divisors, reciprocals(parts)[:, 0].tolist(), strict=True):
        last = (2**31 - 1) // d * d  # the largest multiple, where rounding is worst
        for n in {0, d - 1, d, last - 1, last, 2**31 - 1, *torch.randint(0, 2**31, (5,)).tolist()} - {-1}:
            assert (2 * n * by_stride >> 32) >> (shifts & 31) == n // d
            assert (2 * n * by_size >> 32) >> (shifts >> 5) == n // d
        assert max(by_stride, by_size, shifts) < 2**32

"""Arrays that a kernel would read or write out of bounds are refused before it runs."""

from functools import partial

import pytest
import torch
from gpu_cases import DEVICE, assert_close, batch, collection, gradient, jagged, rule_state, scalar
from torch import Tensor

from quorem.ops import lookup as truth
from quorem.ops.layout import BASE, FEATURE, LIMIT, MAP, MULTIPLIER, SIZE, STRIDE, Layout
from quorem.ops.rows import IdBatch

pytest.importorskip("triton", reason="the GPU kernels are Triton's: pip install quorem[gpu]")

from quorem.ops.gpu import gradients, lookup, replay, rules
from quorem.ops.gpu.host import BY_SIZE, BY_STRIDE, SHIFTS, reciprocals

pytestmark = pytest.mark.kernels(device="gpu")
NOT_A_LAYOUT = "the layout's integers are none of a layout"


def calls(stored: Tensor, layout: Layout, rule: str = "adagrad"):  # type: ignore[no-untyped-def]
    """Every op on ``stored``, as functions without arguments."""
    module = collection(4, names="qr map")
    bags, ids, grad = jagged(module, 3), IdBatch(batch(module, 3)), gradient(module, 3)
    state, constants = rule_state(rule, stored)
    adam_state, adam_constants = rule_state("adam", stored)
    options, adam = {"rule": rule, "constants": constants}, {"rule": "adam", "constants": adam_constants}
    ops = {"sample_weights": lambda: gradients.sample_weights_backward(grad, bags, stored, layout)}
    for name, read in {"ids": ids, "bags": bags}.items():
        ops |= {
            f"lookup of {name}": partial(lookup.lookup, read, stored, layout),
            f"backward of {name}": partial(gradients.backward, grad, read, stored, layout),
            f"update_ of {name}": partial(rules.update_, grad, read, stored, scalar(0.1), state, layout, **options),
            f"catch_up_ of {name}": partial(replay.catch_up_, read, stored, adam_state, layout, **adam),
        }
    return ops


OPS = list(calls(torch.zeros(1, 4), Layout(*[torch.empty(0)] * len(Layout._fields))))


@pytest.mark.parametrize("op", OPS)
def test_stored_rows_that_are_too_few_are_refused(op: str) -> None:
    """As after ``module.stored = nn.Parameter(module.stored[:5])``; the layout is known already."""
    module = collection(4, names="qr map")
    stored = module.stored.detach()
    lookup.lookup(IdBatch(batch(module, 3)), stored, module.layout)
    with pytest.raises(ValueError, match=rf"stored has 5 rows but must have {len(stored)}"):
        calls(stored[:5].clone(), module.layout)[op]()


@pytest.mark.parametrize("op", OPS)
def test_integers_of_another_dtype_are_refused(op: str) -> None:
    """As after ``module.type(torch.float64)``."""
    module = collection(4, names="qr map")
    layout = Layout(*(tensor.double() for tensor in module.layout))
    with pytest.raises(TypeError, match=r"layout \(torch.float64, .*\) must be torch.int64"):
        calls(module.stored.detach(), layout)[op]()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [0, -(2**63), 2**63 - 1])
def test_integers_that_were_never_initialized_are_refused(op: str, value: int) -> None:
    """As after ``to_empty()``."""
    module = collection(4, names="qr map")
    layout = Layout(*(torch.full_like(tensor, value, dtype=torch.int64) for tensor in module.layout))
    with pytest.raises(ValueError, match=NOT_A_LAYOUT):
        calls(module.stored.detach(), layout)[op]()
    with pytest.raises(ValueError, match=NOT_A_LAYOUT):
        lookup.count_invalid_(IdBatch(batch(module, 3)), torch.zeros((), dtype=torch.int64, device=DEVICE), layout)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("slots", FEATURE, 2),
        ("slots", LIMIT, 10**6),
        ("slots", MULTIPLIER, 0),
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
    state, constants = rule_state(rule, stored)
    state = state._replace(**{state._fields[0]: state[0][:rows].to(dtype)})
    inputs = (gradient(module, 3), IdBatch(batch(module, 3)), stored, scalar(0.1), state, module.layout)
    with pytest.raises(ValueError, match=r"the optimizer's state has \d+ rows of torch.float\d+ but must have"):
        rules.update_(*inputs, rule=rule, constants=constants)
    if rule == "amsgrad":
        with pytest.raises(ValueError, match=r"the optimizer's state has"):
            replay.catch_up_(IdBatch(batch(module, 3)), stored, state, module.layout, rule=rule, constants=constants)


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
    columns = torch.cat([parts, reciprocals(parts)], 2)[:, 0]
    for d, row in zip(divisors, columns.tolist(), strict=True):
        last = (2**31 - 1) // d * d  # the largest multiple, where rounding is worst
        for n in {0, d - 1, d, last - 1, last, 2**31 - 1, *torch.randint(0, 2**31, (5,)).tolist()} - {-1}:
            assert (2 * n * row[BY_STRIDE] >> 32) >> (row[SHIFTS] & 31) == n // d
            assert (2 * n * row[BY_SIZE] >> 32) >> (row[SHIFTS] >> 5) == n // d
        assert max(row) < 2**32

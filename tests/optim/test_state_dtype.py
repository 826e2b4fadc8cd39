"""Adagrad with sums of squares in 16 or 8 bits: near float32's, unbiased, loaded into others, and what is refused."""

import copy
import math

import pytest
import torch
from optimizers import collection, run, use
from torch import Tensor, nn

import quorem
from quorem import Embedding, optim
from quorem.ops.rounding import Rounding, log8, log8_numbers, random_bits
from quorem.ops.state import NARROW

STATE_DTYPES = ["bfloat16", "log8"]
NUMBERS = log8_numbers(torch.device("cpu"))
DENSE = Embedding(9, 4)


def sums_of(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """The sums of squares as numbers."""
    total = optimizer.state[p]["sum"]
    return NUMBERS[total.long()] if total.dtype == torch.uint8 else total.float()


def coded(numbers: Tensor, seed: int = 3) -> Tensor:
    return log8(numbers, random_bits(torch.arange(len(numbers)), numbers.shape[1], Rounding(seed, torch.tensor(5))))


def test_codes_are_four_an_octave_and_cover_what_training_needs() -> None:
    finite = NUMBERS[1:254].double()
    expected = 2 ** (torch.arange(253, dtype=torch.float64) / 4 - 48)
    torch.testing.assert_close(finite, expected, rtol=2**-24, atol=0)
    assert float(NUMBERS[0]) == 0 and NUMBERS[254] == math.inf and NUMBERS[255].isnan()
    assert finite[0] <= (1e-7) ** 2 and finite[-1] >= 1e4


def test_numbers_that_have_a_code_keep_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).expand(100, 256)
    assert torch.equal(coded(NUMBERS[codes.long()]), codes)


@pytest.mark.parametrize("number", [1e-14, 3.3e-9, 0.7, 1.0001, 9999.0, 32767.0, 1e-15])
def test_a_number_becomes_one_of_its_neighbours_with_its_mean(number: float) -> None:
    """The mean of 400,000 draws is within 5 deviations of the number; rounding to the nearest would be far outside."""
    count, exact = 400_000, float(torch.tensor(number))
    codes = coded(torch.full((count, 1), exact))
    low = int((NUMBERS[:254] <= exact).sum()) - 1
    assert set(codes.unique().tolist()) == {low, low + 1}
    below, above = NUMBERS[low].double(), NUMBERS[low + 1].double()
    share = (exact - below) / (above - below)
    deviation = (above - below) * (share * (1 - share) / count).sqrt()
    assert abs(NUMBERS[codes.long()].double().mean() - exact) < 5 * deviation


def test_both_ends_of_the_range() -> None:
    """Below the smallest code: 0 or it, at random. Above the largest: the largest. Infinity and NaN stay."""
    ends = torch.tensor([0.0, 1e-30, 1e5, 3e38, math.inf, math.nan])
    codes = coded(ends.expand(1000, 6))
    assert (codes == torch.tensor([0, 0, 253, 253, 254, 255], dtype=torch.uint8)).all()
    assert set(coded(torch.full((1000, 1), 2.0**-49)).unique().tolist()) == {0, 1}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_sums_are_unbiased_over_many_steps(state_dtype: str, in_backward: bool) -> None:
    """Rows of 40,000 numbers get 60 small squares: their mean is that of float32. To the nearest, all would be lost."""
    table = Embedding(2500, 16, quorem.Full(), sparse=not in_backward)
    options = {"lr": 0.0, "initial_accumulator_value": 1.0, "state_dtype": state_dtype}
    if in_backward:
        optimizer: torch.optim.Optimizer = optim.apply_in_backward(table, optim.Adagrad, **options)
    else:
        optimizer = optim.Adagrad(table.parameters(), **options)
    grad, steps = 0.03, 60
    for _ in range(steps):
        optimizer.zero_grad()
        (table(torch.arange(2500)) * grad).sum().backward()
        optimizer.step()
    sums = sums_of(optimizer, table.stored).double()
    expected = 1 + steps * grad**2
    deviation = float(sums.std()) / sums.numel() ** 0.5
    assert optimizer.state[table.stored]["sum"].dtype in NARROW
    assert 0 < deviation < 0.1 * (expected - 1) and abs(float(sums.mean()) - expected) < 5 * deviation


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("backend", ["plain", "fused"])
def test_gradients_that_are_not_finite_do_what_they_do_with_float32(
    state_dtype: str, value: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(backend, monkeypatch)
    results = []
    for each in ("float32", state_dtype):
        torch.manual_seed(0)
        table = Embedding(30, 4, quorem.QR(4), sparse=True)
        optimizer = optim.Adagrad(table.parameters(), lr=0.1, state_dtype=each)
        for factor in (value, 1.0):
            optimizer.zero_grad()
            weight = torch.ones(3, 4)
            weight[1, 2] = factor
            (table(torch.tensor([1, 7, 9])) * weight).sum().backward()
            optimizer.step()
        total, rows = sums_of(optimizer, table.stored), table.stored.detach()
        results.append((rows.isnan(), rows.isinf(), total.isnan(), total.isinf()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].any() and (results[0][2] | results[0][3]).any() and not results[0][0].all()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_state_is_loaded_into_another_dtype(state_dtype: str) -> None:
    """From few bits exactly; into few bits to a neighbour."""
    wide, narrow = collection(torch.float32), collection(torch.float32)
    ours = optim.Adagrad(wide.parameters(), lr=0.01)
    theirs = optim.Adagrad(narrow.parameters(), lr=0.01, state_dtype=state_dtype)
    run(wide, ours, 5)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs._row_rule(theirs.param_groups[0], narrow.stored)
    expected, rounded = sums_of(ours, wide.stored), sums_of(theirs, narrow.stored)
    assert (rounded - expected).abs().le(0.2 * expected).all()
    back = optim.Adagrad(narrow.parameters(), lr=0.01)
    back.load_state_dict(copy.deepcopy(theirs.state_dict()))
    back._row_rule(back.param_groups[0], narrow.stored)
    assert torch.equal(sums_of(back, narrow.stored), rounded)
    assert back.state[narrow.stored]["sum"].dtype == torch.float32


def test_torch_does_not_take_codes_for_sums() -> None:
    table = Embedding(40, 4)
    ours = optim.Adagrad(table.parameters(), state_dtype="log8")
    theirs = torch.optim.Adagrad(table.parameters())
    table.stored.grad = torch.ones_like(table.stored)
    ours.step()
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(KeyError, match="sum"):
        theirs.step()


def test_a_table_grows_with_its_state_and_a_network_keeps_that_of_torch() -> None:
    table, layer = Embedding(40, 4, quorem.Full(), sparse=True), nn.Linear(4, 1)
    optimizer = optim.Adagrad([table.stored, layer.weight], state_dtype="log8", initial_accumulator_value=0.25)
    layer(table(torch.arange(40))).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["sum"].dtype == torch.float32
    before = optimizer.state[table.stored]["sum"].clone()
    table.grow_(50, optimizer=optimizer)
    after = optimizer.state[table.stored]["sum"]
    assert torch.equal(after[:40], before) and (NUMBERS[after[40:].long()] == 0.25).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: optim.Adagrad(m.parameters(), state_dtype="int8"), r"\('int8'\) must be .*'log8' for adagrad"),
        (lambda m: optim.RowWiseAdagrad(m.parameters(), state_dtype="log8"), "must be one of 'float32' for rowwise"),
        (lambda m: optim.Adagrad(m.double().parameters(), state_dtype="log8"), "'float32' for adagrad .*float64"),
        (lambda m: optim.Adagrad(DENSE.double().parameters(), state_dtype="log8"), "float64"),
        (lambda m: optim.Adagrad(DENSE.parameters(), state_dtype="log8", weight_decay=0.1), "must be 0"),
    ],
)
def test_what_cannot_be_kept_in_few_bits_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(collection(torch.float32))

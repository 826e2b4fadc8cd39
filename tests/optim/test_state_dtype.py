"""Adagrad with sums of squares in 16 or 8 bits: near float32's, unbiased, resumed bit by bit, and what is refused."""

import copy
import io
import math

import pytest
import torch
from optimizers import collection, run, use
from torch import Tensor, nn

import quorem
from quorem import QR, Embedding, optim
from quorem.ops.cpu import threads
from quorem.ops.rounding import Rounding, log8, log8_numbers, random_bits
from quorem.ops.state import NARROW

STATE_DTYPES = ["bfloat16", "log8"]
NUMBERS = log8_numbers(torch.device("cpu"))


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
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = NUMBERS[codes.long()].expand(100, 256)
    assert torch.equal(coded(numbers), codes.expand(100, 256))


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


@pytest.mark.parametrize("backend", ["plain", "fused"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_stays_near_float32_state(
    state_dtype: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths differ by at most what a root of sums that are off by a code or two makes of them."""
    use(backend, monkeypatch)
    narrow, wide = collection(dtype), collection(dtype)
    start = narrow.stored.detach().double().clone()
    run(narrow, optim.Adagrad(narrow.parameters(), lr=0.01, state_dtype=state_dtype), 60)
    run(wide, optim.Adagrad(wide.parameters(), lr=0.01), 60)
    moved, expected = (m.stored.detach().double() - start for m in (narrow, wide))
    assert (moved - expected).norm() < (0.02 if state_dtype == "bfloat16" else 0.15) * expected.norm() + 0.05


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("backend", ["plain", "fused"])
def test_gradients_that_are_not_finite_do_what_they_do_with_float32(
    state_dtype: str, value: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(backend, monkeypatch)
    results = []
    for dtype in ("float32", state_dtype):
        torch.manual_seed(0)
        table = Embedding(30, 4, QR(4), sparse=True)
        optimizer = optim.Adagrad(table.parameters(), lr=0.1, state_dtype=dtype)
        for factor in (value, 1.0):
            optimizer.zero_grad()
            weight = torch.ones(3, 4)
            weight[1, 2] = factor
            (table(torch.tensor([1, 7, 9])) * weight).sum().backward()
            optimizer.step()
        total = sums_of(optimizer, table.stored)
        results.append([t.nan_to_num(nan=7e7, posinf=8e7).gt(1e6) for t in (table.stored.detach(), total)])
        results[-1].append(total.isinf())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0].any()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_loaded_run_continues_bit_for_bit(state_dtype: str, dtype: torch.dtype, in_backward: bool) -> None:
    """A network's parameter is in the same optimizer: it keeps torch's state."""

    def made(seed: int) -> tuple[nn.Module, optim.RowOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(
            Embedding(60, 8, QR(4), sparse=not in_backward, dtype=dtype), nn.Linear(8, 1, dtype=dtype)
        )
        options = {"lr": 0.05, "state_dtype": state_dtype}
        if in_backward:
            return model, optim.apply_in_backward(model, optim.Adagrad, **options)
        return model, optim.Adagrad(model.parameters(), **options)

    def train(model: nn.Module, optimizer: optim.RowOptimizer, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randint(0, 60, (6,), generator=draw)).square().sum().backward()
            optimizer.step()

    model, optimizer = made(0)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), model.state_dict()), file)
    file.seek(0)
    saved_optimizer, saved_model = torch.load(file)
    other, its = made(5)
    train(other, its, 4)
    its.load_state_dict(saved_optimizer)
    other.load_state_dict(saved_model)
    pairs = [(model, optimizer), (other, its)]
    if not in_backward:
        pairs.append(copy.deepcopy((model, optimizer)))
        assert optimizer.state[model[1].weight]["sum"].dtype == dtype
    for each, steps in pairs:
        train(each, steps, 2)
    expected = model.state_dict()
    for each, steps in pairs[1:]:
        assert all(torch.equal(each.state_dict()[key], expected[key]) for key in expected)
        sums = [o.state[m[0].stored]["sum"] for m, o in ((model, optimizer), (each, steps))]
        assert sums[0].dtype == sums[1].dtype and torch.equal(*sums)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use("fused", monkeypatch)
    monkeypatch.setattr(threads, "GRAIN", 64)
    results = []
    for number in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        try:
            torch.manual_seed(0)
            module = quorem.EmbeddingCollection([quorem.Table(f"t{i}", 4000, 16, QR(4)) for i in range(4)])
            optimizer = optim.apply_in_backward(module, optim.Adagrad, lr=0.05, state_dtype=state_dtype)
            for step in range(3):
                ids = torch.randint(0, 4000, (2000, 4), generator=torch.Generator().manual_seed(step))
                module(ids).square().sum().backward()
        finally:
            torch.set_num_threads(before)
        results.append((module.stored.detach().clone(), optimizer.state[module.stored]["sum"].clone()))
    for stored, total in results[1:]:
        assert torch.equal(stored, results[0][0]) and torch.equal(total, results[0][1])


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
    assert (
        torch.equal(sums_of(back, narrow.stored), rounded) and back.state[narrow.stored]["sum"].dtype == torch.float32
    )


def test_a_table_grows_with_its_state() -> None:
    table = Embedding(40, 4, quorem.Full(), sparse=True)
    optimizer = optim.Adagrad(table.parameters(), state_dtype="log8", initial_accumulator_value=0.25)
    table(torch.arange(40)).sum().backward()
    optimizer.step()
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
        (
            lambda m: optim.apply_in_backward(m, optim.Adagrad, state_dtype="log8", rounding_seed=None),
            r"rounding_seed \(None\) must be an integer where state_dtype is 'log8'",
        ),
    ],
)
def test_what_cannot_be_kept_in_few_bits_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(collection(torch.float32))

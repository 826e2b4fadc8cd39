"""Stochastic rounding: between the two neighbours, unbiased, and the same when a run is resumed."""

import copy

import pytest
import torch

from quorem import QR, Embedding
from quorem.ops.rounding import Rounding, random_bits, round_at_random
from quorem.optim import SGD, Adagrad, AMSGrad, apply_in_backward

HALVES = [torch.bfloat16, torch.float16]


def draws(number, dtype, count=20_000):
    numbers = torch.full((count, 1), number)
    return round_at_random(numbers, random_bits(torch.arange(count), 1, Rounding(3, torch.tensor(7))), dtype)[:, 0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("number", [1.001, -3.14159, 1e-3, 5.1e-7, -2.0001, 0.0])
def test_a_number_becomes_one_of_its_neighbours_with_its_mean(number, dtype):
    rounded = draws(number, dtype)
    exact = torch.tensor(number, dtype=torch.float32)
    nearest = exact.to(dtype)
    ways = {float(nearest)} | {float(torch.nextafter(nearest, torch.tensor(end, dtype=dtype))) for end in (9e4, -9e4)}
    around = [way for way in ways if abs(way - float(exact)) < 2 * max(abs(way - float(nearest)) for way in ways)]
    assert set(rounded.unique().tolist()) <= set(around)
    low, high = float(rounded.min()), float(rounded.max())
    assert low <= float(exact) <= high
    deviation = (high - low) / 2 / len(rounded) ** 0.5
    assert abs(float(rounded.double().mean()) - float(exact)) <= 5 * deviation


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_so(dtype):
    numbers = torch.tensor([[torch.inf], [-torch.inf], [torch.nan]])
    rounded = round_at_random(numbers, torch.full((3, 1), 0xFFFFFFFF), dtype)[:, 0].tolist()
    assert rounded[:2] == [float("inf"), float("-inf")] and rounded[2] != rounded[2]


def trained(rounding_seed, dtype, optimizer_class, steps, table=None, optimizer=None):
    if table is None:
        torch.manual_seed(0)
        table = Embedding(64, 16, QR(4, operation="add"), dtype=dtype)
        optimizer = apply_in_backward(table, optimizer_class, lr=1e-3, rounding_seed=rounding_seed)
    for _ in range(steps):
        table(torch.arange(64)).float().sum().backward()
    return table, optimizer


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_arrive_in_the_mean(dtype):
    """Steps far below the distance of two numbers: to the nearest nothing moves, at random the mean is right."""
    moved = {}
    for seed in (None, 5):
        table, _ = trained(seed, dtype, SGD, 0)
        with torch.no_grad():
            table.stored.fill_(32.0)
        trained(seed, dtype, SGD, 30, table)
        moved[seed] = 32.0 - float(table.tables()[0].detach().double().mean())
    step = 4e-3  # each row of the first table is read by four ids
    distance = 32 * torch.finfo(dtype).eps
    deviation = distance * (30 * step / distance / table.tables()[0].numel()) ** 0.5
    assert moved[None] == 0 and abs(moved[5] - 30 * step) < 4 * deviation < 30 * step


@pytest.mark.parametrize("optimizer_class", [SGD, Adagrad, AMSGrad])
def test_the_same_seed_gives_the_same_bits(optimizer_class):
    runs = [trained(seed, torch.bfloat16, optimizer_class, 12)[0].stored for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("optimizer_class", [Adagrad, AMSGrad])
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(optimizer_class):
    whole, _ = trained(4, torch.bfloat16, optimizer_class, 10)
    first, optimizer = trained(4, torch.bfloat16, optimizer_class, 6)
    saved, rows = copy.deepcopy(optimizer.state_dict()), first.state_dict()
    second, optimizer = trained(4, torch.bfloat16, optimizer_class, 0)
    second.load_state_dict(rows)
    optimizer.load_state_dict(saved)
    trained(4, torch.bfloat16, optimizer_class, 4, second)
    assert torch.equal(whole.stored, second.stored)

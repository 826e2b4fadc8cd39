"""Stochastic rounding: between the two neighbours, and unbiased."""

import pytest
import torch

from quorem import QR, Embedding
from quorem.ops.rounding import Rounding, random_bits, round_at_random
from quorem.optim import SGD, apply_in_backward

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


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_arrive_in_the_mean(dtype):
    """Steps far below the distance of two numbers: to the nearest nothing would move, at random the mean is right."""
    table = Embedding(64, 16, QR(4, operation="add"), dtype=dtype)
    apply_in_backward(table, SGD, lr=1e-3)
    torch.nn.init.constant_(table.stored, 32.0)
    for _ in range(30):
        table(torch.arange(64)).float().sum().backward()
    moved = 32.0 - float(table.tables()[0].detach().double().mean())
    step = 4e-3  # each row of the first table is read by four ids
    distance = 32 * torch.finfo(dtype).eps
    deviation = distance * (30 * step / distance / table.tables()[0].numel()) ** 0.5
    assert abs(moved - 30 * step) < 4 * deviation < 30 * step

"""Stochastic rounding of rows in half precision: up or down at random, with the number itself as the mean.

An update smaller than half the distance between two numbers that a row can hold would be lost if it were rounded to the
nearest; rounded at random it is not lost on average. The random bits of a number follow from a seed, the step, and its
position in ``stored``. So every device draws the same bits, and a run that is resumed continues with the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


class Rounding(NamedTuple):
    """What determines the random bits of a step."""

    seed: int
    step: Tensor  # int64 scalar


def random_bits(rows: Tensor, width: int, rounding: Rounding) -> Tensor:
    """32 random bits ``[N, W]``, int64, for each number of ``rows`` ``[N]``.

    >>> bits = random_bits(torch.arange(1000), 16, Rounding(0, torch.tensor(1)))
    >>> abs(float(bits.double().mean()) / 2**31 - 1) < 0.02
    True
    """
    position = rows[:, None] * width + torch.arange(width, device=rows.device)
    bits = _mix((position & _LOW) ^ ((rounding.step * 0x9E3779B1) & _LOW))
    return _mix(bits ^ (position >> 32) ^ (rounding.seed & _LOW))


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32 bits in which each bit depends on all (the finalizer of MurmurHash3)."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW
    return bits ^ (bits >> 16)


def round_at_random(numbers: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """``numbers`` float32 as bfloat16 or float16, rounded by ``bits``, of which the lower 16 are used.

    >>> numbers = torch.full((1000, 1), 1 + 2**-9)  # a quarter of the way from one bfloat16 to the next
    >>> bits = random_bits(torch.arange(1000), 1, Rounding(0, torch.tensor(0)))
    >>> 700 < int((round_at_random(numbers, bits, torch.bfloat16) == 1).sum()) < 800
    True
    """
    dropped = 16 if dtype == torch.bfloat16 else 13  # bits of a float32 that the half type does not have
    noise = (bits & (2**dropped - 1)).to(torch.int32)
    pattern = numbers.float().view(torch.int32)
    rounded = ((pattern + noise) & -(2**dropped)).view(torch.float32)
    if dtype == torch.float16:  # numbers below its smallest normal one are 2**-24 apart, whatever their size
        whole = torch.floor(numbers.abs() * 2.0**24 + noise / 2.0**dropped) * 2.0**-24
        rounded = torch.where(numbers.abs() < 2.0**-14, whole.copysign(numbers), rounded)
    return torch.where(numbers.isfinite(), rounded, numbers).to(dtype)

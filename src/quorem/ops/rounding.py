"""Stochastic rounding of rows and sums in few bits: up or down at random, with the number itself as the mean.

An update smaller than half the distance between two numbers that a row can hold would be lost if it were rounded to the
nearest; rounded at random it is not lost on average. The random bits of a number follow from a seed, the step, and its
position in ``stored``. So every device draws the same bits, and a run that is resumed continues with the same bits.
A row uses the lower 16 of the 32 bits, the sum of squares of the same number the upper ones.

``log8`` is a number of at least 0 in one byte, four codes an octave:

    code       0       1 to 253                          254         255
    number     0       2 ** ((code - 1) / 4 - 48)        infinity    NaN

So it goes from 3.6e-15 to 32768. A smaller number becomes 0 or 3.6e-15 at random; a larger one becomes 32768.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SEED = 0  # of the bits that optimizers draw
_LOW = 0xFFFFFFFF
LOG8_OCTAVE = 4  # codes from a number to its double
LOG8_LOWEST = -48  # code 1 is 2 to this
LOG8_LAST, LOG8_INFINITY, LOG8_NAN = 253, 254, 255  # the code of the largest number, and of what is none
# What a float32 has as its mantissa at the four codes of an octave, and at the next octave's first.
LOG8_MANTISSAS = tuple(round((2 ** (i / LOG8_OCTAVE) - 1) * 2**23) for i in range(LOG8_OCTAVE + 1))


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


@cache
def log8_numbers(device: torch.device) -> Tensor:
    """The number of each code, float32 ``[256]``."""
    patterns = [
        (127 + LOG8_LOWEST + octave << 23) + mantissa for octave in range(64) for mantissa in LOG8_MANTISSAS[:-1]
    ]
    numbers = torch.tensor([0, *patterns[:LOG8_LAST], 0x7F800000, 0x7FC00000], dtype=torch.int32, device="cpu")
    return numbers.view(torch.float32).to(device)


def log8(numbers: Tensor, bits: Tensor) -> Tensor:
    """``numbers`` float32, at least 0, as codes, rounded by ``bits``, of which the upper 23 are used.

    >>> bits = random_bits(torch.arange(1000), 1, Rounding(0, torch.tensor(0)))
    >>> codes = log8(torch.full((1000, 1), 1.0), bits)
    >>> codes.unique().tolist(), log8_numbers(codes.device)[codes.long()].unique().tolist()
    ([193], [1.0])
    """
    table = log8_numbers(numbers.device)[: LOG8_LAST + 1]
    low = torch.searchsorted(table, numbers.contiguous(), right=True) - 1
    below, above = table[low.clamp(0, LOG8_LAST)], table[(low + 1).clamp(0, LOG8_LAST)]
    draw = ((bits >> 8) | 1).float() * 2.0**-24  # in (0, 1)
    codes = (low + (draw * (above - below) < numbers - below)).clamp(max=LOG8_LAST)
    codes = torch.where(numbers.isinf(), LOG8_INFINITY, codes)
    return torch.where(numbers.isnan(), LOG8_NAN, codes).to(torch.uint8)


def read_state(state: Tensor, rows: Tensor) -> Tensor:
    """``rows`` of a state, float32 if it has fewer bits."""
    if state.dtype == torch.uint8:
        return log8_numbers(state.device)[state[rows].long()]
    return state[rows].float() if state.dtype == torch.bfloat16 else state[rows]


def write_state_(state: Tensor, rows: Tensor, numbers: Tensor, rounding: Rounding | None) -> None:
    """Write ``numbers`` ``[N, W]`` into ``rows`` of a state, rounded at random if it has fewer bits than they have."""
    if state.dtype in (torch.uint8, torch.bfloat16):
        assert rounding is not None
        bits = random_bits(rows, numbers.shape[1], rounding)
        in_8_bits = state.dtype == torch.uint8
        numbers = log8(numbers, bits) if in_8_bits else round_at_random(numbers, bits >> 16, torch.bfloat16)
    state[rows] = numbers.to(state.dtype)


def converted_state(state: Tensor, dtype: torch.dtype) -> Tensor:
    """A state in ``dtype``, some rows at a time; rounded at random if that has fewer bits."""
    new, rounding = torch.empty_like(state, dtype=dtype), Rounding(SEED, state.new_zeros((), dtype=torch.int64))
    for rows in torch.arange(len(state), device=state.device).split(2**16):
        write_state_(new, rows, read_state(state, rows), rounding)
    return new

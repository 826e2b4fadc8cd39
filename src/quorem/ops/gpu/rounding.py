"""Stochastic rounding of half-precision rows in a kernel, bit for bit equal to the reference in ``ops.rounding``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def can_round(stored: Tensor, rounding_seed: int | None) -> bool:
    """Whether the kernels support the rounding: with a seed, only half precision is rounded at random."""
    return rounding_seed is None or stored.dtype in HALVES


def seed_bits(rounding_seed: int | None) -> int:
    """The low 32 bits of a seed, which are all that is used."""
    return 0 if rounding_seed is None else rounding_seed & 0xFFFFFFFF


@triton.jit
def scrambled(bits):
    """A bijection of 32 bits in which each bit depends on all."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def random_bits(position, step, seed):
    """32 random bits for numbers at positions (int64) in ``stored``."""
    turn = ((tl.full((), 0, tl.int64) + step) * 0x9E3779B1).to(tl.uint32)
    bits = scrambled(position.to(tl.uint32) ^ turn)
    return scrambled(bits ^ (position >> 32).to(tl.uint32) ^ (tl.full((), 0, tl.int64) + seed).to(tl.uint32))


@triton.jit
def as_stored(numbers, stored, position, step, seed, ROUNDED: tl.constexpr):
    """``numbers`` in the dtype of ``stored``: at random if ROUNDED, else the nearest."""
    if ROUNDED:
        DROPPED: tl.constexpr = 16 if stored.dtype.element_ty == tl.bfloat16 else 13
        noise = (random_bits(position, step, seed) & ((1 << DROPPED) - 1)).to(tl.int32)
        pattern = numbers.to(tl.int32, bitcast=True)
        rounded = ((pattern + noise) & -(1 << DROPPED)).to(tl.float32, bitcast=True)
        size = tl.abs(numbers)
        if DROPPED == 13:  # below float16's smallest normal number all are 2**-24 apart
            whole = tl.floor(size * 16777216.0 + noise.to(tl.float32) * 0.0001220703125) * 5.9604644775390625e-08
            signed = (whole.to(tl.int32, bitcast=True) | (pattern & -2147483648)).to(tl.float32, bitcast=True)
            rounded = tl.where(size < 0.00006103515625, signed, rounded)
        numbers = tl.where(size < float("inf"), rounded, numbers)
    return numbers.to(stored.dtype.element_ty)

"""Stochastic rounding of rows and sums in a kernel, bit for bit equal to the reference in ``ops.rounding``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rounding as truth

HALVES = (torch.bfloat16, torch.float16)
FIRST_OCTAVE = tl.constexpr(127 + truth.LOG8_LOWEST)  # the exponent bits of code 1
M1, M2, M3 = map(tl.constexpr, truth.LOG8_MANTISSAS[1:4])
F1, F2, F3 = (tl.constexpr(1 + mantissa / 2**23) for mantissa in truth.LOG8_MANTISSAS[1:4])
FIRST_INVERSE = tl.constexpr(2.0**-truth.LOG8_LOWEST)  # code 1 is one over this
LAST, INFINITY, NAN = map(tl.constexpr, (truth.LOG8_LAST, truth.LOG8_INFINITY, truth.LOG8_NAN))


def rounds(stored: Tensor, rounding_seed: int | None) -> bool:
    """Whether rows are rounded at random."""
    return rounding_seed is not None and stored.dtype in HALVES


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
        numbers = rounded_to_half(numbers, stored, random_bits(position, step, seed))
    return numbers.to(stored.dtype.element_ty)


@triton.jit
def rounded_to_half(numbers, stored, bits):
    """``numbers`` rounded by the lower ``bits`` to what the dtype of ``stored`` can hold."""
    DROPPED: tl.constexpr = 16 if stored.dtype.element_ty == tl.bfloat16 else 13
    noise = (bits & ((1 << DROPPED) - 1)).to(tl.int32)
    pattern = numbers.to(tl.int32, bitcast=True)
    rounded = ((pattern + noise) & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    size = tl.abs(numbers)
    if DROPPED == 13:  # below float16's smallest normal number all are 2**-24 apart
        whole = tl.floor(size * 16777216.0 + noise.to(tl.float32) * 0.0001220703125) * 5.9604644775390625e-08
        signed = (whole.to(tl.int32, bitcast=True) | (pattern & -2147483648)).to(tl.float32, bitcast=True)
        rounded = tl.where(size < 0.00006103515625, signed, rounded)
    return tl.where(size < float("inf"), rounded, numbers)


@triton.jit
def of_quarter(at_least_1, at_least_2, at_least_3, a, b, c, d):
    """The value for each quarter of an octave, by which of its last three codes a number reaches."""
    return tl.where(at_least_3, d, tl.where(at_least_2, c, tl.where(at_least_1, b, a)))


@triton.jit
def load_sum(sums, elements, mask):
    """Sums of squares: numbers as they are, or as float32 where they have fewer bits."""
    h = tl.load(sums + elements, mask=mask, other=0)
    if sums.dtype.element_ty == tl.uint8:
        code = h.to(tl.int32)
        quarter = (code - 1) & 3
        pattern = of_quarter(quarter == 1, quarter == 2, quarter == 3, 0, M1, M2, M3)
        pattern += (((code - 1) >> 2) + FIRST_OCTAVE) << 23
        pattern = tl.where(code >= INFINITY, 0x7F800000 + ((code - INFINITY) << 22), pattern)
        h = tl.where(code == 0, 0, pattern).to(tl.float32, bitcast=True)
    elif sums.dtype.element_ty == tl.bfloat16:
        h = h.to(tl.float32)
    return h


@triton.jit
def as_sum(h, sums, elements, step, seed):
    """Sums of squares in the dtype of ``sums``: at random where it has fewer bits."""
    if sums.dtype.element_ty == tl.uint8:
        h = log8(h, random_bits(elements, step, seed))
    elif sums.dtype.element_ty == tl.bfloat16:
        h = rounded_to_half(h, sums, random_bits(elements, step, seed) >> 16)
    return h.to(sums.dtype.element_ty)


@triton.jit
def log8(h, bits):
    """``ops.rounding.log8``: the code is read off the exponent and three comparisons of the mantissa."""
    pattern = h.to(tl.int32, bitcast=True)
    mantissa = ((pattern & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # in [1, 2)
    is_1, is_2, is_3 = mantissa >= F1, mantissa >= F2, mantissa >= F3
    code = ((pattern >> 23) - FIRST_OCTAVE) * 4 + of_quarter(is_1, is_2, is_3, 1, 2, 3, 4)
    above_code = mantissa - of_quarter(is_1, is_2, is_3, 1.0, F1, F2, F3)
    to_next = of_quarter(is_1, is_2, is_3, F1 - 1.0, F2 - F1, F3 - F2, 2.0 - F3)
    small = code < 1
    above_code = tl.where(small, h * FIRST_INVERSE, above_code)
    to_next = tl.where(small, 1.0, to_next)
    # In (0, 1) by the upper 23 bits, as those of a number in [1, 2): converting an integer takes four times as long.
    draw = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375  # 1 - 2**-24
    code = tl.maximum(code, 0) + (draw * to_next < above_code).to(tl.int32)
    code = tl.where(h == float("inf"), INFINITY, tl.minimum(code, LAST))
    return tl.where(h != h, NAN, code)

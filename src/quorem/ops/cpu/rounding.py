"""Rows and sums in few bits, rounded at random: ``ops.rounding``, compiled, with the same bits.

Sums have a kind as rows have (see ``vector``): here uint8 is ``log8``.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba.core import types

from ..rounding import LOG8_INFINITY, LOG8_LAST, LOG8_LOWEST, LOG8_MANTISSAS, LOG8_NAN
from .compiled import inner
from .vector import choose, chosen, converted, lanes, load, load_bytes, reinterpreted, splat, store, write

_LOW = 0xFFFFFFFF
_FACTOR_1, _FACTOR_2 = 0x85EBCA6B, 0xC2B2AE35
_MANTISSA_1, _MANTISSA_2, _MANTISSA_3 = LOG8_MANTISSAS[1:4]
# From each code of an octave to the next, in units of a float32's last bit, divided by the number of draws.
_GAP_0, _GAP_1, _GAP_2, _GAP_3 = ((high - low) * 2.0**-24 for low, high in pairwise(LOG8_MANTISSAS))
_SMALL_GAP = 2.0 ** (LOG8_LOWEST - 24)  # from zero to code 1
_EXPONENT = 0x7F800000  # its bits in a float32
_NAN = 0x7FC00000
_SMALLEST_NORMAL = 0x38800000  # of float16, 2**-14


class Rounding(NamedTuple):
    """How rows are rounded; kernels take it as a plain tuple."""

    at_random: int  # else to the nearest
    first_key: int = 0
    second_key: int = 0


NO_ROUNDING = tuple(Rounding(0))


def rounding_by(seed: int, step: int) -> tuple[int, ...]:
    """``ops.rounding.Rounding`` of a seed and step, as kernels take it."""
    return (1, (step * 0x9E3779B1) & _LOW, seed & _LOW)


@chosen
def store_rounded(kind, stored, position, vector, rounding):
    """Write numbers of a row from ``position`` on, counted in numbers from the start of ``stored``."""
    rounded = {types.uint16: _round_at_random, types.int16: _round_to_float16}.get(kind)

    def as_it_is(kind, stored, position, vector, rounding):
        store(kind, stored, position, vector)

    def in_half_precision(kind, stored, position, vector, rounding):
        if rounding.at_random:
            vector = rounded(vector, _random_bits(vector, position, rounding))
        store(kind, stored, position, vector)

    return as_it_is if rounded is None else in_half_precision


@chosen
def store_sum(kind, sums, position, vector, rounding):
    """Write sums of squares from ``position`` on, at random if they have fewer bits than the vector."""

    def as_they_are(kind, sums, position, vector, rounding):
        store(kind, sums, position, vector)

    def as_bfloat16(kind, sums, position, vector, rounding):
        store(kind, sums, position, _round_at_random(vector, _random_bits(vector, position, rounding) >> 16))

    def as_log8(kind, sums, position, vector, rounding):
        write(kind, sums, position, _log8(vector, _random_bits(vector, position, rounding)), 0)

    return {types.uint16: as_bfloat16, types.uint8: as_log8}.get(kind, as_they_are)


@chosen
def load_sum(kind, zero, sums, position):
    """Load sums of squares from ``position`` on."""

    def as_they_are(kind, zero, sums, position):
        return load(kind, zero, sums, position)

    def from_log8(kind, zero, sums, position):
        return _number_of(load_bytes(1, zero, sums, position))

    return from_log8 if kind == types.uint8 else as_they_are


@inner
def _number_of(code):
    """The float32 that each code of ``log8`` stands for."""
    place = code - 1
    upper, odd = (place & 2) != 0, (place & 1) != 0
    mantissa = choose(upper, choose(odd, _MANTISSA_3, _MANTISSA_2), choose(odd, _MANTISSA_1, 0))
    bits = (((place >> 2) + (127 + LOG8_LOWEST)) << 23) + mantissa
    bits = choose(code == 0, 0, bits)
    bits = choose(code == LOG8_INFINITY, _EXPONENT, bits)
    return reinterpreted(choose(code == LOG8_NAN, _NAN, bits))


@inner
def _log8(value, bits):
    """``ops.rounding.log8``: the code is read off the exponent and three comparisons of the mantissa."""
    pattern = reinterpreted(value)
    octave, mantissa = pattern >> 23, pattern & 0x7FFFFF
    first, second, third = mantissa >= _MANTISSA_1, mantissa >= _MANTISSA_2, mantissa >= _MANTISSA_3
    quarter = choose(third, 4, choose(second, 3, choose(first, 2, 1)))
    low = choose(third, _MANTISSA_3, choose(second, _MANTISSA_2, choose(first, _MANTISSA_1, 0)))
    gap = choose(third, _GAP_3, choose(second, _GAP_2, choose(first, _GAP_1, _GAP_0)))
    above = converted(mantissa - low)  # above the code below, in units of the last bit
    code = ((octave - (127 + LOG8_LOWEST)) << 2) + quarter
    small = octave < 127 + LOG8_LOWEST  # less than code 1
    code, above, gap = choose(small, 0, code), choose(small, value, above), choose(small, _SMALL_GAP, gap)
    up = converted((bits >> 8) | 1) * gap < above
    code = choose(up, code + 1, code)
    code = choose(code > LOG8_LAST, LOG8_LAST, code)
    code = choose(pattern == _EXPONENT, LOG8_INFINITY, code)
    return choose(value != value, LOG8_NAN, code)


@inner
def _random_bits(vector, position, rounding):
    """``ops.rounding.random_bits`` of the numbers from ``position`` on."""
    start = splat(lanes(vector), position)
    low, high = start + lanes(vector), splat(start, position >> 32)
    high = choose(low < start, high + 1, high)  # where ``low`` has overflowed
    return _mix(_mix(low ^ rounding.first_key) ^ high ^ rounding.second_key)


@inner
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * _FACTOR_1
    bits = (bits ^ (bits >> 13)) * _FACTOR_2
    return bits ^ (bits >> 16)


@inner
def _round_at_random(value, bits):
    """``ops.rounding.round_at_random`` for bfloat16, before the conversion to it, which is then exact."""
    pattern = reinterpreted(value)
    rounded = (pattern + (bits & 0xFFFF)) & 0xFFFF0000
    return reinterpreted(choose((pattern & _EXPONENT) != _EXPONENT, rounded, pattern))


@inner
def _round_to_float16(value, bits):
    """The same for float16, whose numbers below its smallest normal one are 2**-24 apart."""
    pattern, noise = reinterpreted(value), bits & 0x1FFF
    size = pattern & 0x7FFFFFFF
    whole = converted(reinterpreted(size) * np.float32(2.0**24) + converted(noise) * np.float32(2.0**-13))
    small = reinterpreted(converted(whole) * np.float32(2.0**-24)) | (pattern & 0x80000000)
    rounded = choose(size < _SMALLEST_NORMAL, small, (pattern + noise) & 0xFFFFE000)
    return reinterpreted(choose(size < _EXPONENT, rounded, pattern))

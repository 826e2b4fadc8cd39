"""Rows and sums in few bits, rounded at random: ``ops.rounding``, compiled, with the same bits.

Sums have a kind as rows have (see ``vector``): here uint8 is ``log8``.
"""

from itertools import pairwise
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..rounding import LOG8_INFINITY, LOG8_LAST, LOG8_LOWEST, LOG8_MANTISSAS, LOG8_NAN
from .compiled import inner
from .memory import pointer
from .vector import load_numbers, narrowed, splat_value, store

_INT8, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LOW = 0xFFFFFFFF
# From each code of an octave to the next, in units of a float32's last bit, divided by the number of draws.
_GAPS = [(high - low) * 2.0**-24 for low, high in pairwise(LOG8_MANTISSAS)]


class Rounding(NamedTuple):
    """How rows are rounded; kernels take it as a plain tuple."""

    at_random: int  # else to the nearest
    first_key: int = 0
    second_key: int = 0


NEAREST = tuple(Rounding(0))


def rounding_by(seed: int | None, step: int) -> tuple[int, ...]:
    """``ops.rounding.Rounding`` of a seed and step, as kernels take it."""
    return NEAREST if seed is None else tuple(Rounding(1, (step * 0x9E3779B1) & _LOW, seed & _LOW))


@inner
def store_rounded(kind, stored, position, vector, rounding):
    """Write numbers of a row from ``position`` on, counted in numbers from the start of ``stored``."""
    if rounding.at_random:
        _store_at_random(kind, stored, position, vector, rounding.first_key, rounding.second_key, 0)
    else:
        store(kind, stored, position, vector)


@inner
def store_sum(kind, sums, position, vector, rounding):
    """Write sums of squares from ``position`` on, at random if they have fewer bits than the vector."""
    _store_at_random(kind, sums, position, vector, rounding.first_key, rounding.second_key, 16)


@intrinsic
def _store_at_random(
    typing: Any, kind: Any, address: Any, position: Any, vector: Any, first: Any, second: Any, shift: Any
) -> Any:
    """Write a vector; 16-bit kinds use the random bits from bit ``shift`` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, address, position, value, *keys, shift = args
        lanes = vector.lanes
        if kind.bitwidth <= 16:
            bits = _random_bits(builder, lanes, position, *keys)
        if kind.bitwidth == 16:
            bits = builder.lshr(bits, splat_value(builder, builder.trunc(shift, _INT32), bits.type))
            value = _round_at_random(builder, kind == types.uint16, lanes, value, bits)
        if kind == types.uint8:
            narrow = builder.trunc(_log8(builder, value, bits), ir.VectorType(_INT8, lanes))
        else:
            narrow = narrowed(builder, kind, value, lanes)
        builder.store(narrow, pointer(builder, kind.bitwidth, address, position, narrow.type), align=kind.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, vector, types.int64, types.int64, types.int64), build


@intrinsic
def load_sum(typing: Any, kind: Any, vector: Any, sums: Any, position: Any) -> Any:
    """Load sums of squares from ``position`` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, _, sums, position = args
        shape = context.get_value_type(vector)
        if kind != types.uint8:
            return load_numbers(builder, kind, vector, shape, sums, position)
        wide = ir.VectorType(_INT32, vector.lanes)
        code = builder.load(pointer(builder, 8, sums, position, ir.VectorType(_INT8, vector.lanes)), align=1)
        return builder.bitcast(_log8_pattern(builder, builder.zext(code, wide)), shape)

    return vector(kind, vector, types.int64, types.int64), build


def _log8_pattern(builder: Any, code: Any) -> Any:
    """The bits of the float32 that each code stands for."""
    wide = code.type
    place = builder.sub(code, _all(wide, 1))
    octave = builder.add(builder.lshr(place, _all(wide, 2)), _all(wide, 127 + LOG8_LOWEST))
    odd, upper = (
        builder.trunc(builder.lshr(place, _all(wide, i)), ir.VectorType(ir.IntType(1), wide.count)) for i in (0, 1)
    )
    halves = [builder.select(odd, *(_all(wide, LOG8_MANTISSAS[i]) for i in pair)) for pair in ((3, 2), (1, 0))]
    pattern = builder.add(builder.shl(octave, _all(wide, 23)), builder.select(upper, *halves))
    for special, bits in ((0, 0), (LOG8_INFINITY, 0x7F800000), (LOG8_NAN, 0x7FC00000)):
        pattern = builder.select(builder.icmp_unsigned("==", code, _all(wide, special)), _all(wide, bits), pattern)
    return pattern


def _log8(builder: Any, value: Any, bits: Any) -> Any:
    """``ops.rounding.log8``: the code is read off the exponent and three comparisons of the mantissa."""
    wide, shape = bits.type, value.type
    pattern = builder.bitcast(value, wide)
    octave = builder.lshr(pattern, _all(wide, 23))
    mantissa = builder.and_(pattern, _all(wide, 0x7FFFFF))
    quarter, low, gap = _all(wide, 1), _all(wide, 0), _all(shape, _GAPS[0])
    for i in (1, 2, 3):
        reached = builder.icmp_unsigned(">=", mantissa, _all(wide, LOG8_MANTISSAS[i]))
        quarter = builder.add(quarter, builder.zext(reached, wide))
        low = builder.select(reached, _all(wide, LOG8_MANTISSAS[i]), low)
        gap = builder.select(reached, _all(shape, _GAPS[i]), gap)
    above = builder.sitofp(builder.sub(mantissa, low), shape)  # above the code below, in units of the last bit
    code = builder.shl(builder.sub(octave, _all(wide, 127 + LOG8_LOWEST)), _all(wide, 2))
    code = builder.add(code, quarter)
    small = builder.icmp_unsigned("<", octave, _all(wide, 127 + LOG8_LOWEST))  # less than code 1
    code = builder.select(small, _all(wide, 0), code)
    above = builder.select(small, value, above)
    gap = builder.select(small, _all(shape, 2.0 ** (LOG8_LOWEST - 24)), gap)
    draw = builder.or_(builder.lshr(bits, _all(wide, 8)), _all(wide, 1))
    up = builder.fcmp_ordered("<", builder.fmul(builder.sitofp(draw, shape), gap), above)
    code = builder.add(code, builder.zext(up, wide))
    code = builder.select(builder.icmp_signed(">", code, _all(wide, LOG8_LAST)), _all(wide, LOG8_LAST), code)
    infinite = builder.icmp_unsigned("==", pattern, _all(wide, 0x7F800000))
    code = builder.select(infinite, _all(wide, LOG8_INFINITY), code)
    return builder.select(builder.fcmp_unordered("uno", value, value), _all(wide, LOG8_NAN), code)


def _random_bits(builder: Any, lanes: int, position: Any, first: Any, second: Any) -> Any:
    """``ops.rounding.random_bits`` of the numbers from ``position`` on."""
    wide = ir.VectorType(_INT32, lanes)
    start, high = (
        splat_value(builder, builder.trunc(p, _INT32), wide) for p in (position, builder.lshr(position, _INT64(32)))
    )
    low = builder.add(start, ir.Constant(wide, [*range(lanes)]))
    high = builder.add(high, builder.zext(builder.icmp_unsigned("<", low, start), wide))  # where ``low`` has overflowed
    keys = [splat_value(builder, builder.trunc(key, _INT32), wide) for key in (first, second)]
    bits = _mix(builder, builder.xor(low, keys[0]))
    return _mix(builder, builder.xor(builder.xor(bits, high), keys[1]))


def _mix(builder: Any, bits: Any) -> Any:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = builder.xor(bits, builder.lshr(bits, _all(bits.type, shift)))
        bits = builder.mul(bits, _all(bits.type, factor))
    return builder.xor(bits, builder.lshr(bits, _all(bits.type, 16)))


def _round_at_random(builder: Any, is_bfloat16: bool, lanes: int, value: Any, bits: Any) -> Any:
    """``ops.rounding.round_at_random``, before the conversion to the half type, which is then exact."""
    wide, shape = ir.VectorType(_INT32, lanes), value.type
    dropped = 16 if is_bfloat16 else 13
    noise = builder.and_(bits, _all(wide, 2**dropped - 1))
    pattern = builder.bitcast(value, wide)
    rounded = builder.and_(builder.add(pattern, noise), _all(wide, _LOW + 1 - 2**dropped))
    if not is_bfloat16:
        size = builder.bitcast(builder.and_(pattern, _all(wide, 0x7FFFFFFF)), shape)
        steps = builder.fmul(size, _all(shape, 2.0**24))
        steps = builder.fadd(steps, builder.fmul(builder.sitofp(noise, shape), _all(shape, 2.0**-dropped)))
        whole = builder.fmul(builder.sitofp(builder.fptosi(steps, wide), shape), _all(shape, 2.0**-24))
        signed = builder.or_(builder.bitcast(whole, wide), builder.and_(pattern, _all(wide, 0x80000000)))
        rounded = builder.select(builder.fcmp_ordered("<", size, _all(shape, 2.0**-14)), signed, rounded)
    exponent = _all(wide, 0x7F800000)
    finite = builder.icmp_unsigned("!=", builder.and_(pattern, exponent), exponent)
    return builder.bitcast(builder.select(finite, rounded, pattern), shape)


def _all(shape: Any, number: float) -> Any:
    return ir.Constant(shape, [number] * shape.count)

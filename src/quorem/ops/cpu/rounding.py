"""Half-precision rows rounded at random: ``ops.rounding``, compiled, with the same bits."""

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .compiled import inner
from .memory import pointer
from .vector import narrowed, splat_value, store

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_LOW = 0xFFFFFFFF


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
        _store_at_random(kind, stored, position, vector, rounding.first_key, rounding.second_key)
    else:
        store(kind, stored, position, vector)


@intrinsic
def _store_at_random(typing: Any, kind: Any, stored: Any, position: Any, vector: Any, first: Any, second: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, stored, position, value, first, second = args
        if kind.bitwidth == 16:
            bits = _random_bits(builder, vector.lanes, position, first, second)
            rounded = _round_at_random(builder, kind == types.uint16, vector.lanes, value, bits)
        else:
            rounded = value
        narrow = narrowed(builder, kind, rounded, vector.lanes)
        builder.store(narrow, pointer(builder, kind.bitwidth, stored, position, narrow.type), align=kind.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, vector, types.int64, types.int64), build


def _random_bits(builder: Any, lanes: int, position: Any, first: Any, second: Any) -> Any:
    """``ops.rounding.random_bits`` of the numbers from ``position`` on."""
    wide, long = ir.VectorType(_INT32, lanes), ir.VectorType(_INT64, lanes)
    positions = builder.add(splat_value(builder, position, long), ir.Constant(long, [*range(lanes)]))
    low, high = builder.trunc(positions, wide), builder.trunc(builder.lshr(positions, _all(long, 32)), wide)
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

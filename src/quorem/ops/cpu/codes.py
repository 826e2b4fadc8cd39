"""Rows as kernels read them: numbers, or codes of 8 or 4 bits that are dequantized on the way (see ``ops.codes``).

Codes have kinds as numbers have (see ``vector``): uint8 for 8 bits, int8 for 4; in narrow rows uint32 and int32.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..codes import FIRST_SCALE
from .memory import pointer
from .vector import load_numbers, splat_value

_INT8, _INT16, _INT32, _INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BITS = {types.uint8: 8, types.int8: 4, types.uint32: 8, types.int32: 4}
_NARROW = (types.uint32, types.int32)


@intrinsic
def load_row(typing: Any, kind: Any, vector: Any, stored: Any, row_size: Any, row: Any, column: Any) -> Any:
    """Load numbers of a row of ``stored`` from ``column`` on, one for each lane; the lanes divide ``column``.

    ``row_size`` is the bytes of a row.
    """

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, _, stored, row_size, row, column = args
        shape = context.get_value_type(vector)
        start = builder.add(stored, builder.mul(row, row_size))
        if kind not in _BITS:
            return load_numbers(builder, kind, vector, shape, start, column)
        ends = builder.add(start, builder.sub(row_size, _INT64(1 if kind in _NARROW else 4)))  # of the codes
        wide = ir.VectorType(_INT32, vector.lanes)
        numbers = _codes(builder, _BITS[kind], vector.lanes, start, column)
        if kind in _NARROW:
            zeros, scales = (
                ir.Constant(wide, [2 ** (_BITS[kind] - 1)] * wide.count),
                _narrow_scales(builder, ends, shape),
            )
        else:
            zeros, scales = _zero_points(builder, ends, wide), _scales(builder, ends, shape)
        return builder.fmul(builder.sitofp(builder.sub(numbers, zeros), shape), scales)

    return vector(kind, vector, types.int64, types.int64, types.int64, types.int64), build


def _scales(builder: Any, ends: Any, shape: ir.Type) -> Any:
    """The scale in every lane.

    It is loaded together with the two bytes before it. Alone it would fill a part of a register, and x86 would wait for
    whatever wrote the rest. If it were loaded with the zero point, the compiler would merge both loads and go through
    an integer register.
    """
    before = builder.sub(ends, _INT64(2))
    both = builder.load(pointer(builder, 16, before, _INT64(0), ir.VectorType(ir.HalfType(), 2)), align=2)
    both = builder.fpext(both, ir.VectorType(ir.FloatType(), 2))
    second = ir.Constant(ir.VectorType(_INT32, shape.count), [1] * shape.count)
    return builder.shuffle_vector(both, ir.Constant(both.type, ir.Undefined), second)


def _narrow_scales(builder: Any, ends: Any, shape: ir.Type) -> Any:
    """The scale of a narrow row in every lane: its byte is the upper part of a float32."""
    byte = builder.load(pointer(builder, 8, ends, _INT64(0), _INT8), align=1)
    bits = builder.add(builder.shl(builder.zext(byte, _INT32), _INT32(20)), _INT32(FIRST_SCALE))
    return splat_value(builder, builder.bitcast(bits, ir.FloatType()), shape)


def _zero_points(builder: Any, ends: Any, wide: ir.Type) -> Any:
    """The zero point in every lane: the upper half of both."""
    both = builder.load(pointer(builder, 32, ends, _INT64(0), _INT32), align=2)
    return builder.ashr(splat_value(builder, both, wide), ir.Constant(wide, [16] * wide.count))


def _codes(builder: Any, bits: int, lanes: int, start: Any, column: Any) -> Any:
    """The codes of ``lanes`` columns, 32 bits each."""
    wide = ir.VectorType(_INT32, lanes)
    if bits == 8:
        codes = builder.load(pointer(builder, 8, start, column, ir.VectorType(_INT8, lanes)), align=1)
        return builder.zext(codes, wide)
    byte = builder.lshr(column, _INT64(1))
    if lanes == 1:
        shift = builder.trunc(builder.mul(builder.and_(column, _INT64(1)), _INT64(4)), _INT8)
        both = builder.load(pointer(builder, 8, start, byte, _INT8), align=1)
        code = builder.and_(builder.lshr(both, shift), _INT8(15))
        return builder.insert_element(ir.Constant(wide, ir.Undefined), builder.zext(code, _INT32), _INT32(0))
    half = ir.VectorType(_INT8, lanes // 2)
    both = builder.load(pointer(builder, 8, start, byte, half), align=1)
    low = builder.and_(both, ir.Constant(half, [15] * (lanes // 2)))
    high = builder.lshr(both, ir.Constant(half, [4] * (lanes // 2)))
    order = [i // 2 + (i % 2) * (lanes // 2) for i in range(lanes)]  # of the low and the high codes, in turn
    codes = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_INT32, lanes), order))
    return builder.zext(codes, wide)

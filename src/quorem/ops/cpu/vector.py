"""Vectors of 16, 4 or 1 numbers in compiled code, with loads, stores and arithmetic that are vector instructions.

Plain loops will not do: the compiler may not assume that two addresses differ, and so does not vectorize them well.

Kinds of rows (see ``memory``):

    float32, float64    themselves
    uint16              bfloat16, which Numba does not know
    int16               float16, which Numba does not know on a CPU

``load`` widens half types to float32 and ``store`` rounds to nearest even, so arithmetic is in float32 or float64.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import get_or_insert_function
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, overload, register_model

from .compiled import INLINED, inner
from .memory import pointer

_INT16, _INT32 = ir.IntType(16), ir.IntType(32)


class Vector(types.Type):
    """``lanes`` numbers of type ``number``."""

    def __init__(self, number: types.Float, lanes: int) -> None:
        self.number, self.lanes = number, lanes
        super().__init__(name=f"Vector({number}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        number = ir.DoubleType() if vector.number == types.float64 else ir.FloatType()
        super().__init__(manager, vector, ir.VectorType(number, vector.lanes))


def _accumulator(kind: Any) -> types.Float:
    return types.float64 if kind == types.float64 else types.float32


def splat_value(builder: Any, value: Any, shape: ir.Type) -> Any:
    """A vector of the type ``shape`` with ``value`` in every lane."""
    first = builder.insert_element(ir.Constant(shape, ir.Undefined), value, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, shape.count), None)
    return builder.shuffle_vector(first, ir.Constant(shape, ir.Undefined), mask)


def load_numbers(builder: Any, kind: Any, vector: Vector, shape: ir.Type, address: Any, position: Any) -> Any:
    """Load as many numbers as ``vector`` has lanes, widened to its type."""
    half = ir.VectorType(_INT16, vector.lanes)
    in_memory = half if kind.bitwidth == 16 else shape
    value = builder.load(pointer(builder, kind.bitwidth, address, position, in_memory), align=kind.bitwidth // 8)
    if kind == types.uint16:
        wide = ir.VectorType(_INT32, vector.lanes)
        shift = ir.Constant(wide, [16] * vector.lanes)
        value = builder.bitcast(builder.shl(builder.zext(value, wide), shift), shape)
    elif kind == types.int16:
        value = builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), vector.lanes)), shape)
    return value


@intrinsic
def accumulator(typing: Any, kind: Any) -> Any:
    """The kind that arithmetic on ``kind`` is done in."""
    result = _accumulator(kind)
    return result(kind), lambda context, builder, sig, args: context.get_constant(result, 0)


@intrinsic(prefer_literal=True)
def zeros(typing: Any, kind: Any, lanes: Any) -> Any:
    """A vector of zeros; also tells ``load`` how many lanes to take."""
    vector = Vector(_accumulator(kind), lanes.literal_value)
    return vector(kind, lanes), lambda context, builder, sig, args: ir.Constant(context.get_value_type(vector), None)


@intrinsic
def splat(typing: Any, vector: Any, value: Any) -> Any:
    """A vector shaped as ``vector`` with ``value`` in every lane."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shape = context.get_value_type(vector)
        return splat_value(builder, context.cast(builder, args[1], value, vector.number), shape)

    return vector(vector, value), build


@intrinsic
def load(typing: Any, kind: Any, vector: Any, address: Any, position: Any) -> Any:
    """Load as many elements as ``vector`` has lanes, from ``position`` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load_numbers(builder, kind, vector, context.get_value_type(vector), args[2], args[3])

    return vector(kind, vector, types.int64, types.int64), build


def _build_store(kind: Any, vector: Any, streamed: bool) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = narrowed(builder, kind, args[3], vector.lanes)
        write = builder.store(value, pointer(builder, kind.bitwidth, args[1], args[2], value.type))
        write.align = kind.bitwidth // 8
        if streamed:
            write.align = min(64, vector.lanes * kind.bitwidth // 8)
            write.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, vector), build


@intrinsic
def store(typing: Any, kind: Any, address: Any, position: Any, vector: Any) -> Any:
    """Write a vector from ``position`` on."""
    return _build_store(kind, vector, streamed=False)


@intrinsic
def stream(typing: Any, kind: Any, address: Any, position: Any, vector: Any) -> Any:
    """Write a vector past the caches, where they could not hold the whole output; ``fence`` must follow in the end.

    The address must be a multiple of the vector's size, or of 64 bytes.
    """
    return _build_store(kind, vector, streamed=True)


@intrinsic
def fence(typing: Any) -> Any:
    """Let every thread see what was streamed."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


def narrowed(builder: Any, kind: Any, value: Any, lanes: int) -> Any:
    """A vector as it is stored."""
    if kind == types.uint16:
        return _to_bfloat16(builder, value, lanes)
    if kind == types.int16:
        half = builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes))
        return builder.bitcast(half, ir.VectorType(_INT16, lanes))
    return value


def _to_bfloat16(builder: Any, value: Any, lanes: int) -> Any:
    """The upper half of each float32 after rounding to nearest even; NaN stays NaN."""
    wide = ir.VectorType(_INT32, lanes)

    def constant(number: int) -> ir.Constant:
        return ir.Constant(wide, [number] * lanes)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    rounded = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC0), rounded)
    return builder.trunc(rounded, ir.VectorType(_INT16, lanes))


@intrinsic
def choose(typing: Any, condition: Any, vector: Any, other: Any) -> Any:
    """``vector`` if the condition holds, else ``other``; both are computed, and there is no branch."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = splat_value(builder, args[0], ir.VectorType(ir.IntType(1), vector.lanes))
        return builder.select(lanes, args[1], args[2])

    return vector(types.boolean, vector, vector), build


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum over the lanes, by halves."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = args[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            low, high = (ir.Constant(ir.VectorType(_INT32, lanes), [*range(i, i + lanes)]) for i in (0, lanes))
            undefined = ir.Constant(value.type, ir.Undefined)
            halves = (builder.shuffle_vector(value, undefined, half) for half in (low, high))
            value = builder.fadd(*halves)
        return builder.extract_element(value, _INT32(0))

    return vector.number(vector), build


@intrinsic
def sqrt(typing: Any, vector: Any) -> Any:
    """Square root in every lane."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shape = context.get_value_type(vector)
        name = f"llvm.sqrt.v{vector.lanes}f{vector.number.bitwidth}"
        return builder.call(get_or_insert_function(builder.module, ir.FunctionType(shape, [shape]), name), args)

    return vector(vector), build


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """The larger in every lane; NaN where either is."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        larger = builder.or_(builder.fcmp_ordered(">", *args), builder.fcmp_unordered("uno", args[0], args[0]))
        return builder.select(larger, *args)

    return a(a, b), build


def _arithmetic(function: Any, instruction: str) -> None:
    """Let two vectors of one shape be combined by a Python operator."""

    @infer_global(function)
    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _name, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _arithmetic(getattr(operator, _name), _instruction)


@cache
def columns(width: int) -> Any:
    """The width W of rows as kernels take it: by its type they know whether vectors of 16 numbers fill a row."""
    return np.int32(width) if width % 16 == 0 else width


def over_columns(step: Callable[..., None]) -> Any:
    """Compile ``step(zero, j, kind, W, *rest)`` into ``loop(kind, W, *rest)``, which calls it for all columns of a row.

    Each call is for the columns from ``j`` on, as many as the vector ``zero`` has lanes.
    """
    step = inner(step)

    def whole(kind, W, *rest):
        for j in range(0, W, 16):
            step(zeros(kind, 16), j, kind, W, *rest)

    def with_rest(kind, W, *rest):
        j = 0
        while j + 16 <= W:
            step(zeros(kind, 16), j, kind, W, *rest)
            j += 16
        while j + 4 <= W:
            step(zeros(kind, 4), j, kind, W, *rest)
            j += 4
        while j < W:
            step(zeros(kind, 1), j, kind, W, *rest)
            j += 1

    def loop(kind, W, *rest):
        raise NotImplementedError  # only compiled code calls it

    overload(loop, jit_options=INLINED)(lambda kind, W, *rest: whole if W.bitwidth == 32 else with_rest)
    return loop

"""Numbers in memory, and vectors of 16, 4 or 1 of them in registers, for compiled code.

Memory is given by its address, and positions count numbers from there. What lies there is given by a *kind*, a zero of
a type of Numba's:

    int32, int64, float32, float64    themselves
    uint16                            bfloat16, which Numba does not know
    int16                             float16, which Numba does not know on a CPU

``load`` widens half types to float32 and ``store`` rounds to nearest even, so arithmetic is in float32 or float64.
Operators work lane by lane; integers have 32 bits and no sign. The other operand may be a number.

Plain loops will not do: the compiler may not assume that two addresses differ, and so does not vectorize them well.
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

INT32, INT64, FLOAT64, UINT8 = np.int32(0), np.int64(0), np.float64(0), np.uint8(0)
_INT1, _INT8, _INT16, _INT32 = (ir.IntType(bits) for bits in (1, 8, 16, 32))
_LANES = {types.float64: ir.DoubleType(), types.float32: ir.FloatType(), types.int32: _INT32, types.boolean: _INT1}


class Vector(types.Type):
    """``lanes`` numbers of type ``number``."""

    def __init__(self, number: Any, lanes: int) -> None:
        self.number, self.lanes = number, lanes
        super().__init__(name=f"Vector({number}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_LANES[vector.number], vector.lanes))


def chosen(choose: Callable[..., Callable[..., Any]]) -> Any:
    """A compiled function that ``choose`` returns, given the types of the arguments."""

    def function(*args):
        raise NotImplementedError  # only compiled code calls it

    overload(function, jit_options=INLINED)(choose)
    return function


def _pointer(builder: Any, bits: int, address: Any, position: Any, target: ir.Type) -> Any:
    """A pointer to ``target`` at ``position``, counted in numbers of that many bits."""
    base = builder.inttoptr(address, ir.IntType(bits).as_pointer())
    return builder.bitcast(builder.gep(base, [position]), target.as_pointer())


@intrinsic
def item(typing: Any, kind: Any, address: Any, position: Any) -> Any:
    """One number of type ``kind``; half types are integers here."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, kind.bitwidth, args[1], args[2], context.get_value_type(kind)))

    return kind(kind, types.int64, types.int64), build


@intrinsic
def put(typing: Any, kind: Any, address: Any, position: Any, value: Any) -> Any:
    """Write one number of type ``kind``."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = _pointer(builder, kind.bitwidth, args[1], args[2], context.get_value_type(kind))
        builder.store(context.cast(builder, args[3], value, kind), target)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, value), build


@intrinsic
def size_of(typing: Any, kind: Any) -> Any:
    """Bytes of one number."""
    size = kind.bitwidth // 8
    return types.int64(kind), lambda context, builder, sig, args: context.get_constant(types.int64, size)


@intrinsic
def num_bits(typing: Any, number: Any) -> Any:
    """How many bits of an integer are set."""
    return number(number), lambda context, builder, sig, args: builder.ctpop(args[0])


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line at ``address`` into the second cache, which takes more lines at once than the first."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _INT8.as_pointer())
        declared = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], declared)
        builder.call(function, [pointer, _INT32(0), _INT32(2), _INT32(1)])  # read, second cache, data
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def reserve(typing: Any, size: Any) -> Any:
    """The address of ``size`` bytes on the stack; arrays would be reference-counted.

    Only for a kernel itself, outside of loops: memory that an inner function reserves is gone when it returns.
    """

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        memory = builder.alloca(_INT8, args[0])
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(types.int64), build


def _wide(kind: Any) -> types.Float:
    return types.float64 if kind == types.float64 else types.float32


@intrinsic
def wide(typing: Any, kind: Any) -> Any:
    """The kind that arithmetic on ``kind`` is done in."""
    result = _wide(kind)
    return result(kind), lambda context, builder, sig, args: context.get_constant(result, 0)


@intrinsic(prefer_literal=True)
def zeros(typing: Any, kind: Any, lanes: Any) -> Any:
    """A vector of zeros; also tells ``load`` how many lanes to take."""
    vector = Vector(_wide(kind), lanes.literal_value)
    return vector(kind, lanes), lambda context, builder, sig, args: ir.Constant(context.get_value_type(vector), None)


@intrinsic
def lanes(typing: Any, vector: Any) -> Any:
    """The integers 0, 1, 2, ..., one for each lane."""
    result, numbers = Vector(types.int32, vector.lanes), [*range(vector.lanes)]
    return result(vector), lambda context, builder, sig, args: ir.Constant(ir.VectorType(_INT32, len(numbers)), numbers)


def _splat(builder: Any, value: Any, shape: ir.Type) -> Any:
    """A vector of the type ``shape`` with ``value`` in every lane."""
    first = builder.insert_element(ir.Constant(shape, ir.Undefined), value, _INT32(0))
    mask = ir.Constant(ir.VectorType(_INT32, shape.count), None)
    return builder.shuffle_vector(first, ir.Constant(shape, ir.Undefined), mask)


def _in_lanes(context: Any, builder: Any, vector: Vector, value: Any, kind: Any) -> Any:
    """``value`` of type ``kind``, a vector or a number, as a vector of the type ``vector``."""
    if isinstance(kind, Vector):
        return value
    return _splat(builder, context.cast(builder, value, kind, vector.number), context.get_value_type(vector))


@intrinsic
def splat(typing: Any, vector: Any, value: Any) -> Any:
    """A vector of the type of ``vector`` with ``value`` in every lane."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _in_lanes(context, builder, vector, args[1], value)

    return vector(vector, value), build


@intrinsic
def choose(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``, vectors or numbers; both are computed, and there is no branch."""
    vector = next((each for each in (a, b) if isinstance(each, Vector)), None)
    if vector is None:
        vector = Vector(types.float32 if isinstance(a, types.Float) else types.int32, condition.lanes)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = [_in_lanes(context, builder, vector, *each) for each in zip(args[1:], (a, b), strict=True)]
        where = args[0]
        if not isinstance(condition, Vector):
            where = _splat(builder, where, ir.VectorType(_INT1, vector.lanes))
        return builder.select(where, *values)

    return vector(condition, a, b), build


def _operate(function: Any, build: Callable[[Any, bool, Any, Any], Any], compares: bool) -> None:
    """Let vectors be combined by a Python operator; ``build`` is told whether they are integers."""

    @infer_global(function)
    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            vector = next((each for each in args if isinstance(each, Vector)), None)
            if vector is None or len(args) != 2:
                return None
            result = Vector(types.boolean, vector.lanes) if compares else vector
            return signature(result, *map(types.unliteral, args))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = next(each for each in sig.args if isinstance(each, Vector))
        values = [_in_lanes(context, builder, vector, *each) for each in zip(args, sig.args, strict=True)]
        return build(builder, vector.number == types.int32, *values)

    for operands in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(function, *operands)(lower)


def _instruction(floats: str, integers: str) -> Callable[..., Any]:
    return lambda builder, of_integers, *values: getattr(builder, integers if of_integers else floats)(*values)


def _comparison(sign: str) -> Callable[..., Any]:
    def build(builder: Any, of_integers: bool, *values: Any) -> Any:
        if of_integers:
            return builder.icmp_unsigned(sign, *values)
        return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, *values)

    return build


for _name, *_names in (
    ("add", "fadd", "add"),
    ("sub", "fsub", "sub"),
    ("mul", "fmul", "mul"),
    ("truediv", "fdiv", ""),
    ("and_", "", "and_"),
    ("or_", "", "or_"),
    ("xor", "", "xor"),
    ("lshift", "", "shl"),
    ("rshift", "", "lshr"),
):
    _operate(getattr(operator, _name), _instruction(*_names), compares=False)
for _name, _sign in (("lt", "<"), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    _operate(getattr(operator, _name), _comparison(_sign), compares=True)


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum over the lanes, by halves."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, count = args[0], vector.lanes
        while count > 1:
            count //= 2
            low, high = (ir.Constant(ir.VectorType(_INT32, count), [*range(i, i + count)]) for i in (0, count))
            undefined = ir.Constant(value.type, ir.Undefined)
            value = builder.fadd(*(builder.shuffle_vector(value, undefined, half) for half in (low, high)))
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
def converted(typing: Any, vector: Any) -> Any:
    """Integers of at most 31 bits as float32, or float32 rounded towards zero as integers."""
    to_float = vector.number == types.int32
    result = Vector(types.float32 if to_float else types.int32, vector.lanes)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return (builder.sitofp if to_float else builder.fptosi)(args[0], context.get_value_type(result))

    return result(vector), build


@intrinsic
def reinterpreted(typing: Any, vector: Any) -> Any:
    """The bits of float32 as integers, or the float32 that have these bits."""
    result = Vector(types.float32 if vector.number == types.int32 else types.int32, vector.lanes)
    return result(vector), lambda context, builder, sig, args: builder.bitcast(args[0], context.get_value_type(result))


@intrinsic
def load(typing: Any, kind: Any, vector: Any, address: Any, position: Any) -> Any:
    """Load as many numbers as ``vector`` has lanes, from ``position`` on."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shape = context.get_value_type(vector)
        in_memory = ir.VectorType(_INT16, vector.lanes) if kind.bitwidth == 16 else shape
        value = builder.load(_pointer(builder, kind.bitwidth, *args[2:], in_memory), align=kind.bitwidth // 8)
        if kind == types.uint16:
            wide = ir.VectorType(_INT32, vector.lanes)
            return builder.bitcast(builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * wide.count)), shape)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), vector.lanes)), shape)
        return value

    return vector(kind, vector, types.int64, types.int64), build


@intrinsic(prefer_literal=True)
def load_bytes(typing: Any, lanes_of_each: Any, vector: Any, address: Any, position: Any) -> Any:
    """Load bytes as integers: each of them into ``lanes_of_each`` lanes that follow one another."""
    each, result = lanes_of_each.literal_value, Vector(types.int32, vector.lanes)

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        in_memory, wide = ir.VectorType(_INT8, -(-vector.lanes // each)), ir.VectorType(_INT32, vector.lanes)
        value = builder.load(_pointer(builder, 8, args[2], args[3], in_memory), align=1)
        order = ir.Constant(wide, [i // each for i in range(vector.lanes)])
        return builder.zext(builder.shuffle_vector(value, ir.Constant(in_memory, ir.Undefined), order), wide)

    return result(lanes_of_each, vector, types.int64, types.int64), build


@intrinsic(prefer_literal=True)
def write(typing: Any, kind: Any, address: Any, position: Any, vector: Any, streamed: Any) -> Any:
    """Write lanes of the type of ``kind``, or integers, which lose their upper bits; ``streamed`` is 0 or 1."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, count = args[3], vector.lanes
        if kind == types.int16:
            half = builder.fptrunc(value, ir.VectorType(ir.HalfType(), count))
            value = builder.bitcast(half, ir.VectorType(_INT16, count))
        elif vector.number == types.int32:
            value = builder.trunc(value, ir.VectorType(ir.IntType(kind.bitwidth), count))
        write = builder.store(value, _pointer(builder, kind.bitwidth, args[1], args[2], value.type))
        write.align = kind.bitwidth // 8
        if streamed.literal_value:
            write.align = min(64, count * kind.bitwidth // 8)
            write.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, vector, streamed), build


@chosen
def _in_memory(kind, vector):
    """A vector as it is stored: of bfloat16 the bits, after rounding to nearest even; NaN stays NaN."""

    def as_it_is(kind, vector):
        return vector

    def as_bfloat16(kind, vector):
        bits = reinterpreted(vector)
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        return choose(vector != vector, 0x7FC0, rounded)

    return as_bfloat16 if kind == types.uint16 else as_it_is


@inner
def store(kind, address, position, vector, streamed=False):
    """Write a vector from ``position`` on.

    If ``streamed``, past the caches, where they could not hold the whole output: the address must be a multiple of the
    vector's size, or of 64 bytes, and ``fence`` must follow in the end.
    """
    if streamed:
        write(kind, address, position, _in_memory(kind, vector), 1)
    else:
        write(kind, address, position, _in_memory(kind, vector), 0)


@intrinsic
def fence(typing: Any) -> Any:
    """Let every thread see what was streamed."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the processor can; ``b`` may be a number."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shape = context.get_value_type(a)
        name = f"llvm.fmuladd.v{a.lanes}f{a.number.bitwidth}"
        function = get_or_insert_function(builder.module, ir.FunctionType(shape, [shape] * 3), name)
        return builder.call(function, [args[0], _in_lanes(context, builder, a, args[1], b), args[2]])

    return a(a, b, c), build


@cache
def columns(width: int) -> Any:
    """The width W of rows as kernels take it: by its type they know whether vectors of 16 or 8 numbers fill a row."""
    return np.int32(width) if width % 16 == 0 else np.uint32(width) if width % 8 == 0 else width


@intrinsic
def times(typing: Any, W: Any, n: Any) -> Any:
    """The width of ``n`` rows of W numbers, of the type of W."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        product = builder.mul(context.cast(builder, args[0], W, types.int64), args[1])
        return context.cast(builder, product, types.int64, W)

    return W(W, types.int64), build


def over_columns(step: Callable[..., None]) -> Any:
    """Compile ``step(zero, j, kind, W, *rest)`` into ``loop(kind, W, *rest)``, which calls it for all columns of a row.

    Each call is for the columns from ``j`` on, as many as the vector ``zero`` has lanes.
    """
    step = inner(step)

    def whole(kind, W, *rest):
        for j in range(0, W, 16):
            step(zeros(kind, 16), j, kind, W, *rest)

    def with_half(kind, W, *rest):
        for j in range(0, W - 15, 16):
            step(zeros(kind, 16), j, kind, W, *rest)
        if W % 16:
            step(zeros(kind, 8), W - 8, kind, W, *rest)

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

    return chosen(lambda kind, W, *rest: {types.int32: whole, types.uint32: with_half}.get(W, with_rest))

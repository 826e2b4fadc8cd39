"""Single numbers in memory, in compiled code. Addresses and positions are plain integers.

The type of what lies there is given by a *kind*, a zero of that type (see ``vector`` for kinds of rows).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

INT32, INT64, FLOAT64 = np.int32(0), np.int64(0), np.float64(0)
_INT32 = ir.IntType(32)


def pointer(builder: Any, bits: int, address: Any, position: Any, target: ir.Type) -> Any:
    """A pointer to ``target`` at ``position``, counted in elements of that many bits."""
    base = builder.inttoptr(address, ir.IntType(bits).as_pointer())
    return builder.bitcast(builder.gep(base, [position]), target.as_pointer())


@intrinsic
def item(typing: Any, kind: Any, address: Any, position: Any) -> Any:
    """One number of type ``kind``; 16-bit kinds are integers here."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer(builder, kind.bitwidth, args[1], args[2], context.get_value_type(kind)))

    return kind(kind, types.int64, types.int64), build


@intrinsic
def put(typing: Any, kind: Any, address: Any, position: Any, value: Any) -> Any:
    """Write one number of type ``kind``."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = pointer(builder, kind.bitwidth, args[1], args[2], context.get_value_type(kind))
        builder.store(context.cast(builder, args[3], value, kind), target)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, value), build


@intrinsic
def size_of(typing: Any, kind: Any) -> Any:
    """Bytes of one element."""
    size = kind.bitwidth // 8
    return types.int64(kind), lambda context, builder, sig, args: context.get_constant(types.int64, size)


@intrinsic
def num_bits(typing: Any, number: Any) -> Any:
    """How many bits of an integer are set."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return number(number), build


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line at ``address`` into the second cache, which takes more lines at once than the first."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
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
        memory = builder.alloca(ir.IntType(8), args[0])
        memory.align = 64
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(types.int64), build

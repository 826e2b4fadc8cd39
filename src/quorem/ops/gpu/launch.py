"""Launching a kernel at less than half of what Triton's own launch costs on the host.

``kernel[grid](...)`` works out at each call what to specialize on, and prints the options into a key. A step of small
batches is bound by that, so the compiled kernel is remembered here by what Triton specializes on: dtype and alignment
of a tensor; size, divisibility by 16 and equality to 1 of an integer; constants as they are.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants, num_warps=num_warps)``.

    Args:
        kernel: a ``triton.jit`` function whose constants come after all its other arguments.
        grid: up to three sizes.
        arguments: tensors of one device, integers, floats or None.
        num_warps: of a program.
        constants: ``tl.constexpr`` arguments, in the order in which the kernel names them.
    """
    key = (id(kernel), num_warps, *constants.values(), *map(specialization, arguments))
    found = _compiled.get(key)
    if found is None:
        names = kernel.arg_names[len(arguments) :]
        if tuple(constants) != tuple(names):
            raise TypeError(f"constants ({', '.join(constants)}) must be {', '.join(names)}, in this order")
        made = kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps)
        if isinstance(kernel, JITFunction):  # in Triton's interpreter nothing is compiled
            _compiled[key] = made
        return
    found[(*grid, 1, 1)[:3]](*arguments, *constants.values())


def specialization(argument: Any) -> Any:
    """What a compiled kernel depends on of one argument.

    >>> [specialization(x) for x in (1, 16, 17, 2**40, None, 0.5)]
    ['one', ('int', True, True), ('int', False, True), ('int', True, False), None, <class 'float'>]
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0, argument.device.index
    if isinstance(argument, int) and not isinstance(argument, bool):
        if argument == 1:
            return "one"
        return "int", argument % 16 == 0, -(2**31) <= argument < 2**31
    return argument if argument is None else type(argument)

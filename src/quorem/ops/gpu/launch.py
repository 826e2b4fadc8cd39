"""Launching a kernel with less work on the host than Triton's own launch.

``kernel[grid](...)`` works out at each call what to specialize on, and prints the options into a key. A step of small
batches is bound by that, so the compiled kernel is remembered here by what Triton specializes on: dtype and alignment
of a tensor; size, divisibility by 16 and equality to 1 of an integer; constants as they are. It is then run with plain
addresses, as Triton itself runs it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants, num_warps=num_warps)``.

    Args:
        kernel: a ``triton.jit`` function whose constants come after all its other arguments.
        grid: up to three sizes.
        arguments: tensors of one device, the first among them, integers, floats or None.
        num_warps: of a program.
        constants: ``tl.constexpr`` arguments, in the order in which the kernel names them.
    """
    device = arguments[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():  # Triton looks at the current device alone
        with torch.cuda.device(device):
            return launch(kernel, grid, *arguments, num_warps=num_warps, **constants)
    values, kinds = [], []
    for argument in arguments:
        value = argument
        if isinstance(argument, Tensor):
            if argument.get_device() != device:
                raise ValueError(f"a tensor is on {argument.device} but must be on {arguments[0].device}")
            value = argument.data_ptr()
            kinds.append(argument.dtype if value % 16 == 0 else (argument.dtype,))
        else:
            kinds.append(specialization(argument))
        values.append(value)
    key = (id(kernel), device, num_warps, *constants.values(), *kinds)
    found = _compiled.get(key)
    if found is not None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        head = (*(*grid, 1, 1)[:3], stream, found.function, found.packed_metadata, None, None, None)
        found.run(*head, *values, *constants.values())
        return None
    names = kernel.arg_names[len(arguments) :]
    if tuple(constants) != tuple(names):
        raise TypeError(f"constants ({', '.join(constants)}) must be {', '.join(names)}, in this order")
    made = kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps)
    if isinstance(kernel, JITFunction):  # in Triton's interpreter nothing is compiled
        _compiled[key] = made
    return None


def specialization(argument: Any) -> Any:
    """What a compiled kernel depends on of an argument that is not a tensor.

    >>> [specialization(x) for x in (1, 16, 17, 2**40, None, 0.5)]
    ['one', 'int32 / 16', 'int32', 'int64 / 16', None, <class 'float'>]
    """
    if type(argument) is int:
        if argument == 1:
            return "one"
        if -(2**31) <= argument < 2**31:
            return "int32 / 16" if argument % 16 == 0 else "int32"
        return "int64 / 16" if argument % 16 == 0 else "int64"
    return argument if argument is None else type(argument)


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up; Triton's is made for kernels, and slow on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is at least ``n``.

    >>> [power_of_2(n) for n in (1, 2, 3, 16, 17)]
    [1, 2, 4, 16, 32]
    """
    return 1 << (n - 1).bit_length()

"""Launch kernels by Triton's public launch, or by the faster one of ``fast_launch`` where it was tested."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import fast_launch


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants, num_warps=num_warps)`` on the device of the arguments.

    Args:
        kernel: a ``triton.jit`` function whose constants come after all its other arguments.
        grid: up to three sizes.
        arguments: tensors on one device, integers, floats, None, or tuples of at least two of these. The first is a
            tensor, or a tuple that begins with one.
        num_warps: warps of a program.
        constants: ``tl.constexpr`` arguments.
    """
    first = arguments[0]
    device = (first[0] if isinstance(first, tuple) else first).get_device()
    if device >= 0 and device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return launch(kernel, grid, *arguments, num_warps=num_warps, **constants)
    if fast_launch.enabled():
        return fast_launch.launch(kernel, grid, device, arguments, num_warps, constants)
    for argument in arguments:
        for member in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(member, Tensor):
                fast_launch.check_device(member, device)
    kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps)
    return None


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up; Triton's own version is meant for kernels, and slow on the host."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least ``n``.

    >>> [power_of_2(n) for n in (1, 2, 3, 16, 17)]
    [1, 2, 4, 16, 32]
    """
    return 1 << (n - 1).bit_length()

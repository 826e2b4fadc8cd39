"""Launching kernels with less work on the host than Triton's own launch.

``kernel[grid](...)`` works out at each call what to specialize on, and prints the options into a key. A step of small
batches is bound by that, so the compiled kernel is remembered here by what Triton specializes on: dtype and alignment
of a tensor; size, divisibility by 16 and equality to 1 of an integer; constants as they are. It is then run with plain
addresses, as Triton itself runs it.

A call that comes again and again, such as a training step, is remembered as a whole: ``planned`` makes its launches
again with other addresses, without the code that worked them out.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], Any] = {}
MOST_PLANS = 256  # of one owner; with more, it starts anew


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
    if device >= 0 and device != torch._C._cuda_getDevice():  # Triton looks at the current device alone
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
    sizes = (*grid, 1, 1)[:3]
    if found is not None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        found.run(*sizes, stream, found.function, found.packed_metadata, None, None, None, *values, *constants.values())
    else:
        names = kernel.arg_names[len(arguments) :]
        if tuple(constants) != tuple(names):
            raise TypeError(f"constants ({', '.join(constants)}) must be {', '.join(names)}, in this order")
        found = kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps)
        if not isinstance(kernel, JITFunction):  # in Triton's interpreter nothing is compiled
            return None
        _compiled[key] = found
    if _recording.plan is not None:
        _recording.plan.note(*_entry(found), sizes, arguments, values, constants)
    return None


def _entry(found: Any) -> tuple[Any, tuple[Any, ...]]:
    """What runs a compiled kernel, and what it takes between the stream and the kernel's arguments.

    Triton 3.6's launcher first looks for scratch memory that these kernels do not have; what it calls then is taken
    straight away.
    """
    run, after = found.run, (found.function, found.packed_metadata, None, None, None)
    scratch = getattr(run, "global_scratch_size", 1), getattr(run, "profile_scratch_size", 1)
    if triton.__version__.startswith("3.6.") and scratch == (0, 0):
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (after[0], *flags, *after[1:])
    return run, after


@dataclass
class Plan:
    """The launches of a call, and which of their addresses change from call to call."""

    known: Sequence[Tensor | None]  # while it is made: those whose addresses the plan's key holds
    changing: list[Tensor]  # while it is made: those that are given, then the call's own scratch
    scratch: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)  # its sizes
    launches: list[tuple[Any, ...]] = field(default_factory=list)  # function, grid, arguments, which to put in where
    kept: list[Tensor] = field(default_factory=list)  # what else is read, which may have no other holder

    def note(
        self,
        run: Any,
        after: tuple[Any, ...],
        sizes: tuple[int, ...],
        arguments: Sequence[Any],
        values: list[Any],
        constants: dict[str, Any],
    ) -> None:
        """Remember a launch that was made."""
        patches = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                which = [n for n, tensor in enumerate(self.changing) if tensor is argument]
                patches += [(len(after) + position, n) for n in which]
                if not which and not any(argument is tensor for tensor in self.known):
                    home = argument.untyped_storage().data_ptr()
                    if any(home == t.untyped_storage().data_ptr() for t in self.changing):
                        raise ValueError("an argument is a view of a tensor whose address changes: it would go stale")
                    self.kept.append(argument)
        self.launches.append((run, sizes, [*after, *values, *constants.values()], patches))

    def again(self, device: int, given: Sequence[Tensor], addresses: list[int]) -> None:
        """Make the launches again."""
        held = [given[0].new_empty(size, dtype=dtype) for size, dtype in self.scratch]
        addresses += [tensor.data_ptr() for tensor in held]
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, sizes, values, patches in self.launches:
            values = values.copy()  # another thread may be here too
            for position, which in patches:
                values[position] = addresses[which]
            run(*sizes, stream, *values)


class _Recording(threading.local):
    plan: Plan | None = None


_recording = _Recording()


def planned(
    plans: dict[Any, Plan],
    key: tuple[Hashable, ...],
    known: Sequence[Tensor | None],
    given: Sequence[Tensor],
    body: Callable[[], None],
) -> None:
    """``body()``, or the launches it made when it was last called with the same key.

    Args:
        plans: those of one owner: an object that ``body`` reads on the host takes its plans with it.
        key: all that the launches depend on, addresses aside.
        known: tensors that stay where they are, so that their addresses are part of the key.
        given: tensors on one device whose addresses change from call to call. Others that ``body`` launches with are
            its own ``scratch``, or kept as long as the plan.
        body: does nothing but launch.
    """
    addresses: list[int] = []
    device = given[0].get_device()
    for tensor in given:
        address = tensor.data_ptr()
        if address % 16 or address in addresses or tensor.get_device() != device:
            return body()
        addresses.append(address)
    if device >= 0 and device != torch._C._cuda_getDevice():
        return body()
    at = (device, *key, *[tensor if tensor is None else tensor.data_ptr() for tensor in known])
    plan = plans.get(at)
    if plan is not None:
        return plan.again(device, given, addresses)
    _recording.plan = plan = Plan(known, list(given))
    try:
        body()
    finally:
        _recording.plan = None
    if plan.launches:
        plan.known, plan.changing = (), []
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[at] = plan
    return None


def scratch(like: Tensor, *size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on the device of ``like``, for one call."""
    new = like.new_empty(size, dtype=dtype)
    if _recording.plan is not None:
        _recording.plan.changing.append(new)
        _recording.plan.scratch.append((size, dtype))
    return new


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

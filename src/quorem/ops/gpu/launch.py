"""Launch kernels with little work on the host.

At each call, ``kernel[grid](...)`` works out what to specialize on; with small batches this takes most of the time of a
step. But it returns the compiled kernel, and ``compiled.run(...)`` launches that one again; hooks of profilers that
listen to Triton's launches see the first launch only. So compiled kernels are cached here by what Triton specializes
on: dtype and alignment of a tensor; size, divisibility by 16 and equality to 1 of an integer; values of constants. A
call that is repeated, such as a training step, is cached as a whole: ``planned`` repeats its launches with new
addresses, without running the code that prepared them.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

MOST_PLANS = 256  # the most plans of one owner; when there are more, all are dropped
SCRATCH_ALIGNMENT = 512  # bytes; that of CUDA's allocator

_KIND = attrgetter("dtype", "device")
power_of_2: Callable[[int], int] = triton.next_power_of_2
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants, num_warps=num_warps)`` on the device of the arguments.

    Args:
        kernel: a ``triton.jit`` function whose constants come after all its other arguments.
        arguments: tensors on one device, integers, floats, None, or tuples of these; of at least two if tensors among
            them change from call to call. The first is a tensor, or a tuple that begins with one.
        constants: ``tl.constexpr`` arguments, in the kernel's order.
    """
    first = arguments[0]
    device = (first[0] if isinstance(first, tuple) else first).get_device()
    if _is_another(device):  # Triton launches on the current device
        with torch.cuda.device(device):
            return launch(kernel, grid, *arguments, num_warps=num_warps, **constants)
    values, kinds = _specialized(arguments, device)
    values += constants.values()
    key = (id(kernel), device, num_warps, *constants.values(), *kinds)
    compiled, sizes = _compiled.get(key), (*grid, 1, 1)[:3]
    if compiled is not None:
        compiled.run(*sizes, driver.active.get_current_stream(device), *_fixed(compiled), *values)
    else:
        compiled = kernel[sizes](*arguments, **constants, num_warps=num_warps)
        if compiled is None:  # Triton's interpreter compiles nothing
            return None
        _compiled[key] = compiled
    if _recording.plan is not None:
        _recording.plan.add(compiled, sizes, arguments, values)
    return None


def _is_another(device: int) -> bool:
    """Whether the device of this number, -1 for the CPU, is a GPU but not the current one."""
    return device >= 0 and _num_devices() > 1 and device != torch.cuda.current_device()


_num_devices = cache(torch.cuda.device_count)  # asked before the first launch, and then never again


def _fixed(compiled: Any) -> tuple[Any, ...]:
    """What ``compiled.run`` takes between the stream and the kernel's arguments; its last three are for hooks."""
    return compiled.function, compiled.packed_metadata, None, None, None


def _specialized(arguments: Sequence[Any], device: int) -> tuple[list[Any], list[Any]]:
    """What a compiled kernel is run with for each argument, and what its code depends on.

    Raises:
        ValueError: if a tensor is not on the device of this number (-1: the CPU).
    """
    values, kinds = [], list[Any]()
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.get_device() != device:
                name = "the CPU" if device < 0 else f"cuda:{device}"
                raise ValueError(f"a tensor is on {argument.device} but must be on {name}")
            address = argument.data_ptr()
            values.append(address)
            kinds.append(argument.dtype if address % 16 == 0 else (argument.dtype,))
        elif isinstance(argument, tuple):
            for all_of, members in zip((values, kinds), _specialized(argument, device), strict=True):
                all_of.append(tuple(members))
        else:
            values.append(argument)
            kinds.append(specialization(argument))
    return values, kinds


def specialization(argument: Any) -> Any:
    """The property of an argument, which is not a tensor, that a compiled kernel depends on.

    >>> [specialization(x) for x in (1, 16, 17, 2**40, None, 0.5)]
    ['one', 'int32 / 16', 'int32', 'int64 / 16', None, <class 'float'>]
    """
    if type(argument) is int:
        if argument == 1:
            return "one"
        size = "int32" if -(2**31) <= argument < 2**31 else "int64"
        return f"{size} / 16" if argument % 16 == 0 else size
    return argument if argument is None else type(argument)


@dataclass
class LaunchPlan:
    """The launches of a call, and which of their addresses change from call to call."""

    fixed: Sequence[Tensor]  # only while recording: tensors whose addresses are part of the plan's key
    changing: list[Tensor]  # only while recording: the tensors given to the call, then its scratch memory
    scratch: list[int] = field(default_factory=list)  # where each scratch tensor begins in one block of memory
    scratch_bytes: int = 0  # of this block
    launches: list[tuple[Any, ...]] = field(default_factory=list)  # function, grid, arguments, which of them change
    unchanged: list[Any] = field(default_factory=list)  # values in tuples in which others change
    kept: list[Tensor] = field(default_factory=list)  # other tensors that are read; the plan keeps them alive

    def add(self, compiled: Any, sizes: tuple[int, ...], arguments: Sequence[Any], values: list[Any]) -> None:
        """Record a launch."""
        changes, fixed = [], _fixed(compiled)
        for position, argument in enumerate(arguments):
            members = argument if isinstance(argument, tuple) else (argument,)
            indices = [self._which(member) for member in members]
            if any(index is not None for index in indices):
                for n, index in enumerate(indices):
                    if index is None:
                        self.unchanged.insert(0, values[position][n])
                        indices[n] = -len(self.unchanged)  # counted from the end of the list that ``run`` makes
                changes.append((len(fixed) + position, itemgetter(*indices)))
        self.launches.append((compiled.run, sizes, [*fixed, *values], changes))

    def _which(self, argument: Any) -> int | None:
        """The number of a tensor among those that change; None for another one, or what is no tensor."""
        if not isinstance(argument, Tensor):
            return None
        for n, tensor in enumerate(self.changing):
            if tensor is argument:
                return n
        if not any(argument is tensor for tensor in self.fixed):
            self.kept.append(argument)
        return None

    def run(self, device: int, given: Sequence[Tensor], addresses: list[int]) -> None:
        """Repeat the launches with new addresses."""
        if self.scratch:  # allocated anew: the plan may run on several streams at once
            block = given[0].new_empty(self.scratch_bytes, dtype=torch.uint8)
            begin = block.data_ptr()
            addresses += [begin + offset for offset in self.scratch]
        addresses += self.unchanged
        stream = driver.active.get_current_stream(device)
        for run, sizes, values, changes in self.launches:
            values = values.copy()  # another thread may run the same plan
            for position, value_of in changes:
                values[position] = value_of(addresses)
            run(*sizes, stream, *values)


class _Recording(threading.local):
    plan: LaunchPlan | None = None


_recording = _Recording()


def planned(
    plans: dict[Any, LaunchPlan],
    key: tuple[Hashable, ...],
    fixed: Sequence[Tensor],
    given: Sequence[Tensor],
    body: Callable[[], None],
) -> None:
    """Call ``body()``, or repeat the launches that it made in an earlier call with the same key.

    Args:
        plans: the plans of one owner, so that they are dropped together with the data that ``body`` reads on the host.
        key: everything that the launches depend on, except addresses and the dtypes of ``given``.
        fixed: tensors whose addresses rarely change; the addresses become part of the key.
        given: tensors on one device whose addresses change from call to call. All other tensors that ``body`` launches
            with are its ``scratch``, or are kept alive by the plan; none is a view of a tensor that changes.
        body: a function that does nothing but launch kernels.
    """
    device, addresses = given[0].get_device(), [*map(Tensor.data_ptr, given)]
    for address in addresses:
        if address % 16:
            return body()
    if _is_another(device):
        return body()
    whole_key = (*key, *map(_KIND, given), *map(Tensor.data_ptr, fixed))
    plan = plans.get(whole_key)
    if plan is not None:
        return plan.run(device, given, addresses)
    if len(set(addresses)) < len(addresses) or any(tensor.get_device() != device for tensor in given):
        return body()
    _recording.plan = plan = LaunchPlan(fixed, list(given))
    try:
        body()
    finally:
        _recording.plan = None
    if plan.launches:
        plan.fixed, plan.changing = (), []
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[whole_key] = plan
    return None


def scratch(like: Tensor, *size: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory on the device of ``like``, for one call."""
    tensor, plan = like.new_empty(size, dtype=dtype), _recording.plan
    if plan is not None:
        plan.changing.append(tensor)
        plan.scratch.append(plan.scratch_bytes)
        plan.scratch_bytes += -(-tensor.nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return tensor


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up; Triton's own version is meant for kernels, and slow on the host."""
    return -(-a // b)

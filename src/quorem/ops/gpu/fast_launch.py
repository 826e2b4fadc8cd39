"""Launch kernels through Triton's internals, with less work on the host than with its public launch.

At each call ``kernel[grid](...)`` computes what to specialize on, and formats the options as a key. With small batches
this takes most of the time of a step. So compiled kernels are cached here by what Triton specializes on: dtype and
alignment of a tensor; size, divisibility by 16 and equality to 1 of an integer; values of constants. They are then run
with plain addresses, as Triton itself runs them. A call that is repeated, such as a training step, is cached as a
whole: ``planned`` repeats its launches with new addresses, without running the code that prepared them.

All this is used only with versions of Triton that it was tested with, and not if the environment variable
``QUOREM_FAST_LAUNCH`` is 0. Otherwise every launch is Triton's public one, which is a little slower.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

TESTED = ("3.6.",)  # prefixes of the tested versions of Triton
MOST_PLANS = 256  # the most plans of one owner; when there are more, all are dropped
SCRATCH_ALIGNMENT = 512  # bytes; that of CUDA's allocator

_data_ptr = Tensor.data_ptr
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


@cache
def enabled() -> bool:
    """Whether launches go through Triton's internals; decided once."""
    return triton.__version__.startswith(TESTED) and os.environ.get("QUOREM_FAST_LAUNCH", "1") != "0"


def launch(
    kernel: Any,
    grid: Sequence[int],
    device: int,
    arguments: Sequence[Any],
    num_warps: int,
    constants: dict[str, Any],
) -> None:
    """``launch.launch`` on the current device, on which the arguments are."""
    values, kinds = _specialized(arguments, device)
    key = (id(kernel), device, num_warps, *constants.values(), *kinds)
    launcher = _compiled.get(key)
    sizes = (*grid, 1, 1)[:3]
    if launcher is not None:
        run, leading = launcher
        run(*sizes, torch._C._cuda_getCurrentRawStream(device), *leading, *values, *constants.values())
    else:
        compiled = kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps)
        if compiled is None:  # Triton's interpreter compiles nothing
            return
        launcher = _compiled[key] = _launcher(compiled)
    if _recording.plan is not None:
        _recording.plan.add(*launcher, sizes, arguments, [*values, *constants.values()])


def _specialized(arguments: Sequence[Any], device: int) -> tuple[list[Any], list[Any]]:
    """What a compiled kernel is run with for each argument, and what its code depends on."""
    values, kinds = [], list[Any]()
    for argument in arguments:
        if isinstance(argument, Tensor):
            check_device(argument, device)
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


def check_device(tensor: Tensor, device: int) -> None:
    """Raise ValueError if ``tensor`` is not on the device of this number (-1: the CPU)."""
    if tensor.get_device() != device:
        name = "the CPU" if device < 0 else f"cuda:{device}"
        raise ValueError(f"a tensor is on {tensor.device} but must be on {name}")


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """The function that runs a compiled kernel, and its arguments between the stream and the kernel's arguments.

    Triton's own launcher first allocates scratch memory. For kernels without any, the function is the one that this
    launcher calls in the end.
    """
    run, leading = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    if (run.global_scratch_size, run.profile_scratch_size) != (0, 0):
        return run, leading
    function, *rest = leading
    return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *rest)


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

    def add(
        self, run: Any, leading: tuple[Any, ...], sizes: tuple[int, ...], arguments: Sequence[Any], values: list[Any]
    ) -> None:
        """Record a launch."""
        changes = []
        for position, argument in enumerate(arguments):
            value, members = values[position], argument if isinstance(argument, tuple) else (argument,)
            indices = [self._which(member) for member in members]
            if any(index is not None for index in indices):
                for n, index in enumerate(indices):
                    if index is None:
                        self.unchanged.insert(0, value[n])
                        indices[n] = -len(self.unchanged)  # counted from the end of the list that ``run`` makes
                changes.append((len(leading) + position, itemgetter(*indices)))
        self.launches.append((run, sizes, [*leading, *values], changes))

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
        stream = torch._C._cuda_getCurrentRawStream(device)
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
        key: everything that the launches depend on, except addresses.
        fixed: tensors whose addresses rarely change; the addresses become part of the key.
        given: tensors on one device whose addresses change from call to call. All other tensors that ``body`` launches
            with are its ``scratch``, or are kept alive by the plan; none is a view of a tensor that changes.
        body: a function that does nothing but launch kernels.
    """
    if not enabled():
        return body()
    addresses: list[int] = []
    device = given[0].get_device()
    for tensor in given:
        address = tensor.data_ptr()
        if address % 16 or address in addresses or tensor.get_device() != device:
            return body()
        addresses.append(address)
    if device >= 0 and device != torch._C._cuda_getDevice():
        return body()
    whole_key = (device, *key, *map(_data_ptr, fixed))
    plan = plans.get(whole_key)
    if plan is not None:
        return plan.run(device, given, addresses)
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


def specialization(argument: Any) -> Any:
    """The property of an argument, which is not a tensor, that a compiled kernel depends on.

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

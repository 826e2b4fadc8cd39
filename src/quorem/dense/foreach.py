"""Optimizer steps on parameters with dense gradients, in few launches on a GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import gpu
from ..ops.state import DeviceScalar
from . import rules


class StepState(NamedTuple):
    """The state of one parameter as the kernel takes it: up to three averages, and the step counter."""

    average0: Tensor | None
    average1: Tensor | None
    average2: Tensor | None
    counter: Tensor | None


class Foreach:
    """Steps of an optimizer on several parameters in one launch, and what it caches for them."""

    def __init__(self) -> None:
        # For each parameter: the tensors of its optimizer state by name, and the same as the kernel takes them.
        self._states: dict[Tensor, tuple[dict[str, Tensor], StepState]] = {}
        self._lrs: dict[tuple[int, int], DeviceScalar] = {}  # by group and device

    def step(self, optimizer: Any, index: int, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Take the step of ``optimizer.torch_class`` on ``params`` of the group at ``index``.

        Returns:
            The parameters that were not updated, since no kernel supports them.
        """
        if not params or torch.compiler.is_compiling() or not gpu.kernels():
            return params
        for option in rules.UNSUPPORTED:
            if group.get(option):
                return params
        from .foreach_kernels import StepInput, foreach_update_

        rule, constants, averages = rules.rule_of(optimizer.torch_class, group)
        left: list[Tensor] = []
        inputs: dict[int, list[StepInput]] = {}
        for p in params:
            grad: Any = p.grad
            state, device = None, p.get_device()
            if takes(p) and takes(grad) and grad.get_device() == device:
                state = self._state_of(optimizer, p, averages)
            if state is None:
                left.append(p)
            else:
                inputs.setdefault(device, []).append(StepInput(p, grad, *state, p.numel()))
        for device, updated in inputs.items():
            lr = self._lrs.get((index, device))
            if lr is None:
                lr = self._lrs[index, device] = DeviceScalar(updated[0].parameter.device)
            foreach_update_(updated, lr.set(group["lr"]), constants, rule)
            torch.autograd.graph.increment_version([each.parameter for each in updated])
        return left

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the learning rate that steps captured in a CUDA graph read."""
        for scalar in self._lrs.values():
            scalar.set(lr)

    def _state_of(self, optimizer: Any, p: Tensor, averages: tuple[str, ...]) -> StepState | None:
        """The state of ``p`` for the kernel; None if the kernel does not support it."""
        if not averages:
            return StepState(None, None, None, None)
        state = optimizer.state[p]
        known, step_state = self._states.get(p, ({}, None))
        for name, tensor in known.items():
            if state.get(name) is not tensor:
                step_state = None
        if step_state is not None:
            return step_state
        if not state:
            state.update(rules.initial_state(optimizer.defaults, p, averages))
        tensors = [state.get(name) for name in averages]
        if any(t is None or not takes(t) or t.shape != p.shape or t.device != p.device for t in tensors):
            return None
        counter = torch.zeros(2, device=p.device)
        counter[0] = state["step"]
        state["step"] = counter[0]
        average0, average1, average2 = (*tensors, None, None)[:3]
        step_state = StepState(average0, average1, average2, counter)
        self._states[p] = {name: state[name] for name in ("step", *averages)}, step_state
        return step_state


def takes(tensor: Tensor) -> bool:
    """Whether the kernel supports this parameter, gradient or average."""
    return on_gpu(tensor) and tensor.dtype == torch.float32 and tensor.is_contiguous()


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU and not of a subclass, whose address may not be that of its elements."""
    return tensor.is_cuda and type(tensor) in (nn.Parameter, Tensor)

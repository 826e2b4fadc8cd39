"""Steps on parameters with dense gradients in few launches, on a GPU."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import gpu, torch_rules
from ..ops.state import DeviceScalar


@cache
def kernels() -> Any:
    """``ops.gpu.foreach``, or None where Triton is missing."""
    if not gpu.kernels():
        return None
    from ..ops.gpu import foreach

    return foreach


@dataclass
class Kept:
    """A parameter's state, as its optimizer has it, and as a job takes it."""

    own: list[tuple[str, Tensor]]
    job: tuple[Tensor | None, ...]  # three averages and the counter


class Foreach:
    """What an optimizer keeps to step several parameters in one launch, beside their state."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, Kept] = {}
        self._dials: dict[tuple[int, int], DeviceScalar] = {}  # by group and device

    def step(self, optimizer: Any, index: int, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Take the step of ``optimizer.torch_class`` on ``params`` of the group at ``index``.

        Returns:
            The parameters that are left as they are, since no kernel takes them.
        """
        foreach = kernels()
        if foreach is None or not params or torch.compiler.is_compiling():
            return params
        for option in torch_rules.UNSUPPORTED:
            if group.get(option):
                return params
        rule, hyper, averages = torch_rules.rule_of(optimizer.torch_class, group)
        left: list[Tensor] = []
        jobs: dict[int, list[Any]] = {}
        for p in params:
            grad: Any = p.grad
            state, device = None, p.get_device()
            if foreach.takes(p) and foreach.takes(grad) and grad.get_device() == device:
                state = self._state_of(foreach, optimizer, p, averages)
            if state is None:
                left.append(p)
            else:
                jobs.setdefault(device, []).append((p, grad, *state, p.numel()))
        for device, some in jobs.items():
            dial = self._dials.get((index, device))
            if dial is None:
                dial = self._dials[index, device] = DeviceScalar(some[0][0].device)
            foreach.foreach_update_(some, dial.set(group["lr"]), hyper, rule)
            torch.autograd.graph.increment_version([job[0] for job in some])
        return left

    def turn(self, lr: float | Tensor) -> None:
        """Set the learning rate that steps in a CUDA graph read."""
        for dial in self._dials.values():
            dial.set(lr)

    def _state_of(
        self, foreach: Any, optimizer: Any, p: Tensor, averages: tuple[str, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """Three averages and the counter of ``p``; None where the state does not fit it."""
        if not averages:
            return None, None, None, None
        own = optimizer.state[p]
        kept = self._kept.get(p)
        if kept is not None:
            for name, tensor in kept.own:
                if own.get(name) is not tensor:
                    break
            else:
                return kept.job
        if not own:
            own.update(torch_rules.fresh(optimizer.defaults, p, averages))
        found = [own.get(name) for name in averages]
        if any(t is None or not foreach.takes(t) or t.shape != p.shape or t.device != p.device for t in found):
            return None
        counter = torch.zeros(2, device=p.device)
        counter[0] = own["step"]
        own["step"] = counter[0]
        kept = Kept([(name, own[name]) for name in ("step", *averages)], (*found, *[None] * (3 - len(found)), counter))
        self._kept[p] = kept
        return kept.job

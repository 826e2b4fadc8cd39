"""Steps on parameters with dense gradients in few launches, on a GPU."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import gpu, torch_rules, update


@cache
def kernels() -> Any:
    """``ops.gpu.foreach``, or None where Triton is missing."""
    if not gpu.kernels():
        return None
    from ..ops.gpu import foreach

    return foreach


class Foreach:
    """What an optimizer keeps to step several parameters in one launch, beside their state."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, list[Tensor | None]] = {}  # step, averages and counter, as the state has them
        self._dials: dict[tuple[int, torch.device], update.Dial] = {}

    def step(self, optimizer: Any, index: int, group: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
        """Take the step of ``optimizer.torch_class`` on ``params`` of the group at ``index``.

        Returns:
            The parameters that are left as they are, since no kernel takes them.
        """
        foreach = kernels()
        if foreach is None or torch.compiler.is_compiling() or any(group.get(o) for o in torch_rules.UNSUPPORTED):
            return params
        rule, hyper, averages = torch_rules.rule_of(optimizer.torch_class, group)
        left: list[Tensor] = []
        jobs: dict[torch.device, list[Any]] = {}
        for p in params:
            grad: Any = p.grad
            kept = None
            if foreach.takes(p) and foreach.takes(grad) and grad.device == p.device:
                kept = self._state_of(foreach, optimizer, p, averages)
            if kept is None:
                left.append(p)
            else:
                jobs.setdefault(p.device, []).append((p, grad, *kept[1:], p.numel()))
        for device, some in jobs.items():
            dial = self._dials.get((index, device))
            if dial is None:
                dial = self._dials[index, device] = update.Dial(device)
            foreach.foreach_update_(some, dial.turn(group["lr"]), hyper, rule)
            torch.autograd.graph.increment_version([job[0] for job in some])
        return left

    def turn(self, lr: float | Tensor) -> None:
        """Set the learning rate that steps in a CUDA graph read."""
        for dial in self._dials.values():
            dial.turn(lr)

    def _state_of(
        self, foreach: Any, optimizer: Any, p: Tensor, averages: tuple[str, ...]
    ) -> list[Tensor | None] | None:
        """``step``, three averages and the counter of ``p``; None where the state does not fit it."""
        if not averages:
            return [None] * 5
        own = optimizer.state[p]
        if not own:
            own.update(torch_rules.fresh(optimizer.defaults, p, averages))
        kept = self._kept.get(p)
        now = [own.get(name) for name in ("step", *averages)]
        if kept is not None and all(a is b for a, b in zip(now, kept, strict=False)):
            return kept
        if any(t is None or not foreach.takes(t) or t.shape != p.shape or t.device != p.device for t in now[1:]):
            return None
        counter = torch.zeros(2, device=p.device)
        counter[0] = own["step"]
        own["step"] = counter[0]
        self._kept[p] = kept = [own["step"], *now[1:], *[None] * (4 - len(now)), counter]
        return kept

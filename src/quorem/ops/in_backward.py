"""Lookups whose gradients go straight to an optimizer's rule, and never into ``weight.grad``."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .update import Read


class InBackward:
    """Collects the reads of one backward pass, and hands them on as the pass ends: then no gradient is still to come.

    Args:
        weight: whose reads these are; carries this object as its attribute ``in_backward``.
        apply: takes the reads of a pass.
    """

    def __init__(self, weight: Tensor, apply: Callable[[list[Read]], None]) -> None:
        self.weight, self.apply = weight, apply
        # A pass is kept alive by the engine alone, so that one that fails takes its reads with it.
        self.passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        for function in _eager:
            _eager[function] = torch.compiler.disable(
                function, reason="a lookup after apply_in_backward is not compiled"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # an optimizer stays with the weight it was made for

    def collect(self, read: Read, version: int) -> None:
        """Note a read whose gradient has come; ``version`` is the weight's at the time it was read."""
        task = torch._C._current_graph_task_id()
        current = self.passes.get(task)
        if current is None:
            current = self.passes[task] = _Pass(self, version)
            torch.autograd.Variable._execution_engine.queue_callback(current)
        self.check(version)
        current.reads.append(read)

    def check(self, version: int) -> None:
        """Raise RuntimeError if the weight is not what it was at ``version``."""
        if self.weight._version != version:
            raise RuntimeError(
                "the tables changed between a lookup and its backward: after apply_in_backward every backward pass is a"
                " step, so look up again after each, join losses that share a lookup, and checkpoint with"
                " use_reentrant=False"
            )


class _Pass:
    """The reads of one backward pass."""

    def __init__(self, to: InBackward, version: int) -> None:
        self.to, self.version = to, version
        self.reads: list[Read] = []

    def __call__(self) -> None:
        self.to.check(self.version)
        self.to.apply(self.reads)


_eager: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}  # a function as the compiler is to leave it alone


def outside_the_graph(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function``, not compiled once there is an ``InBackward``: saying so loads the compiler, which takes seconds."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return _eager[function](*args, **options)
        return function(*args, **options)

    _eager[function] = function
    return run


def collector(weight: Tensor) -> InBackward | None:
    """Where the gradients of ``weight`` go, if not into ``weight.grad``."""
    return getattr(weight, "in_backward", None)


@outside_the_graph
def collected(
    out: Tensor | Callable[[], Tensor],
    weight: Tensor,
    op: str,
    before: tuple[Any, ...],
    after: tuple[Tensor, ...] = (),
    **options: Any,
) -> Tensor:
    """What ``op`` read from ``weight``, such that its gradient goes to the weight's collector.

    Args:
        out: the vectors, or a function that reads them, if nothing but ``weight`` gets a gradient.
        weight: whose ``in_backward`` is set.
        op: as in ``Read``, with the rest.
        before: what comes before the weight.
        after: what comes after it.
        options: by name.
    """
    return _Collected.apply(weight, out, collector(weight), op, before, after, options)


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, out: Any, *read: Any) -> Tensor:
        ctx.read, ctx.version = read, weight._version
        vectors: Tensor = out.view_as(out) if isinstance(out, Tensor) else out()
        return vectors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph must be False: apply_in_backward leaves no gradient to differentiate")
        to, op, before, after, options = ctx.read
        before = (*before, grad) if op == "rows" else (grad, *before)
        to.collect(Read(op, before, after, options), ctx.version)
        return None, grad if ctx.needs_input_grad[1] else None, None, None, None, None, None

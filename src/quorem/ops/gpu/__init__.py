"""Fused kernels for a GPU, in Triton; plain PyTorch where Triton is missing.

The sums of gradients run in any order; in PyTorch's deterministic mode (``torch.use_deterministic_algorithms``) the
plain versions take over, which sort.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Op = Callable[..., Any]


@cache
def kernels() -> dict[str, Op]:
    """The ops that have a fused version here, by name; none where Triton is missing."""
    try:
        from . import bag, lookup, path, update
    except ImportError:
        return {}
    forward: list[Op] = [lookup.lookup, lookup.lookup_counting, lookup.count_invalid_, bag.bag]
    gradients: list[Op] = [lookup.lookup_backward, bag.bag_backward, bag.bag_sample_weights_backward]
    updates: list[Op] = [update.lookup_update_, update.bag_update_, update.lookup_catch_up_, update.bag_catch_up_]
    paths: list[Op] = [path.path, path.path_backward]
    return {op.__name__: op for op in (*forward, *gradients, *updates, *paths)}


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor lies on a GPU and is no subclass, whose address may not be its elements'."""
    return tensor.is_cuda and type(tensor) in (nn.Parameter, Tensor)


def straight(name: str, tensor: Tensor) -> Op | None:
    """The kernel that the op ``name`` would run on ``tensor``, to be called without the dispatcher, which takes time.

    None where something looks on that must see the op: a compiler, a transform, a mode, a profiler. What it returns may
    be NotImplemented.
    """
    if not on_gpu(tensor) or torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    return None if torch._C._autograd._profiler_enabled() else kernels().get(name)


def fused(name: str, reference: Op) -> Op:
    """The op ``name`` as a GPU runs it: fused if it can be, else ``reference``."""

    def run(*args: Any, **options: Any) -> Any:
        op = kernels().get(name)
        result = NotImplemented if op is None else op(*args, **options)
        return reference(*args, **options) if result is NotImplemented else result

    return run

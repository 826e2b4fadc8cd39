"""Fused kernels for the CPU, compiled by Numba on first use; plain PyTorch where Numba is missing."""

from collections.abc import Callable
from functools import cache
from typing import Any

Op = Callable[..., Any]


@cache
def kernels() -> dict[str, Op]:
    """The ops that have a fused version here, by name; none where they cannot be compiled."""
    try:
        from numba.core import config

        from . import launch, launch_update
    except ImportError:
        return {}
    if getattr(config, "DISABLE_JIT", False):
        return {}
    gradients: list[Op] = [launch.lookup_backward, launch.bag_backward, launch.bag_sample_weights_backward]
    gradients += [launch.lookup_row_grads, launch.bag_row_grads]
    forward: list[Op] = [launch.lookup, launch.bag]
    updates: list[Op] = [launch_update.lookup_update_, launch_update.bag_update_, launch_update.rows_update_]
    catch_ups: list[Op] = [
        launch_update.lookup_catch_up_,
        launch_update.bag_catch_up_,
        launch_update.rows_catch_up_,
    ]
    return {op.__name__: op for op in (*forward, *gradients, *updates, *catch_ups)}


def fused(name: str, reference: Op) -> Op:
    """The op ``name`` as the CPU runs it: fused if it can be, else ``reference``."""

    def run(*args: Any, **options: Any) -> Any:
        op = kernels().get(name)
        result = NotImplemented if op is None else op(*args, **options)
        return reference(*args, **options) if result is NotImplemented else result

    return run

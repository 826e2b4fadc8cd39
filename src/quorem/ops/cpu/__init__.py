"""Fused kernels for the CPU, compiled by Numba on first use; plain PyTorch runs where Numba is missing.

``vector`` (loads, stores and arithmetic), ``codes``, ``rounding``, ``rows`` and ``sums`` (of gradients) are compiled
into the kernels of ``lookup``, ``projection``, ``gradients``, ``replay`` and ``rules``, whose last functions are the
ops. ``launch`` turns tensors into what kernels take.
"""

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def kernels() -> dict[str, Callable[..., Any]]:
    """The fused versions, by the name of what they do; none where they cannot be compiled."""
    try:
        from numba.core import config
    except ImportError:
        return {}
    if getattr(config, "DISABLE_JIT", False):
        return {}
    from . import gradients, lookup, projection, replay, rules

    ops: tuple[Callable[..., Any], ...] = (
        *(lookup.lookup, gradients.backward, gradients.row_grads),
        *(rules.update_, rules.rows_update_, replay.catch_up_, replay.rows_catch_up_),
        *(projection.project, projection.project_backward, projection.lookup_split),
    )
    return {op.__name__: op for op in ops}

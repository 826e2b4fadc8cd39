"""Fused kernels for the CPU, compiled by Numba on first use; plain PyTorch runs where Numba is missing.

From the inside out: ``memory`` and ``vector`` (loads and stores), ``codes``, ``rounding``, ``source`` (the layout),
``rows``, ``lookup``, ``areas`` (summed gradients), ``gradients``, ``replay`` and ``rules`` are compiled. ``launch``
turns tensors into what these take, ``pages`` gives memory, and ``sharing`` says which slots are summed together.
``launch``, ``launch_gradients`` and ``launch_rules`` are the ops.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from ..layout import Layout


def compile_seconds() -> float:
    """Seconds that this process has spent on compiling kernels; 0 where there are none."""
    if not kernels():
        return 0.0
    from .compiled import compilations

    return compilations.seconds


def word_bytes(layout: Layout) -> int:
    """Bytes of the words in which the kernels find ids of lists; 0 where there are no kernels."""
    if not kernels():
        return 0
    from .launch import kernel_layout

    known = kernel_layout(layout)
    return 0 if known is None else known.maps.nbytes - layout.maps.nbytes


@cache
def kernels() -> dict[str, Callable[..., Any]]:
    """The fused versions, by the name of what they do; none where they cannot be compiled."""
    try:
        from numba.core import config
    except ImportError:
        return {}
    if getattr(config, "DISABLE_JIT", False):
        return {}
    from . import launch, launch_gradients, launch_rules, projection

    ops: tuple[Callable[..., Any], ...] = (
        launch.lookup,
        launch_gradients.backward,
        launch_gradients.row_grads,
        launch_gradients.sample_weights_backward,
        launch_rules.update_,
        launch_rules.rows_update_,
        launch_rules.catch_up_,
        launch_rules.rows_catch_up_,
        projection.project,
    )
    return {op.__name__: op for op in ops}

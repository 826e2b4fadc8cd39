"""Fused kernels for a GPU, in Triton; plain PyTorch runs where Triton is missing.

The kernels sum gradients in any order. In PyTorch's deterministic mode (``torch.use_deterministic_algorithms``) the
plain reference runs instead, which sorts.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

from ..layout import Layout

Kernel = Callable[..., Any]


@cache
def kernels() -> dict[str, Kernel]:
    """The fused versions, by the name of what they do; none where Triton is missing."""
    if find_spec("triton") is None:
        return {}
    from . import gradients, lookup, path, replay, rules

    forward: list[Kernel] = [lookup.lookup, lookup.count_invalid_]
    backward: list[Kernel] = [gradients.backward, gradients.sample_weights_backward]
    updates: list[Kernel] = [rules.update_, replay.catch_up_]
    paths: list[Kernel] = [path.path, path.path_backward]
    return {kernel.__name__: kernel for kernel in (*forward, *backward, *updates, *paths)}


def word_bytes(layout: Layout) -> int:
    """Bytes of the words in which the kernels search lists of hot and cold ids; 0 where Triton is missing."""
    if not kernels():
        return 0
    from .host import host_layout

    return host_layout(layout).on_device.maps.nbytes - layout.maps.nbytes

"""Fused kernels for a GPU, in Triton; plain PyTorch runs where Triton is missing.

The kernels sum gradients in any order. In PyTorch's deterministic mode (``torch.use_deterministic_algorithms``) the
plain reference runs instead, which sorts.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from ..layout import Layout

Kernel = Callable[..., Any]


@cache
def kernels() -> dict[str, Kernel]:
    """The fused versions of ops, by the name of the op; empty where Triton is missing."""
    try:
        from . import gradients, lookup, path, quantized, replay, rules
    except ImportError:
        return {}
    forward: list[Kernel] = [lookup.lookup, lookup.lookup_counting, lookup.count_invalid_, lookup.bag]
    forward += [quantized.lookup_quantized, quantized.lookup_quantized_counting, quantized.bag_quantized]
    backward: list[Kernel] = [
        gradients.lookup_backward,
        gradients.bag_backward,
        gradients.bag_sample_weights_backward,
    ]
    updates: list[Kernel] = [rules.lookup_update_, rules.bag_update_, replay.lookup_catch_up_, replay.bag_catch_up_]
    paths: list[Kernel] = [path.path, path.path_backward]
    return {kernel.__name__: kernel for kernel in (*forward, *backward, *updates, *paths)}


def word_bytes(layout: Layout) -> int:
    """Bytes of the words in which the kernels search lists of hot and cold ids; 0 where Triton is missing."""
    if not kernels():
        return 0
    from .host import host_layout

    return host_layout(layout).maps.nbytes - layout.maps.nbytes

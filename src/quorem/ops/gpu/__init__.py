"""Fused kernels for a GPU, in Triton; plain PyTorch runs where Triton is missing.

The kernels sum gradients in any order. In PyTorch's deterministic mode (``torch.use_deterministic_algorithms``) the
plain reference runs instead, which sorts.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

HAS_TRITON = find_spec("triton") is not None


@cache
def kernels() -> dict[str, Callable[..., Any]]:
    """The fused versions, by the name of what they do; none where Triton is missing."""
    if not HAS_TRITON:
        return {}
    from . import gradients, lookup, projection, replay, rules

    ops: tuple[Callable[..., Any], ...] = (
        *(lookup.lookup, lookup.count_invalid_, gradients.backward, gradients.sample_weights_backward),
        *(rules.update_, replay.catch_up_),
        *(projection.project, projection.project_backward, projection.lookup_split),
    )
    return {op.__name__: op for op in ops}

"""Memory that kernels use for a while. A thread keeps it for the next call: fresh pages take longer than their use."""

from threading import local

import torch
from torch import Tensor

from .pages import in_huge_pages

MOST_KEPT = 1 << 30  # bytes; of these only pages that were written to are in memory
_kept = local()  # ``memory``: what this thread has used last, if it is not in use


class Scratch:
    """At least ``num_bytes`` of memory, from a whole cache line on. It must outlive the kernels that use it."""

    memory: Tensor | None = None

    def __init__(self, num_bytes: int) -> None:
        memory: Tensor | None = getattr(_kept, "memory", None)
        _kept.memory = None
        if memory is None or memory.nbytes < num_bytes + 64:
            memory = in_huge_pages(torch.empty(num_bytes + 64, dtype=torch.uint8, device="cpu"))
        self.memory = memory
        self.address = -(-memory.data_ptr() // 64) * 64

    def __del__(self) -> None:
        memory, kept = self.memory, getattr(_kept, "memory", None)  # memory is None if there was not enough
        if memory is not None and memory.nbytes <= MOST_KEPT and (kept is None or kept.nbytes < memory.nbytes):
            _kept.memory = memory

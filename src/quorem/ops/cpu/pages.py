"""Memory: huge pages for large tensors, and scratch memory that a thread keeps.

Rows are read in no order in tables of many megabytes. With pages of 4 KB almost each of them misses the processor's
cache of addresses, with pages of 2 MB few do. And each page costs time when it is first written, so a large output in
fresh memory is written sooner in a few huge pages. Linux is asked for them by ``madvise``, as NumPy does.
"""

import ctypes
import sys
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor

PAGE = 1 << 21
LEAST = 1 << 22  # bytes of a tensor that is worth it
MOST_KEPT = 1 << 30  # bytes of scratch memory; of these only pages that were written to are in memory
_MADV_HUGEPAGE = 14
_kept = local()  # ``memory``: what this thread has used last, if it is not in use


@cache
def _madvise() -> Any:
    """The function of the C library on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def in_huge_pages(tensor: Tensor) -> Tensor:
    """``tensor``, whose memory has not been written yet, after asking for huge pages if it is large and on a CPU."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.nbytes < LEAST:
        return tensor
    madvise = _madvise()
    if madvise is not None:
        first = -(-tensor.data_ptr() // PAGE) * PAGE
        last = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        madvise(first, last - first, _MADV_HUGEPAGE)  # only a hint: if it is refused, pages are small
    return tensor


class Scratch:
    """At least ``num_bytes`` of memory, from a whole cache line on. It must outlive the kernels that use it.

    The thread keeps it for the next call: fresh pages take longer than their use.
    """

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

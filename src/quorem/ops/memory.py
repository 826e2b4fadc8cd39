"""Memory: values kept beside a tensor, scratch memory that a thread keeps, and huge pages for large tensors.

Rows are read in no order in tables of many megabytes. With pages of 4 KB almost each of them misses the processor's
cache of addresses, with pages of 2 MB few do. And each page costs time when it is first written, so a large output in
fresh memory is written sooner in a few huge pages. Linux is asked for them by ``madvise``, as NumPy does.
"""

import ctypes
import sys
import weakref
from functools import cache
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor

PAGE = 1 << 21
LEAST = 1 << 22  # bytes of a tensor that is worth it
_MADV_HUGEPAGE = 14
_kept = local()  # ``memory``: of ``scratch``
Value = TypeVar("Value")


class PerTensor:
    """A value for each of some tensors, kept as long as the tensor object lives."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, tensor: Tensor) -> Any:
        """What was set for ``tensor``, or None."""
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def set(self, tensor: Tensor, value: Value) -> Value:
        """Keep ``value``, and return it."""
        values, key = self._values, id(tensor)
        values[key] = weakref.ref(tensor, lambda _: values.pop(key, None)), value
        return value


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


def scratch(num_bytes: int) -> Tensor:
    """At least ``num_bytes`` of memory, until this thread's next call: fresh pages take longer than their use."""
    memory: Tensor | None = getattr(_kept, "memory", None)
    if memory is None or memory.nbytes < num_bytes:
        memory = _kept.memory = in_huge_pages(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    return memory

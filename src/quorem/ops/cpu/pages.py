"""Huge pages for large tensors: on Linux, by ``madvise``, as NumPy does for its arrays.

Rows are read in no order in tables of many megabytes. With pages of 4 KB almost each of them misses the processor's
cache of addresses, with pages of 2 MB few do. And each page costs time when it is first written, so a large output in
fresh memory is written sooner in a few huge pages.
"""

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

PAGE = 1 << 21
LEAST = 1 << 22  # bytes of a tensor that is worth it
_MADV_HUGEPAGE = 14


@cache
def _madvise() -> Any:
    """The function of the C library; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
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

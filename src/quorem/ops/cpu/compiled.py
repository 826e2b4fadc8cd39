"""How the kernels are compiled: on first use, kept on disk, without the interpreter's lock."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_INNER: dict[str, Any] = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call, into each of them."""
    return numba.njit(function, **_INNER)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and keep the machine code for the next process.

    Numba drops a cached kernel when its own file changes. A kernel is made of functions from all files here, so
    the stamp it is kept under covers them all. Where no folder can be written, the kernel is not kept.
    """
    try:
        compiled: Any = numba.njit(function, cache=True, **_OPTIONS)
        compiled._cache._cache_file._source_stamp = _stamp()
    except (RuntimeError, AttributeError):
        compiled = numba.njit(function, **_OPTIONS)
    return compiled


def _stamp() -> tuple[tuple[str, float, int], ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((path.name, path.stat().st_mtime, path.stat().st_size) for path in files)

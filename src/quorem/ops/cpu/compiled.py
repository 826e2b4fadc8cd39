"""How the kernels are compiled: on first use, kept on disk, without the interpreter's lock."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.extending import register_jitable

from ...paper import renumbering
from .. import codes, layout, rounding, state
from .notice import notice

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_PART: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}
# Functions that only kernels call. ``njit`` would compile them anew for each constant that they are called with.
helper = register_jitable(**_PART)  # the compiler decides whether it is inlined
INLINED: dict[str, Any] = {"forceinline": True, **_PART}
inner = register_jitable(**INLINED)  # it is: for loops over columns, which are slower otherwise


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and keep the machine code on disk for the next process.

    Numba compiles a kept kernel anew when the kernel's own file has changed. But functions and constants of other files
    are compiled into it too, so here it is kept under a stamp of all these files. Where no folder can be written, the
    kernel is not kept.
    """
    try:
        compiled: Any = numba.njit(function, cache=True, **_OPTIONS)
        compiled._cache._cache_file._source_stamp = source_stamp()
    except (RuntimeError, AttributeError):
        compiled = numba.njit(function, **_OPTIONS)
    notice.kernels.add(id(compiled))
    return compiled


def source_stamp() -> tuple[tuple[str, float, int], ...]:
    """Name, time of change and size of every file that a kernel is compiled from."""
    others = [Path(str(module.__file__)) for module in (renumbering, layout, codes, rounding, state)]
    files = [*sorted(Path(__file__).parent.glob("*.py")), *others]
    return tuple((path.name, path.stat().st_mtime, path.stat().st_size) for path in files)

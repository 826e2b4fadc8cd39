"""How the kernels are compiled: on first use, kept on disk, without the interpreter's lock.

One line on stderr says so, once in a command, since it takes seconds; ``QUOREM_QUIET=1`` silences it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.extending import register_jitable

from ...paper import renumbering
from .. import codes, layout, rounding, state

TEXT = "quorem: compiling CPU kernels that are not kept from earlier runs (QUOREM_QUIET=1 silences this)"
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_PART: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **_OPTIONS}
INLINED: dict[str, Any] = {"forceinline": True, **_PART}
# Functions that only kernels call. ``njit`` would compile them anew for each constant that they are called with. They
# are optimized again in every function that they are nested in, so deep nesting compiles slowly.
helper = register_jitable(**_PART)  # the compiler decides whether it is inlined
inner = register_jitable(**INLINED)  # it is: for loops over columns, which are slower otherwise


class Compilations(event.Listener):
    """Announces the first compilation of ``kernels``."""

    def __init__(self) -> None:
        self.kernels: set[int] = set()  # by id

    def on_start(self, compilation: Any) -> None:
        """Announce it, unless one was announced."""
        is_wanted = os.environ.get("QUOREM_QUIET", "0") in ("", "0") and os.environ.get("RANK", "0") == "0"
        if is_wanted and id(compilation.data["dispatcher"]) in self.kernels:
            os.environ["QUOREM_QUIET"] = "1"  # neither this process nor those that it starts repeat it
            print(TEXT, file=sys.stderr, flush=True)

    def on_end(self, compilation: Any) -> None:
        """Nothing: Numba asks for this method."""


compilations = Compilations()
event.register("numba:compile", compilations)


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
    compilations.kernels.add(id(compiled))
    return compiled


def source_stamp() -> tuple[tuple[str, float, int], ...]:
    """Name, time of change and size of every file that a kernel is compiled from."""
    others = [Path(str(module.__file__)) for module in (renumbering, layout, codes, rounding, state)]
    files = [*sorted(Path(__file__).parent.glob("*.py")), *others]
    return tuple((path.name, path.stat().st_mtime, path.stat().st_size) for path in files)

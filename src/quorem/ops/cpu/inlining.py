"""Functions that only kernels call are compiled into these, and get no machine code of their own.

Numba optimizes every function by itself, and again within each function that calls it, and makes machine code of it
each time; it also compiles a function anew for each constant that it is called with. Here only the kernels, which
contain all others, need that. Without it a compilation takes half the time, and the kernels are as fast.

This goes through Numba's internals. So it is done only with versions of Numba that it was tested on, and not if the
environment variable ``QUOREM_FAST_COMPILE`` is 0. Otherwise compiling takes twice as long.
"""

import os
from collections.abc import Callable
from typing import Any

import numba
from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import types
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

TESTED = ("0.68.",)  # what the version of Numba begins with


def enabled() -> bool:
    """Whether functions are compiled only as parts of kernels."""
    return numba.__version__.startswith(TESTED) and os.environ.get("QUOREM_FAST_COMPILE", "1") != "0"


def inlined(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """``numba.njit(function, **options)`` for the use of kernels only."""
    compiled: Any = numba.njit(function, pipeline_class=_Compiler, **options)
    template = compiled.get_call_template
    compiled.get_call_template = lambda args, kws: template(tuple(map(types.unliteral, args)), kws)
    return compiled


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerOnly(NativeLowering):
    """Makes LLVM's code of a function, for its callers, and neither optimizes it nor makes machine code of it."""

    _name = "quorem_lower_only"

    def run_pass(self, state: Any) -> bool:
        library = state.targetctx.codegen().create_library(state.func_id.func_qualname)

        def finalize() -> None:
            library._finalize_dynamic_globals()
            library._finalized = True

        library._optimize_final_module = lambda: None
        library._finalize_final_module = finalize
        state.library = library
        state.flags.no_compile = True
        try:
            super().run_pass(state)
        finally:
            state.flags.no_compile = False
        function, no_address = state.cr.fndesc, 1
        name = function.qualname.split(".")[-1]
        entry = _dynfunc.make_function(function.lookup_module(), name, "", no_address, state.cr.env, (library,))
        state.targetctx.insert_user_function(entry, function, [library])
        state.cr = state.cr._replace(cfunc=entry)
        return True


class _Compiler(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LowerOnly if each is NativeLowering else each, text) for each, text in passes.passes]
        passes._finalized = False
        passes.finalize()
        return [passes]

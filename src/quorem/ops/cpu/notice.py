"""One line on stderr, once in a command, while kernels are compiled for the first time, which takes seconds.

Set the environment variable ``QUOREM_QUIET=1`` to silence it.
"""

import os
import sys
import threading
import time
from typing import Any

from numba.core import event

SECONDS_UNTIL_PRINTED = 1.0  # of compilation
TEXT = "quorem: compiling CPU kernels that are not kept from earlier runs (QUOREM_QUIET=1 silences this)"


class Notice(event.Listener):
    """Prints the line once, if compiling one of ``kernels`` takes long, which those that are kept on disk do not.

    ``seconds`` is the time that all compilations have taken so far.
    """

    def __init__(self) -> None:
        self.kernels: set[int] = set()  # by id
        self._timers: dict[int, threading.Timer] = {}
        self._printed = False
        self.seconds = 0.0
        self._starts: dict[int, float] = {}

    def on_start(self, compilation: Any) -> None:
        """Start to wait."""
        kernel = id(compilation.data["dispatcher"])
        if kernel in self.kernels:
            self._starts[kernel] = time.perf_counter()
        quiet = os.environ.get("QUOREM_QUIET", "0") not in ("", "0") or os.environ.get("RANK", "0") != "0"
        if kernel in self.kernels and not self._printed and not quiet:
            timer = self._timers[kernel] = threading.Timer(SECONDS_UNTIL_PRINTED, self._print)
            timer.daemon = True
            timer.start()

    def on_end(self, compilation: Any) -> None:
        """Stop waiting."""
        kernel = id(compilation.data["dispatcher"])
        if kernel in self._starts:
            self.seconds += time.perf_counter() - self._starts.pop(kernel)
        timer = self._timers.pop(kernel, None)
        if timer is not None:
            timer.cancel()

    def _print(self) -> None:
        if not self._printed:
            self._printed = True
            os.environ["QUOREM_QUIET"] = "1"  # processes that this one starts need not repeat it
            print(TEXT, file=sys.stderr, flush=True)


notice = Notice()
event.register("numba:compile", notice)

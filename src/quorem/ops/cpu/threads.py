"""Threads for the compiled kernels: one for little work, else as many as ``torch.set_num_threads`` allows.

Kernels run without the interpreter's lock, so Python's own threads serve. Unlike Numba's, they can be used from any
thread, survive a fork, and do not spin while they wait.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

GRAIN = 1 << 20  # elements of a lookup that are worth a thread
STEP_COST = 4  # times as long as to look a number up does it take to sum its gradient and update it


def threads_for(elements: int) -> int:
    """How many threads to use for the work of looking up that many numbers. They do not change the results."""
    return max(min(torch.get_num_threads(), elements // GRAIN), 1)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quorem")


def run_tasks(run: Callable[..., bool | None], tasks: Iterable[tuple[Any, ...]], threads: int) -> bool:
    """Call ``run`` with each task, on whichever of some threads is free first; returns whether a call returned True."""
    if threads == 1:
        return any([run(*task) for task in tasks])
    futures = [_pool(threads).submit(run, *task) for task in tasks]
    try:
        return any([future.result() for future in futures])
    finally:  # even after an exception: other threads still use memory that this one owns
        wait(futures)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of the threads

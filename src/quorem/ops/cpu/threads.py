"""Threads for the compiled kernels, as many as ``torch.set_num_threads`` allows.

Kernels run without the interpreter's lock, so Python's own threads serve: unlike Numba's, they may be used from any
thread, survive a fork, and do not spin while they wait.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

GRAIN = 1 << 18  # elements of work that are worth a thread of their own: waking it costs some 20 microseconds

_pools: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


def threads_for(elements: int) -> int:
    """How many threads to spread that much work over."""
    return max(1, min(torch.get_num_threads(), elements // GRAIN))


def spread(worker: Callable[[], Callable[..., bool | None]], tasks: Iterable[tuple[int, ...]], threads: int) -> bool:
    """Run every task once, on whichever thread is free first; whether any answered True.

    Args:
        worker: makes the function that a thread runs its tasks by, with scratch of its own.
        tasks: the arguments of each.
        threads: how many to use, this one included.
    """
    todo = deque(tasks)

    def work() -> bool:
        run, found = worker(), False
        while todo:
            try:
                task = todo.popleft()
            except IndexError:
                break
            found |= bool(run(*task))
        return found

    if threads == 1:
        return work()
    others = [_pool().submit(work) for _ in range(min(threads, len(todo)) - 1)]
    try:
        found = work()
    finally:
        wait(others)  # whatever happens here, their memory must outlive them
    return any([other.result() for other in others]) or found


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), "quorem"))
    return _pools[0]

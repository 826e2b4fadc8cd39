"""Threads for the compiled kernels, as many as ``torch.set_num_threads`` allows.

Kernels run without the interpreter's lock, so Python's own threads serve. Unlike Numba's, they can be used from any
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
    """How many threads to use for that much work."""
    worth = elements // GRAIN
    return 1 if worth <= 1 else min(torch.get_num_threads(), worth)


def run_tasks(worker: Callable[[], Callable[..., int | None]], tasks: Iterable[tuple[int, ...]], threads: int) -> int:
    """Run every task once, on whichever thread is free first.

    Args:
        worker: makes the function that a thread calls with each of its tasks, with scratch memory of its own.
        tasks: the arguments of each.
        threads: how many to use, this one included.

    Returns:
        The largest number that a task returned, 0 if none did.
    """
    waiting = deque(tasks)

    def work() -> int:
        run, largest = worker(), 0
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:
                break
            largest = max(largest, run(*task) or 0)
        return largest

    if threads == 1:
        return work()
    others = [_pool().submit(work) for _ in range(min(threads, len(waiting)) - 1)]
    try:
        largest = work()
    finally:
        wait(others)  # even after an exception: the other threads still use memory that this one owns
    return max([largest, *(other.result() for other in others)])


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), "quorem"))
    return _pools[0]

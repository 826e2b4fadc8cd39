"""Threads for the compiled kernels: one for little work, else as many as ``torch.set_num_threads`` allows.

Kernels run without the interpreter's lock, so Python's own threads serve. Unlike Numba's, they can be used from any
thread, survive a fork, and do not spin while they wait.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

GRAIN = 1 << 20  # elements of a lookup that are worth a thread
STEP_COST = 4  # times as long as to look a number up does it take to sum its gradient and update it
MOST_THREADS = 64


def threads_for(elements: int) -> int:
    """How many threads to use for the work of looking up that many numbers. They do not change the results."""
    return max(min(torch.get_num_threads(), elements // GRAIN, MOST_THREADS), 1)


def run_tasks(run: Callable[..., bool | None], tasks: Iterable[tuple[int, ...]], threads: int) -> bool:
    """Call ``run`` with the arguments of each task, on whichever of some threads, this one included, is free first.

    Returns:
        Whether a call returned True.
    """
    waiting, results = deque(tasks), []

    def work() -> None:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:  # another thread was faster
                break
            results.append(run(*task))

    if threads == 1:
        work()
        return any(results)
    others = [_pool[0].submit(work) for _ in range(min(threads, len(waiting)) - 1)]
    try:
        work()
    finally:  # even after an exception: the other threads still use memory that this one owns
        begun = [other for other in others if not other.cancel()]  # no thread needs to wake up if all is done
        wait(begun)
    for other in begun:
        other.result()  # raises its exception
    return any(results)


def _new_pool() -> None:
    _pool[:] = [ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="quorem")]  # threads start when they are needed


_pool: list[ThreadPoolExecutor] = []
_new_pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_pool)  # a fork has none of the threads

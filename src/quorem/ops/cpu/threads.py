"""Threads for the compiled kernels: one, or as many as ``torch.set_num_threads`` allows, where that is quicker.

Kernels run without the interpreter's lock, so Python's own threads serve. Unlike Numba's, they can be used from any
thread, survive a fork, and do not spin while they wait.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import median
from typing import Any

import torch

GRAIN = 1 << 18  # elements of work below which a thread of their own is never worth it
CHOOSES = True  # whether one thread or several is chosen by their times; else several
_TRIES, _KEPT, _AGAIN, _GAIN = 3, 7, 64, 0.9

_pools: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)


class Threads:
    """How many threads one piece of work takes: one, or as many as allowed, whichever was quicker in recent calls.

    A thread gains nothing where waking it takes longer than the work, or where other processes have the cores. So each
    kind of work is timed both ways. Results have the same bits either way (see ``gradients``).

    As a context manager it gives the number of threads, and notes the time that its block takes.
    """

    def __init__(self, key: tuple[str, int, int]) -> None:
        self.most = key[2]
        self.times: dict[bool, deque[float]] = {several: deque(maxlen=_KEPT) for several in (False, True)}
        self.calls = 0
        self._begun = threading.local()

    def __enter__(self) -> int:
        several = self._several()
        self.calls += 1
        self._begun.value = several, time.perf_counter()
        return self.most if several else 1

    def __exit__(self, error: Any, *_: Any) -> None:
        several, begun = self._begun.value
        if error is None:
            self.times[several].append(time.perf_counter() - begun)

    def _several(self) -> bool:
        if not CHOOSES:
            return True
        for several in (False, True):
            if len(self.times[several]) < _TRIES:
                return several
        gains = median(self.times[True]) < _GAIN * median(self.times[False])
        return gains != (self.calls % _AGAIN == 0)  # now and then the other, since the machine's load changes


class _One:
    """One thread, for work that is not worth more."""

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *_: Any) -> None:
        pass


_ONE = _One()
_choices: dict[tuple[str, int, int], Threads] = {}


def threads_for(work: str, elements: int) -> Threads | _One:
    """How many threads to use for that much work of one kind, as a context manager around it."""
    worth = elements // GRAIN
    if worth <= 1 or (most := min(torch.get_num_threads(), worth)) == 1:
        return _ONE
    key = (work, elements.bit_length(), most)
    return _choices.get(key) or _choices.setdefault(key, Threads(key))


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

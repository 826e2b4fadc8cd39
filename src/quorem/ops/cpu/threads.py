"""Threads for the compiled kernels: one, or as many as ``torch.set_num_threads`` allows, where that is quicker.

Kernels run without the interpreter's lock, so Python's own threads serve. Unlike Numba's, they can be used from any
thread, survive a fork, and do not spin while they wait.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch

GRAIN = 1 << 18  # elements of work below which a second thread is never worth it
CHOOSES = True  # whether one thread or several is chosen by their times; else several
_TRIALS = 4  # calls that try one number of threads
_TIMES_KEPT = 16  # of each number of threads
_GAIN = 0.9  # several threads must take less than this share of one thread's time
_WORSE = 1.5  # times this much longer than when the choice was made: the machine's load has changed
_FEWEST_CALLS, _MOST_CALLS = 32, 256  # from one choice to the next trials


class ThreadChoice:
    """How many threads one kind of work takes: one, or as many as allowed, whichever was quicker in recent calls.

    A thread gains nothing where waking it takes longer than the work, or where other processes have the cores. So each
    kind of work is timed both ways: at first, after some calls again (more rarely as long as the choice stays), and
    when the calls have become slower. Results have the same bits either way (see ``gradients``).

    Args:
        most: the number of threads allowed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._several = False
        self._times: dict[bool, deque[float]] = {several: deque(maxlen=_TIMES_KEPT) for several in (False, True)}
        self._trials = [True, False] * _TRIALS  # whether the next calls take several threads, the last entry first
        self._calls_left = 0  # until the next trials
        self._calls_between = {False: _FEWEST_CALLS, True: _FEWEST_CALLS}  # one thread, several
        self._expected = 0.0  # the time of the chosen number of threads when it was chosen

    def next_call(self) -> bool:
        """Whether the next call takes several threads."""
        if not CHOOSES:
            return True
        try:
            return self._trials.pop()
        except IndexError:
            pass
        if self._calls_left <= 0:
            self._choose()
        times = self._times[self._several]
        if len(times) == _TIMES_KEPT and min(times) > _WORSE * self._expected:
            self._calls_left = 1
        self._calls_left -= 1
        if self._calls_left == 0:
            self._times[not self._several].clear()
            self._trials = [not self._several] * _TRIALS
        return self._several

    def note(self, several: bool, time_per_element: float) -> None:
        """Note how long a call took."""
        self._times[several].append(time_per_element)

    def _choose(self) -> None:
        one, several = (_mean_without_longest(self._times[several]) for several in (False, True))
        chosen = several < _GAIN * one
        if chosen and not self._several:
            self._calls_between[True] = _FEWEST_CALLS
        else:
            self._calls_between[chosen] = min(2 * self._calls_between[chosen], _MOST_CALLS)
            if chosen:
                self._calls_between[False] = _FEWEST_CALLS
        self._several, self._expected = chosen, several if chosen else one
        self._calls_left = self._calls_between[chosen]


def _mean_without_longest(times: deque[float]) -> float:
    """A mean, which unlike the median counts calls that now and then wait for a late thread.

    One long time is left out: it may be the compiler, or memory that is used for the first time.
    """
    kept = sorted(times)[:-1]
    return sum(kept) / max(len(kept), 1)


class _Call:
    """A piece of work: as a context manager it gives the number of threads, and notes the time of its block."""

    __slots__ = ("_began", "_choice", "_elements", "_several")

    def __init__(self, choice: ThreadChoice, elements: int) -> None:
        self._choice, self._elements = choice, elements

    def __enter__(self) -> int:
        self._several = self._choice.next_call()
        self._began = time.perf_counter()
        return self._choice.most if self._several else 1

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None:
            self._choice.note(self._several, (time.perf_counter() - self._began) / self._elements)


class _SmallCall:
    """One thread, for work that is not worth more."""

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *_: Any) -> None:
        pass


_SMALL_CALL = _SmallCall()
_choices: dict[tuple[str, int, int], ThreadChoice] = {}


def threads_for(work: str, elements: int) -> _Call | _SmallCall:
    """How many threads to use for that much work of one kind, as a context manager around it."""
    num_grains = elements // GRAIN
    if num_grains <= 1 or (most := min(torch.get_num_threads(), num_grains)) == 1:
        return _SMALL_CALL
    key = (work, elements.bit_length(), most)
    return _Call(_choices.get(key) or _choices.setdefault(key, ThreadChoice(most)), elements)


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
    others = [_Invitation(work) for _ in range(min(threads, len(waiting)) - 1)]
    _helpers[0].invite(others)
    try:
        largest = work()
    finally:
        for other in others:
            other.end()  # even after an exception: the other threads still use memory that this one owns
    return max([largest, *(other.result() for other in others)])


class _Invitation:
    """An invitation to another thread to share some work. It ends if the work is done before that thread wakes up."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._work: Callable[[], int] | None = work
        self._taken, self._running = Lock(), Lock()
        self._running.acquire()
        self._largest = 0
        self._error: BaseException | None = None

    def accept(self) -> None:
        """Work on the thread that calls this, unless the invitation has ended."""
        if self._taken.acquire(blocking=False):
            try:
                self._largest = self._work() if self._work is not None else 0
            except BaseException as error:
                self._error = error
            finally:
                self._running.release()

    def end(self) -> None:
        """Wait for the other thread if it has begun; else it never will."""
        if not self._taken.acquire(blocking=False):
            self._running.acquire()
        self._work = None

    def result(self) -> int:
        """What the other thread's work returned, or its exception."""
        if self._error is not None:
            raise self._error
        return self._largest


class _Helpers:
    """Threads that wait for invitations, in one process."""

    def __init__(self) -> None:
        self._invitations: SimpleQueue[_Invitation] = SimpleQueue()
        self._num_threads = 0
        self._lock = Lock()

    def invite(self, invitations: list[_Invitation]) -> None:
        """Wake a thread for each invitation."""
        with self._lock:
            while self._num_threads < len(invitations):
                Thread(target=_serve, args=(self._invitations,), name="quorem", daemon=True).start()
                self._num_threads += 1
        for invitation in invitations:
            self._invitations.put(invitation)


def _serve(invitations: SimpleQueue[_Invitation]) -> None:
    while True:
        invitations.get().accept()


_helpers = [_Helpers()]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _helpers.__setitem__(0, _Helpers()))  # a fork has none of the threads

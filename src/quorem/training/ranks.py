"""Start and end the processes (ranks) that train one model together."""

import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .loop import stop_on_signal

TIMEOUT = timedelta(minutes=5)  # how long a rank waits for another that neither answers nor ends


def run_ranks(target: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Run ``target(*arguments)`` in several processes, the ranks of a gloo group; if one fails, all are ended.

    Ctrl-C and SIGTERM are passed on to the ranks.

    Args:
        target: a module-level function, since it is called in new processes.
        num_ranks: number of processes.
        arguments: arguments of the function; they are pickled.

    Raises:
        RuntimeError: if a rank was killed.
        KeyboardInterrupt: if the ranks were interrupted.
        Exception: the exception of the first rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    alive, lifeline = context.Pipe(duplex=False)  # closed when this process ends, even if it is killed
    receivers, processes = [], []
    with tempfile.TemporaryDirectory() as folder, stop_on_signal() as stop:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            options = (rank, num_ranks, f"{folder}/store", alive, sender, target, arguments)
            process = context.Process(target=_rank, args=options, name=f"rank {rank}")
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            failed = _first_failure(processes, stop)
        finally:
            for process in processes:
                process.kill()
                process.join()
            lifeline.close()
        if failed is not None:
            raise _error_of(processes[failed], receivers[failed])


def _first_failure(processes: list[Any], stop: threading.Event) -> int | None:
    """Wait until a rank has failed, and return its number; None if all ranks have ended without a failure."""
    running, terminated = set(range(len(processes))), False
    while running:
        wait([processes[rank].sentinel for rank in running], timeout=0.2)
        if stop.is_set() and not terminated:
            terminated = True
            for process in processes:
                process.terminate()
        ended = {rank for rank in running if processes[rank].exitcode is not None}
        running -= ended
        failed = [rank for rank in ended if processes[rank].exitcode]
        if failed:  # prefer a rank that was killed to one that only could not reach it
            return min(failed, key=lambda rank: processes[rank].exitcode)
    return None


def _error_of(process: Any, receiver: Connection) -> BaseException:
    try:
        error = receiver.recv() if receiver.poll() else None
    except EOFError:
        error = None
    if isinstance(error, BaseException):
        return error
    how = f"by signal {-process.exitcode}" if process.exitcode < 0 else f"with code {process.exitcode}"
    hint = "the same command resumes from the last checkpoint"
    return RuntimeError(f"{process.name} ended {how}, and the others with it: {hint}")


def _rank(
    rank: int,
    num_ranks: int,
    store: str,
    alive: Connection,
    sender: Connection,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in a terminal then reaches only the starting process, which passes it on
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    for prefix in ("", "LOCAL_"):
        os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(num_ranks)}
    logging.disable(logging.WARNING)  # TorchRec logs its plan
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    try:
        joined = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=joined, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        target(*arguments)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # in a normal exit, threads of gloo and FBGEMM may abort the interpreter
    except KeyboardInterrupt as error:
        dist.barrier()  # the first rank may still be saving
        _fail(sender, error)
    except BaseException as error:
        _fail(sender, error)


def _fail(sender: Connection, error: BaseException) -> None:
    """Send an error to the process that started the ranks, and exit at once: other ranks may be waiting."""
    try:
        sender.send(error)
    except Exception:  # it cannot be pickled
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(1)


def _end_with(alive: Connection) -> None:
    """Exit as soon as the process that started this one has ended."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)

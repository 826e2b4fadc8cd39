"""Many runs in one folder: each is trained once, by any free process; interrupted runs are continued.

runs/KEY/          a run's folder (``training.run``), named by its configuration; finished once it has a result
errors/KEY.json    why a run failed; the next sweep tries it again
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data.prepared import Prepared
from ..files.atomic import LockedError, write
from ..training.config import RunConfig
from ..training.feed import Feed
from ..training.loop import Options, Status, stop_on_signal, train_many
from ..training.run import RunFolder

WAIT = 0.5  # seconds between two checks of the runs of other processes
THREADS = 1  # torch's threads in each worker: if they depended on --workers, so would the last bits of a run


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to train, and where."""

    folder: Path
    runs: Sequence[Sequence[RunConfig]]  # in the order of training; those of one inner list at the same time
    data: Path  # folder of prepared data
    device: str

    def run(self, config: RunConfig) -> Path:
        return self.folder / "runs" / config.key()

    def error(self, config: RunConfig) -> Path:
        """The file in which a failure of a run is written."""
        return self.folder / "errors" / f"{config.key()}.json"

    def is_done(self, config: RunConfig) -> bool:
        return (self.run(config) / "result.json").exists()

    def has_failed(self, config: RunConfig) -> bool:
        return self.error(config).exists()

    def is_settled(self, config: RunConfig) -> bool:
        """Whether nothing is left to do for a run."""
        return self.is_done(config) or self.has_failed(config)


def new(folder: Path, runs: Sequence[Sequence[RunConfig]], data: Path, device: str) -> Sweep:
    """A sweep that begins now: what is listed twice is trained once, and what failed before is tried again."""
    seen: set[RunConfig] = set()
    groups = []
    for group in runs:
        fresh = [config for config in dict.fromkeys(group) if config not in seen]
        seen |= set(fresh)
        if fresh:
            groups.append(fresh)
    folder.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(folder=folder, runs=groups, data=data, device=device)
    for config in seen:
        sweep.error(config).unlink(missing_ok=True)
    return sweep


@contextmanager
def claimed(sweep: Sweep, configs: Sequence[RunConfig]) -> Iterator[list[RunFolder]]:
    """The runs that this process may train now: not settled, and not locked by others. They are locked in the block."""
    with ExitStack() as locks:
        folders = []
        for config in configs:
            if sweep.is_settled(config):
                continue
            try:
                folder = locks.enter_context(RunFolder(sweep.run(config), config, attempts=1))
            except LockedError:
                continue
            if not sweep.is_settled(config):  # another process may just have finished it
                folders.append(folder)
        yield folders


def work(sweep: Sweep, stop: threading.Event) -> None:
    """Train until all runs are settled; wait for the runs of other processes, and take them over if these die.

    Once ``stop`` is set, runs in training are saved and the function returns.
    """
    feed: list[Feed] = []
    open_groups = [list(group) for group in sweep.runs]
    while open_groups and not stop.is_set():
        any_claimed = False
        for group in open_groups:
            if stop.is_set() or _is_orphan():
                return
            with claimed(sweep, group) as folders:
                any_claimed = any_claimed or bool(folders)
                if folders:
                    _train(sweep, folders, feed, stop)
        open_groups = [group for group in open_groups if not all(map(sweep.is_settled, group))]
        if open_groups and not any_claimed:
            stop.wait(WAIT)


def _train(sweep: Sweep, folders: Sequence[RunFolder], feed: list[Feed], stop: threading.Event) -> None:
    """Train claimed runs together; if one of several fails, train each alone to find out which.

    ``feed`` is empty before the first call, and holds the rows for the next ones.
    """
    stopping = threading.Event()  # train_many sets it when one of several runs fails

    def watch(_: Status) -> None:
        if stop.is_set() or _is_orphan():
            stop.set()
            stopping.set()

    options = Options(report=watch, keep_model=False)
    configs = [folder.config for folder in folders]
    try:
        if not feed:
            feed.append(Feed(Prepared(sweep.data), sweep.device))
        train_many(configs, feed[0], folders, options=options, stop=stopping, workers=len(configs))
    except KeyboardInterrupt:
        stop.set()
    except Exception as error:
        if stop.is_set():
            return
        if len(configs) > 1:
            for folder in folders:
                if not sweep.is_done(folder.config) and not stop.is_set():
                    _train(sweep, [folder], feed, stop)
            return
        sweep.error(configs[0]).parent.mkdir(exist_ok=True)
        about = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        write(sweep.error(configs[0]), json.dumps(about | {"config": configs[0].to_json()}, indent=1) + "\n")


def _is_orphan() -> bool:
    """Whether the main process was killed, so that it cannot stop this worker."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _process(sweep: Sweep) -> None:
    os.environ["QUOREM_QUIET"] = "1"  # else each worker would say that it compiles kernels
    torch.set_num_threads(THREADS)
    with stop_on_signal() as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main process stops the workers
        try:
            work(sweep, stop)
        except OSError as error:  # such as a full disk
            sys.exit(f"quorem: {error}; what is finished is kept, and the same command goes on")


def run(sweep: Sweep, *, workers: int, report: Callable[[], None] = lambda: None) -> None:
    """Train all runs with several processes; on Ctrl-C each saves its runs, and KeyboardInterrupt is raised.

    ``report`` is called all the time.
    """
    context = multiprocessing.get_context("spawn")
    with stop_on_signal() as stop:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by workers while they start
        processes = [context.Process(target=_process, args=(sweep,)) for _ in range(workers)]
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, handler)
        terminated = False
        while any(process.is_alive() for process in processes):
            if stop.is_set() and not terminated:
                terminated = True  # a second signal would interrupt them at once
                for process in processes:
                    process.terminate()  # each saves its runs, then ends
            report()
            time.sleep(WAIT / 5)
        if stop.is_set():
            raise KeyboardInterrupt
    if died := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"{len(died)} of {workers} workers died (exit code {died[0]}); the same command goes on")

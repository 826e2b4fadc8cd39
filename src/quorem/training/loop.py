"""The training loop: epochs of log loss, with checkpoints, validation and the final test (section 5.2)."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..data.prepared import Prepared
from ..files.provenance import commit, versions
from .config import RunConfig
from .feed import Feed
from .metrics import Evaluation, Metrics
from .model import build_model, sizes
from .processes import any_of, check_same_step, is_first, num_processes
from .run import Progress, RunFolder
from .trial import Trial, capturing

LOG_EVERY = 100  # steps between two lines of training loss
REPORT_SECONDS = 0.2  # least time between two reports
EVALUATION_ROWS = {"cpu": 4096, "cuda": 1 << 16}  # rows per batch


@dataclass(frozen=True)
class Status:
    """The progress of a run, for ``Options.report``."""

    config: RunConfig
    step: int
    steps: int
    rows_per_second: float
    loss: float | None  # mean training loss of the last LOG_EVERY steps
    resumed: bool = False  # whether nothing was trained yet since the run was resumed


@dataclass(frozen=True)
class Options:
    """What a run does besides training; none of it changes the result.

    Args:
        checkpoint_seconds: least time between two checkpoints; saving takes at most a tenth of the time.
        report: called a few times per second with the status of the run.
        keep_model: write the trained model at the end.

    >>> Options(checkpoint_seconds=600).keep_model
    True
    """

    checkpoint_seconds: float = 60.0
    report: Callable[[Status], None] | None = None
    keep_model: bool = True


def train(
    config: RunConfig,
    data: Prepared | Feed,
    out: str | os.PathLike[str] | RunFolder | None = None,
    *,
    device: torch.device | str = "cpu",
    options: Options = Options(),  # noqa: B008 - frozen
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Train a model as ``config`` says. A run that was interrupted is resumed from its last checkpoint in ``out``.

    Within a process group of ``torch.distributed``, all its processes train the run together; the first one writes.

    Args:
        config: configuration of the run; ``config.data`` must be the ``data_identity`` of the data.
        data: prepared data, or a ``Feed`` of them that several runs share.
        out: folder of the run, as a path or as a ``RunFolder`` that the caller has entered; None writes nothing.
        device: where to train; ignored if ``data`` is a ``Feed``, which has a device.
        options: checkpoints and reports.
        stop: once set, the run writes a checkpoint after the current step and raises KeyboardInterrupt.

    Returns:
        The contents of ``result.json``: configuration, final metrics of validation and test, sizes, speed and versions.

    Raises:
        KeyboardInterrupt: if stopped; the same call resumes the run.
        FloatingPointError: if the loss is no longer finite.
        ValueError: if the data or the folder belong to another run.
        OSError: if the disk is full.

    >>> import tempfile
    >>> from quorem.data import ClickLog, synthesize
    >>> from quorem.training.model import data_identity
    >>> log = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=1), 300, tempfile.mkdtemp() + "/log")
    >>> train(RunConfig(data=data_identity(log), batch_size=64), log)["steps"]
    5
    """
    feed = data if isinstance(data, Feed) else Feed(data, device)
    if out is None:
        return _train(config, feed, None, options, stop)
    with contextlib.nullcontext(out) if isinstance(out, RunFolder) else RunFolder(out, config) as folder:
        folder.claim()
        return folder.result() or _train(config, feed, folder, options, stop)


def _train(
    config: RunConfig, feed: Feed, folder: RunFolder | None, options: Options, stop: threading.Event | None
) -> dict[str, Any]:
    """Train, resuming from ``folder`` if it is given; the first process writes to it."""
    for name, rows in feed.rows.items():
        if not len(rows):
            raise ValueError(f"{feed.prepared.path} has no rows for {name}: a run needs some of each split")
    with capturing:
        trial = Trial(config, build_model(config, feed.prepared, feed.device), feed.prepared.names)
    progress = Progress(config=config.to_json()) if folder is None else folder.resume(trial)
    check_same_step(trial.steps)
    folder = folder if is_first() else None
    num_rows = len(feed.training_rows(config))
    per_epoch = math.ceil(num_rows / config.batch_size)
    last_step = config.epochs * per_epoch
    if progress.step and options.report is not None:
        options.report(Status(config, progress.step, last_step, 0.0, progress.loss, resumed=True))
    began = time.perf_counter() - progress.seconds  # training in all attempts has taken the time since then
    next_save, next_report = progress.seconds + options.checkpoint_seconds, 0.0

    def log(values: dict[str, Any]) -> None:
        if folder is not None:
            folder.log(trial.steps, values)

    for batches in feed.training(config, trial.steps, trial.together, (LOG_EVERY, config.validate_every)):
        trial.step(batches)
        step, epoch = trial.steps, trial.steps // per_epoch
        is_last, ends_epoch = step == last_step, config.epochs > 1 and step % per_epoch == 0
        if step % LOG_EVERY == 0:
            progress = replace(progress, loss=trial.mean_loss(LOG_EVERY))
            _check_finite(progress.loss, f"the loss is {progress.loss} at step {step}", config)
            log({"loss": progress.loss})

        if ends_epoch or (config.validate_every and step % config.validate_every == 0 and not is_last):
            start = time.perf_counter()
            validation = evaluate(trial, feed, "validation")
            began += time.perf_counter() - start
            if not is_last:
                log({"validation": asdict(validation)})
        if ends_epoch:
            (is_better,) = any_of(feed.device, validation.log_loss < progress.best_loss)
            if is_better:
                progress = replace(progress, best_loss=validation.log_loss, best_epoch=epoch)
                trial.keep_best()
            elif config.patience is not None and epoch - progress.best_epoch >= config.patience:
                break

        seconds = time.perf_counter() - began
        is_due = folder is not None and not is_last and seconds >= next_save
        stopping, saving = any_of(feed.device, stop is not None and stop.is_set(), is_due)
        if (stopping or saving) and folder is not None:
            folder.save(trial, replace(progress, step=step, seconds=seconds))
            saving_took = time.perf_counter() - began - seconds
            began += saving_took
            next_save = seconds + max(options.checkpoint_seconds, 9 * saving_took)
        if stopping:
            raise KeyboardInterrupt
        if options.report is not None and (is_last or time.perf_counter() >= next_report):
            rate = step * config.batch_size / max(seconds, 1e-9)
            options.report(Status(config, step, last_step, rate, progress.loss))
            next_report = time.perf_counter() + REPORT_SECONDS

    if feed.device.type == "cuda":
        torch.cuda.synchronize(feed.device)
    step = trial.steps
    if progress.best_epoch and progress.best_epoch * per_epoch < step:
        trial.restore_best()
    if config.bits is not None:
        trial.quantize_(config.bits)
    seconds = time.perf_counter() - began
    final = {name: asdict(evaluate(trial, feed, name)) for name in ("validation", "test")}
    log(final)
    for name, metrics in final.items():
        _check_finite(metrics["log_loss"], f"the {name} loss is {metrics['log_loss']}", config)
    result = {
        "config": json.loads(config.to_json()),
        "data": feed.prepared.path.absolute().name,
        "epochs": step // per_epoch,
        "processes": num_processes(),
        "steps": step,
        "rows": step * num_rows // per_epoch,
        **({"best_epoch": progress.best_epoch} if config.epochs > 1 else {}),
        **final,
        **sizes(trial.model),
        "seconds": seconds,
        "rows_per_second": step * num_rows / per_epoch / seconds,
        "device": torch.cuda.get_device_name(feed.device) if feed.device.type == "cuda" else feed.device.type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": commit(),
        "seed": config.seed,
    }
    if folder is not None:
        folder.finish(trial.model if options.keep_model else None, feed.prepared, result)
    return result


def _check_finite(loss: float | None, message: str, config: RunConfig) -> None:
    if loss is not None and not math.isfinite(loss):
        raise FloatingPointError(f"{message}: lower lr ({config.learning_rate})")


def train_many(
    configs: Sequence[RunConfig],
    data: Prepared | Feed,
    outs: Sequence[str | os.PathLike[str] | RunFolder | None] | None = None,
    *,
    device: torch.device | str = "cpu",
    options: Options = Options(),  # noqa: B008 - frozen
    stop: threading.Event | None = None,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """Train several runs in one process; the rows are loaded once.

    Args:
        configs: configurations of the runs.
        data: as in ``train``.
        outs: folders of the runs; None writes nothing.
        device: as in ``train``.
        options: as in ``train``, for all runs.
        stop: as in ``train``, for all runs.
        workers: number of runs that train at a time, each in its own thread, and on a GPU in its own stream. On a CPU
            each of several workers uses one torch thread, which suits small matrices.

    Returns:
        The results, in the order of ``configs``.

    Raises:
        ValueError: if ``workers`` is below 1, or there are not as many folders as configurations.

    >>> import tempfile
    >>> from quorem.data import ClickLog, synthesize
    >>> from quorem.training.model import data_identity
    >>> log = synthesize(ClickLog(cardinalities=(10, 1000), num_dense=1), 300, tempfile.mkdtemp() + "/log")
    >>> configs = [RunConfig(data=data_identity(log), batch_size=64, seed=seed) for seed in range(2)]
    >>> [result["steps"] for result in train_many(configs, log)]
    [5, 5]
    """
    outs = [None] * len(configs) if outs is None else outs
    with contextlib.suppress(ImportError):  # before threads start: two threads that import it can deadlock
        import numba  # noqa: F401
    if workers < 1:
        raise ValueError(f"workers ({workers}) must be at least 1")
    if len(outs) != len(configs):
        raise ValueError(f"outs ({len(outs)}) must be as many as configs ({len(configs)})")
    feed, stop = data if isinstance(data, Feed) else Feed(data, device), stop or threading.Event()

    def train_one(config: RunConfig, out: str | os.PathLike[str] | RunFolder | None) -> dict[str, Any]:
        on_gpu = feed.device.type == "cuda"
        try:
            with torch.cuda.stream(torch.cuda.Stream(feed.device)) if on_gpu else contextlib.nullcontext():
                return train(config, feed, out, options=options, stop=stop)
        except BaseException:
            stop.set()  # the other runs write a checkpoint and stop
            raise

    if workers == 1:
        return [train_one(config, out) for config, out in zip(configs, outs, strict=True)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            futures = [pool.submit(train_one, config, out) for config, out in zip(configs, outs, strict=True)]
            errors = [future.exception() for future in futures]
            for error in sorted(filter(None, errors), key=lambda error: isinstance(error, KeyboardInterrupt)):
                raise error  # the original error first, not the KeyboardInterrupt of runs that it stopped
            return [future.result() for future in futures]
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def evaluate(trial: Trial, feed: Feed, split: str) -> Metrics:
    """The metrics of the current model on a split."""
    evaluation = Evaluation()
    for batch in feed.evaluation(split, EVALUATION_ROWS.get(feed.device.type, 4096)):
        evaluation.update(trial.logits(batch), batch.labels)
    return evaluation.compute()


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second signal interrupts at once. Use it only in the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

"""Measure grids: build every provider of a group, compare its vectors with the collection's, and time all in turns."""

import gc
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.shape import CARDINALITIES, CATEGORICAL_NAMES, scaled_cardinalities
from ...files import provenance
from ...modules.collection import EmbeddingCollection, Table
from ...version import __version__
from . import measure
from .grid import ROTATION, SCHEMES, Grid, Group, draw_ids, groups, scheme_of
from .providers import BUILD, Contender, Skipped
from .report import Row

Say = Callable[[str], None]


def facts_of_run(device: torch.device, command: str, commit: str | None = None) -> dict[str, Any]:
    """The facts about a run that every row contains: device, versions, commit, date and command."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        **{name: _version(name) for name in ("triton", "numba")},
        "fbgemm": _version("fbgemm_gpu") or _version("fbgemm_gpu_cpu"),
        "quorem": __version__,
        "commit": commit or provenance.commit() or "unknown",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def rows(grids: Sequence[Grid], device: torch.device, *, quick: bool, say: Say, facts: dict[str, Any]) -> Iterator[Row]:
    """Measure ``grids``; yields rows as soon as a batch size is finished.

    Args:
        grids: what to measure.
        device: device to measure on.
        quick: use small tables and few samples, to see that everything runs.
        say: called with lines of progress, and with the reason if a provider is skipped.
        facts: facts about the run for every row, see ``facts_of_run``.
    """
    cardinalities = scaled_cardinalities(0.0005) if quick else CARDINALITIES
    effort = measure.EFFORTS["quick" if quick else device.type]
    speed = measure.copy_bandwidth(device, effort, 2**24 if quick else None)
    facts = facts | {"copy_gbps": round(speed / 1e9, 2)}
    if device.type == "cpu" and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        say(f"other processes are at work (load {os.getloadavg()[0]:.1f}): compare within this run only, if at all")
    for group in groups(grids):
        say(f"{group.mode}, {group.scheme}, D = {group.dim}")
        contenders = {}
        for provider in group.providers:
            try:
                contenders[provider] = build(provider, group.scheme, group.mode, cardinalities, group.dim, device)
            except (Skipped, ImportError, RuntimeError, AssertionError, NotImplementedError) as error:
                _say_skipped(provider, group, error, say)
        for how, batch in product(group.ids, group.batches):
            ids = [draw_ids(how, cardinalities, batch, seed=i).to(device) for i in range(ROTATION)]
            calls = _calls(contenders, group, ids, say)
            measure.time_in_turns(calls, device, effort, ROTATION)
            for call in calls:
                scheme = scheme_of(call.name, group.scheme)
                specs = [SCHEMES[scheme].spec(n, group.dim) for n in cardinalities]
                yield Row(
                    mode=group.mode,
                    provider=call.name,
                    scheme=scheme,
                    ids=how,
                    batch=batch,
                    dim=group.dim,
                    graph=int(call.graph),
                    optimizer=contenders[call.name].optimizer,
                    setting=contenders[call.name].setting,
                    stored_bytes=4 * sum(spec.num_parameters for spec in specs),
                    **_times(call, measure.bytes_to_move(specs, ids, group.mode), speed),
                    **facts,
                )
            del calls
            _free(device)  # a graph keeps its memory
        contenders.clear()
        _free(device)


def _times(call: measure.Call, moved: int, speed: float) -> dict[str, Any]:
    """The columns of a row with times; ``moved`` bytes take at least ``moved / speed`` seconds."""
    low, median, high = call.quantiles()
    floor = moved / speed * 1e6
    return {
        "median_us": round(median, 3),
        "q20_us": round(low, 3),
        "q80_us": round(high, 3),
        "samples": len(call.seconds),
        "bytes": moved,
        "gbps": round(moved / median / 1e3, 3),
        "floor_us": round(floor, 6),
        "ratio_to_floor": round(median / floor, 3),
    }


def collection(scheme: str, cardinalities: Sequence[int], dim: int, device: torch.device) -> EmbeddingCollection:
    """The tables of the 26 features, with the same weights each time."""
    torch.manual_seed(0)
    names = CATEGORICAL_NAMES[: len(cardinalities)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tables that stay full
        tables = [Table(name, n, dim, SCHEMES[scheme]) for name, n in zip(names, cardinalities, strict=True)]
        return EmbeddingCollection(tables, device=device)


def build(
    provider: str, scheme: str, mode: str, cardinalities: Sequence[int], dim: int, device: torch.device
) -> Contender:
    """Build a provider, and check that its vectors equal those of the collection.

    Raises:
        Skipped: if it cannot be measured here, or its vectors differ.
    """
    source = collection(scheme_of(provider, scheme), cardinalities, dim, device)
    probe = draw_ids("zipf", cardinalities, 7, seed=7).to(device)
    with torch.no_grad():
        expected = source(probe)
        contender = BUILD[provider](source, mode)
        vectors = contender.module(probe)
    order = list(range(len(cardinalities))) if contender.order is None else contender.order
    if not torch.allclose(vectors, expected[:, order], rtol=1e-5, atol=1e-6):
        raise Skipped(f"its vectors differ by {(vectors - expected[:, order]).abs().max():.1e}")
    return contender


def _say_skipped(provider: str, group: Group, error: Exception, say: Say, setting: str = "") -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    say(f"skipped: {provider}{setting} in {group.mode}, {group.scheme}, D = {group.dim}: {reason}")


def _calls(contenders: dict[str, Contender], group: Group, ids: list[Tensor], say: Say) -> list[measure.Call]:
    """The calls of all contenders, also as CUDA graphs where that is possible. All have run on each batch."""
    calls = []
    for provider, contender in contenders.items():
        runs = [operation(group.mode, contender, batch) for batch in ids]
        try:
            for run in runs:
                run()
            calls.append(measure.Call(provider, rotation(runs)))
            if ids[0].is_cuda and (group.mode == "forward" or contender.captures_step):
                calls.append(measure.Call(provider, measure.captured(runs), count=len(runs), graph=True))
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            _say_skipped(provider, group, error, say, f" at B = {len(ids[0])}")
            _free(ids[0].device)
    return calls


def rotation(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that calls the next of ``runs`` each time, in turn."""
    turn = -1

    def run() -> None:
        nonlocal turn
        turn = (turn + 1) % len(runs)
        runs[turn]()

    return run


def operation(mode: str, contender: Contender, ids: Tensor) -> Callable[[], Any]:
    """The function to time: a lookup, or a training step of the tables."""
    module = contender.module
    if mode == "forward":
        return torch.no_grad()(lambda: module(ids))
    with torch.no_grad():
        shape = module(ids[:1]).shape[1:]
    draw = torch.Generator().manual_seed(len(ids))
    grad = torch.randn(len(ids), *shape, generator=draw).to(ids.device) / len(ids)

    def step() -> None:
        module(ids).backward(grad)
        for optimizer in contender.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

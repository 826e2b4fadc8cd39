"""Measure grids: build every provider of a group, compare its vectors with the collection's, and time all in turns."""

import gc
import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.shape import CARDINALITIES, CATEGORICAL_NAMES, scaled_cardinalities
from ...files import provenance
from ...modules.collection import EmbeddingCollection, Table
from ...version import __version__
from . import measure
from .grid import ROTATION, SCHEMES, Grid, draw_ids, stored_scheme
from .providers import BUILD, Contender, Skipped
from .report import Row

Say = Callable[[str], None]
FAILURES = (ImportError, RuntimeError, AssertionError, NotImplementedError)  # of a provider that does not run here


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

    ``quick`` means small tables and few samples, to see that everything runs. ``say`` is called with lines of progress,
    and with the reason if a provider is skipped. ``facts`` (``facts_of_run``) are in every row.
    """
    cardinalities = scaled_cardinalities(0.0005) if quick else CARDINALITIES
    effort = measure.EFFORTS["quick" if quick else device.type]
    speed = measure.copy_bandwidth(device, effort, 2**24 if quick else None)
    facts = facts | {"copy_gbps": round(speed / 1e9, 2)}
    if device.type == "cpu" and hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        say(f"other processes are at work (load {os.getloadavg()[0]:.1f}): compare within this run only, if at all")
    for grid, mode, dim, scheme in [(g, *c) for g in grids for c in product(g.mode, g.dim, g.scheme)]:
        where = f"{mode}, {scheme}, D = {dim}"
        say(where)
        contenders = {}
        for provider in grid.providers(scheme):
            try:
                contenders[provider] = build(provider, scheme, mode, cardinalities, dim, device)
            except (Skipped, *FAILURES) as error:
                say(f"skipped: {provider} in {where}: {_reason(error)}")
        for how, batch in product(grid.ids, grid.batch):
            ids = [draw_ids(how, cardinalities, batch, seed=i).to(device) for i in range(ROTATION)]
            calls = []
            for provider, contender in contenders.items():
                try:
                    calls += _calls(provider, contender, mode, ids)
                except FAILURES as error:
                    say(f"skipped: {provider} at B = {batch} in {where}: {_reason(error)}")
                    _free(device)
            measure.time_in_turns(calls, effort, ROTATION)
            for call in calls:
                stored = stored_scheme(call.name, scheme)
                specs = [SCHEMES[stored].spec(n, dim) for n in cardinalities]
                yield Row(
                    mode=mode,
                    provider=call.name,
                    scheme=stored,
                    ids=how,
                    batch=batch,
                    dim=dim,
                    graph=int(call.graph),
                    optimizer=contenders[call.name].optimizer,
                    setting=contenders[call.name].setting,
                    stored_bytes=4 * sum(spec.num_parameters for spec in specs),
                    **_times(call, measure.bytes_to_move(specs, ids, mode), speed),
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
    """Build a provider, and check that its vectors equal those of the collection; raises ``Skipped`` if they differ."""
    source = collection(stored_scheme(provider, scheme), cardinalities, dim, device)
    probe = draw_ids("zipf", cardinalities, 7, seed=7).to(device)
    with torch.no_grad():
        expected = source(probe)
        contender = BUILD[provider](source, mode)
        vectors = contender.module(probe)
    order = list(range(len(cardinalities))) if contender.order is None else contender.order
    if not torch.allclose(vectors, expected[:, order], rtol=1e-5, atol=1e-6):
        raise Skipped(f"its vectors differ by {(vectors - expected[:, order]).abs().max():.1e}")
    return contender


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _calls(provider: str, contender: Contender, mode: str, ids: list[Tensor]) -> list[measure.Call]:
    """The eager call of a contender, and the CUDA graph where that is possible. Both have run on each batch."""
    runs = [operation(mode, contender, batch) for batch in ids]
    for run in runs:
        run()
    turns = cycle(runs)
    calls = [measure.Call(provider, lambda: next(turns)())]
    if ids[0].is_cuda and (mode == "forward" or contender.captures_step):
        calls.append(measure.Call(provider, measure.captured(runs), count=len(runs), graph=True))
    return calls


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

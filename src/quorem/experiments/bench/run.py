"""Measure grids: build every provider of a group, compare its vectors with the collection's, and time all in turns."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.shape import CARDINALITIES, CATEGORICAL_NAMES, scaled_cardinalities
from ...models import DLRM
from ...modules.collection import EmbeddingCollection, Table
from ...paper.schemes import TableSpec
from . import measure
from .grid import ROTATION, SCHEMES, CaseGroup, draw_ids, groups, scheme_of
from .providers import BUILD, Contender, Skipped, dense_optimizer
from .report import Row

RULE_OF_MODE = {"forward": None, "step": "adagrad", "step_amsgrad": "amsgrad", "dlrm": "adagrad"}
NUM_DENSE = 13
Say = Callable[[str], None]


def rows(grids: Sequence[Any], device: torch.device, *, quick: bool, say: Say, facts: dict[str, Any]) -> Iterator[Row]:
    """Measure ``grids``; yields rows as soon as a batch size is finished.

    Args:
        grids: what to measure.
        device: device to measure on.
        quick: use small tables and few samples, to see that everything runs.
        say: called with lines of progress, and with the reason if a provider is skipped.
        facts: facts about the run for every row, see ``facts.facts_of_run``.
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
            contender = _build(provider, group, cardinalities, device, say)
            if contender is not None:
                contenders[provider] = contender
        for how, batch, providers in group.cells:
            ids = [draw_ids(how, cardinalities, batch, seed=i).to(device) for i in range(ROTATION)]
            present = {provider: contenders[provider] for provider in providers if provider in contenders}
            calls = _calls(present, group, ids, say)
            measure.time_in_turns(calls, device, effort, ROTATION)
            schemes = dict.fromkeys(scheme_of(provider, group.scheme) for provider in present)
            specs = {scheme: _specs(scheme, cardinalities, group.dim) for scheme in schemes}
            moved = {scheme: measure.bytes_to_move(specs[scheme], ids, group.mode) for scheme in schemes}
            for call in calls:
                scheme = scheme_of(call.name, group.scheme)
                yield Row(
                    mode=group.mode,
                    provider=call.name,
                    scheme=scheme,
                    ids=how,
                    batch=batch,
                    dim=group.dim,
                    graph=int(call.graph),
                    optimizer=present[call.name].optimizer,
                    setting=present[call.name].setting,
                    peak_extra_bytes="" if call.peak is None else call.peak,
                    stored_bytes=_stored_bytes(specs[scheme]),
                    **_times(call, moved[scheme], speed),
                    **facts,
                )
            del calls
            _free(device)  # a graph keeps its memory
        contenders.clear()
        _free(device)


def _times(call: measure.Call, moved: int | None, speed: float) -> dict[str, Any]:
    """The columns of a row with times; ``moved`` bytes take at least ``moved / speed`` seconds."""
    low, median, high = call.quantiles()
    floor = None if moved is None else moved / speed * 1e6
    return {
        "median_us": round(median, 3),
        "q20_us": round(low, 3),
        "q80_us": round(high, 3),
        "samples": len(call.seconds),
        "bytes": "" if moved is None else moved,
        "gbps": "" if moved is None else round(moved / median / 1e3, 3),
        "floor_us": "" if floor is None else round(floor, 6),
        "ratio_to_floor": "" if floor is None else round(median / floor, 3),
    }


def _specs(scheme: str, cardinalities: Sequence[int], dim: int) -> list[TableSpec]:
    return [SCHEMES[scheme].spec(n, dim) for n in cardinalities]


def _stored_bytes(specs: Sequence[TableSpec]) -> int:
    return 4 * sum(spec.num_parameters for spec in specs)


def collection(scheme: str, cardinalities: Sequence[int], dim: int, device: torch.device) -> EmbeddingCollection:
    """The tables of the 26 features, with the same weights each time."""
    torch.manual_seed(0)
    names = CATEGORICAL_NAMES[: len(cardinalities)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tables that stay full
        tables = [Table(name, n, dim, SCHEMES[scheme]) for name, n in zip(names, cardinalities, strict=True)]
        return EmbeddingCollection(tables, device=device)


def build(
    provider: str, scheme: str, rule: str | None, cardinalities: Sequence[int], dim: int, device: torch.device
) -> Contender:
    """Build a provider, and check that its vectors equal those of the collection.

    Raises:
        Skipped: if it cannot be measured here, or its vectors differ.
    """
    source = collection(scheme_of(provider, scheme), cardinalities, dim, device)
    probe = draw_ids("zipf", cardinalities, 7, seed=7).to(device)
    with torch.no_grad():
        expected = source(probe)
        contender = BUILD[provider](source, rule)
        vectors = contender.module(probe)
    order = list(range(len(cardinalities))) if contender.order is None else contender.order
    if not torch.allclose(vectors, expected[:, order], rtol=1e-5, atol=1e-6):
        raise Skipped(f"its vectors differ by {(vectors - expected[:, order]).abs().max():.1e}")
    return contender


def _build(
    provider: str, group: CaseGroup, cardinalities: Sequence[int], device: torch.device, say: Say
) -> Contender | None:
    """The contender; None if it cannot be measured, in which case a line says why."""
    rule = RULE_OF_MODE[group.mode]
    stored = _stored_bytes(_specs(scheme_of(provider, group.scheme), cardinalities, group.dim))
    needed = stored * (1 + measure.STATES.get(group.mode, int(rule is not None)) + (provider == "dense"))
    try:
        if device.type == "cpu" and needed > (free := _free_memory()):
            raise Skipped(f"it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")
        contender = build(provider, group.scheme, rule, cardinalities, group.dim, device)
        if group.mode == "dlrm":
            model = DLRM(contender.module, embedding_dims=[group.dim] * len(cardinalities), device=device)
            layers = [p for part in (model.bottom, model.top, model.output) for p in part.parameters()]
            contender.optimizers.append(dense_optimizer("adagrad", layers))
            contender.module = model
        return contender
    except (Skipped, ImportError, RuntimeError, AssertionError, NotImplementedError) as error:
        _say_skipped(provider, group, error, say)
    _free(device)
    return None


def _say_skipped(provider: str, group: CaseGroup, error: Exception, say: Say, setting: str = "") -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    say(f"skipped: {provider}{setting} in {group.mode}, {group.scheme}, D = {group.dim}: {reason}")


def _calls(contenders: dict[str, Contender], group: CaseGroup, ids: list[Tensor], say: Say) -> list[measure.Call]:
    """The calls of all contenders, also as CUDA graphs where that is possible. All have run on each batch."""
    calls = []
    for provider, contender in contenders.items():
        runs = [operation(group.mode, contender, batch) for batch in ids]
        try:
            for run in runs:
                run()
            cuda = ids[0].is_cuda
            peak = measure.peak_extra_bytes(runs[0]) if cuda and group.mode != "forward" else None
            calls.append(measure.Call(provider, rotation(runs), peak=peak))
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            _say_skipped(provider, group, error, say, f" at B = {len(ids[0])}")
            _free(ids[0].device)
            continue
        if cuda and group.mode in contender.captures:
            try:
                replay = measure.captured(runs)
                calls.append(measure.Call(provider, replay, count=len(runs), graph=True, peak=peak))
            except RuntimeError as error:
                torch.cuda.synchronize()
                _say_skipped(provider, group, error, say, f" in a CUDA graph at B = {len(ids[0])}")
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
    """The function to time: a lookup, a training step of the tables, or a training step of a whole DLRM."""
    module, optimizers = contender.module, contender.optimizers

    def finish() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    if mode == "forward":
        return torch.no_grad()(lambda: module(ids))
    draw = torch.Generator().manual_seed(len(ids))
    if mode == "dlrm":
        dense = torch.rand(len(ids), NUM_DENSE, generator=draw).to(ids.device)
        clicks = torch.randint(2, (len(ids),), generator=draw).float().to(ids.device)

        def dlrm() -> None:
            F.binary_cross_entropy_with_logits(module(dense, ids), clicks).backward()
            finish()

        return dlrm
    with torch.no_grad():
        shape = module(ids[:1]).shape[1:]
    grad = torch.randn(len(ids), *shape, generator=draw).to(ids.device) / len(ids)

    def step() -> None:
        module(ids).backward(grad)
        finish()

    return step


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_memory() -> int:
    """Bytes that can be allocated without swapping."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return 2**62
    line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024

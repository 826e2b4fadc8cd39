"""The training step on a GPU: the networks' layers fused and plain, in one run.

    PYTHONPATH=src python3 benchmarks/train_gpu.py --out DIR [--tune] [--parts check,time,profile]

Writes ``DIR/train_gpu.json``. ``check``: gradients against float64 beside torch's own error in float32, and some
steps of each optimizer. ``time``: a whole step, captured as a CUDA graph, over rows of Criteo's cardinalities that lie
on the GPU: with the copies that fill the graph's buffers, and the graph alone; and what an epoch would take.
``profile``: the kernels of one step. ``--tune`` varies the tiles of the dense kernels, one at a time, and keeps what
helps.

A configuration that fails is recorded and the others go on; the file is written anew after each.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quorem import QR, Full, models
from quorem.collection import EmbeddingCollection
from quorem.data.batches import Batch
from quorem.data.shape import CARDINALITIES, NUM_ROWS
from quorem.dense import layers as kernels
from quorem.dense import limits
from quorem.dense.step import FusedStep
from quorem.provenance import commit
from quorem.training.config import RunConfig
from quorem.training.tables import tables_of
from quorem.training.trial import STEPS_PER_GRAPH, Trial

EPOCH = NUM_ROWS * 6 // 7
SCHEMES = {"QR(4)": QR(4), "full": Full()}
NETWORKS, OPTIMIZERS, BATCHES = ("dlrm", "dcn"), ("adagrad", "amsgrad"), (128, 2048, 16384)
DISTINCT = 2  # times as many batches as a graph has take turns
CHOICES: dict[str, list[Any]] = {
    "FORWARD": [(16, 32, 64, 2, 3), (16, 32, 64, 4, 2), (16, 16, 32, 4, 3), (16, 16, 64, 4, 2), (16, 32, 32, 4, 4)],
    "INPUT": [(16, 32, 64, 2, 3), (16, 32, 64, 4, 2), (16, 16, 32, 4, 3), (16, 32, 32, 2, 3), (16, 32, 32, 4, 4)],
    "WEIGHT": [(16, 32, 32, 4, 2), (16, 16, 32, 4, 2), (16, 64, 16, 4, 2), (16, 32, 16, 4, 2), (32, 32, 16, 4, 2)],
    "OUTPUT_ROWS": [1, 4],
}


def draw(cardinalities: tuple[int, ...], rows: int) -> Batch:
    """Rows on the GPU whose ids are log-uniform, so that some are hot."""
    sizes = torch.tensor(cardinalities, device="cuda", dtype=torch.float64)
    ids = ((sizes.log() * torch.rand(rows, len(sizes), device="cuda", dtype=torch.float64)).exp() - 1).long()
    ids = ids.clamp(min=0).minimum(sizes.long() - 1).int()
    labels = (torch.rand(rows, device="cuda") < 0.25).to(torch.uint8)
    return Batch(labels, torch.randn(rows, 13, device="cuda").abs(), ids)


def build(network: str, scheme: str, cardinalities: tuple[int, ...] = CARDINALITIES) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = EmbeddingCollection(tables_of(cardinalities, SCHEMES[scheme]), device="cuda", on_invalid_id="trust")
    return models.build(network, tables, device="cuda")


def trial_of(model: nn.Module, optimizer: str, batch: int, layers: str, precision: str = "float32") -> Trial:
    """A trial whose layers are fused or plain, whatever the batch."""
    config = RunConfig(data="made up", optimizer=optimizer, batch_size=batch, precision=precision)
    limit, limits.LARGEST_BATCH = limits.LARGEST_BATCH, 2**30 if layers == "fused" else 0
    try:
        trial = Trial(config, model, list(trial_names(model)))
    finally:
        limits.LARGEST_BATCH = limit
    assert (trial.layers is not None) == (layers == "fused")
    return trial


def trial_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(model.embeddings.names)


def median_us(run: Callable[[int], None], budget: float = 0.4) -> tuple[float, float, float]:
    """Microseconds a call, median and quartiles of nine rounds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for i in range(10):
        run(i)
    torch.cuda.synchronize()
    calls = max(5, min(2000, int(budget / 9 / ((time.perf_counter() - started) / 10))))
    times = []
    for _ in range(9):
        begin.record()
        for i in range(calls):
            run(i)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    low, middle, high = statistics.quantiles(times, n=4)
    return round(middle, 2), round(low, 2), round(high, 2)


def timed(model: nn.Module, network: str, scheme: str, optimizer: str, batch: int, layers: str) -> dict[str, Any]:
    """One configuration."""
    model.embeddings.updates.collector = None  # where an earlier one failed
    trial = trial_of(model, optimizer, batch, layers)
    try:
        batches = [draw(CARDINALITIES, batch * STEPS_PER_GRAPH) for _ in range(DISTINCT)]
        began = time.perf_counter()
        graph = captured(trial, batches[0])
        torch.cuda.synchronize()
        warm = time.perf_counter() - began
        step = [round(us / STEPS_PER_GRAPH, 2) for us in median_us(lambda i: trial.step(batches[i % DISTINCT]))]
        alone = [round(us / STEPS_PER_GRAPH, 2) for us in median_us(lambda i: graph.replay())]
        return {
            "network": network,
            "scheme": scheme,
            "optimizer": optimizer,
            "batch": batch,
            "layers": layers,
            "step_us": step[0],
            "step_us_quartiles": step[1:],
            "graph_us": alone[0],
            "epoch_s": round(step[0] * 1e-6 * -(-EPOCH // batch), 2),
            "warm_up_s": round(warm, 1),
            "loss_is_finite": bool(trial.loss_sum.isfinite()),
        }
    finally:
        trial.tables.remove()
        trial._captured.clear()


def captured(trial: Trial, batches: Batch) -> torch.cuda.CUDAGraph:
    """The graph of the trial's step on so many rows, once it has run."""
    while len(batches) not in trial._captured or trial._captured[len(batches)].graph is None:
        trial.step(batches)
    return trial._captured[len(batches)].graph


def relative(mine: Tensor, truth: Tensor) -> float:
    return float((mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def check(network: str, batch: int) -> dict[str, Any]:
    """The largest error of a gradient against float64, fused and torch's; and the change of parameters in ten steps."""
    torch.manual_seed(1)
    model = _network(network)
    plain, truth = copy.deepcopy(model), copy.deepcopy(model).double()
    inputs = (torch.randn(batch, 13, device="cuda"), torch.randn(batch, 26, 16, device="cuda") / 4)
    labels = torch.randint(2, (batch,), dtype=torch.uint8, device="cuda")
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    gradients = {"fused": {"vectors": FusedStep(model)(*inputs, labels, total)}}
    gradients["fused"] |= {name: p.grad for name, p in model.named_parameters()}
    for name, each in (("torch", plain), ("float64", truth)):
        dense, vectors = (x.detach().clone().to(each.output.weight.dtype) for x in inputs)
        vectors.requires_grad_()
        loss = F.binary_cross_entropy_with_logits(each.logits(dense, vectors), labels.to(dense.dtype))
        loss.backward()
        gradients[name] = {"vectors": vectors.grad, **{n: p.grad for n, p in each.named_parameters()}}
    errors = {
        who: {n: relative(g, gradients["float64"][n]) for n, g in gradients[who].items()} for who in ("fused", "torch")
    }
    worst = {who: max(by_name.items(), key=lambda pair: pair[1]) for who, by_name in errors.items()}
    row: dict[str, Any] = {"network": network, "batch": batch, "worst": worst, "loss_error": float(total - loss)}
    for rule in ("sgd", "adagrad", "adam", "amsgrad"):
        row[rule] = steps_of(rule, network, batch)
    row["ok"] = worst["fused"][1] < 1e-4 and all(row[r]["change"] < 1e-2 for r in ("sgd", "adagrad", "adam"))
    return row


def _network(network: str) -> nn.Module:
    network_class = {"dlrm": models.DLRM, "dcn": models.DCN}[network]
    return network_class(nn.Identity(), embedding_dims=(16,) * 26, device="cuda")


def steps_of(rule: str, network: str, batch: int) -> dict[str, float]:
    """Ten steps of an optimizer, fused and torch's; twice fused, which must be the same bits."""
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, eps=1e-6),
        "adam": lambda p: torch.optim.Adam(p, eps=1e-4, capturable=True),
        "amsgrad": lambda p: torch.optim.Adam(p, eps=1e-4, amsgrad=True, capturable=True),
    }[rule]
    torch.manual_seed(2)
    start = _network(network)
    changes, losses = [], []
    for who in ("fused", "fused", "torch"):
        torch.manual_seed(3)
        model = copy.deepcopy(start)
        optimizer = make(list(model.parameters()))
        step = FusedStep(model, optimizer) if who == "fused" else None
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for _ in range(10):
            dense, vectors = torch.randn(batch, 13, device="cuda"), torch.randn(batch, 26, 16, device="cuda") / 4
            labels = (dense.sum(1) > 0).to(torch.uint8)
            if step is not None:
                step(dense, vectors, labels, total)
                continue
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model.logits(dense, vectors), labels.float())
            loss.backward()
            optimizer.step()
            total += loss.detach()
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        changes.append(torch.cat([(p - q).detach().flatten() for p, q in pairs]))
        losses.append(float(total))
    fused, again, plain = changes
    same_bits = bool(torch.equal(fused, again))
    return {"change": relative(fused, plain), "loss": abs(losses[0] - losses[2]) / 10, "same_bits_twice": same_bits}


def profiled(network: str, scheme: str, optimizer: str, layers: str) -> dict[str, Any]:
    """The kernels of a step, by time."""
    trial = trial_of(build(network, scheme), optimizer, 128, layers)
    graph = captured(trial, draw(CARDINALITIES, 128 * STEPS_PER_GRAPH))
    torch.cuda.synchronize()
    steps = 2 * STEPS_PER_GRAPH
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "launches": len(times) / steps, "us_each": round(sum(times) / len(times), 2)}
        for name, times in by_name.items()
    ]
    rows.sort(key=lambda row: -row["launches"] * row["us_each"])
    busy = round(sum(map(sum, by_name.values())) / steps, 1)
    head = {"network": network, "scheme": scheme, "optimizer": optimizer, "layers": layers, "batch": 128}
    return {**head, "launches": len(events) / steps, "busy_us": busy, "kernels": rows}


def setting(name: str) -> Any:
    value = getattr(kernels, name)
    return list(astuple(value)) if isinstance(value, kernels.Tile) else value


def choose(name: str, value: Any) -> None:
    setattr(kernels, name, kernels.Tile(*value) if isinstance(value, list | tuple) else value)


def warm(jobs: list[list[str]]) -> None:
    """Compile in processes of their own, side by side, into Triton's cache."""
    running: list[subprocess.Popen[bytes]] = []
    for job in jobs:
        running.append(subprocess.Popen([sys.executable, __file__, "--warm", *job], stderr=subprocess.DEVNULL))
    for process in running:
        process.wait()


def warm_one(network: str, optimizer: str, name: str = "", value: str = "") -> None:
    """One step of small tables with a setting, or of a check."""
    if name:
        choose(name, json.loads(value))
    if optimizer == "none":
        inputs = (torch.randn(128, 13, device="cuda"), torch.randn(128, 26, 16, device="cuda"))
        labels = torch.zeros(128, dtype=torch.uint8, device="cuda")
        FusedStep(_network(network))(*inputs, labels, torch.zeros((), dtype=torch.float64, device="cuda"))
        return
    if optimizer not in OPTIMIZERS:
        steps_of(optimizer, network, 128)
        return
    cardinalities = (50,) * 26
    trial = trial_of(build(network, "QR(4)", cardinalities), optimizer, 128, "fused")
    trial._step(draw(cardinalities, 128))
    torch.cuda.synchronize()


def tune() -> list[dict[str, Any]]:
    """Vary one setting at a time of DLRM's and DCN's steps at batch 128; keep each that makes their sum smaller."""
    warm([["dlrm", "adagrad", name, json.dumps(value)] for name, values in CHOICES.items() for value in values])
    model, rows = {network: build(network, "QR(4)") for network in NETWORKS}, []

    def measure() -> dict[str, float]:
        return {n: timed(model[n], n, "QR(4)", "adagrad", 128, "fused")["graph_us"] for n in NETWORKS}

    best = measure()
    rows.append({"setting": "as shipped", **best})
    for name, values in CHOICES.items():
        for value in values:
            previous = setting(name)
            row: dict[str, Any] = {"setting": name, "value": value}
            try:
                choose(name, value)
                row |= measure()
            except Exception:
                row["error"] = traceback.format_exc()[-600:]
            if "error" not in row and sum(row[n] for n in NETWORKS) < 0.99 * sum(best.values()):
                best, row["kept"] = {n: row[n] for n in NETWORKS}, True
            else:
                choose(name, previous)
            rows.append(row)
            print(json.dumps(row), flush=True)
    rows.append({"setting": "best", "values": {name: setting(name) for name in CHOICES}, **best})
    return rows


def facts() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "cuda": torch.version.cuda,
        "commit": os.environ.get("COMMIT") or commit() or "unknown",
        "config": {"dim": 16, "epoch_rows": EPOCH, "settings": {name: setting(name) for name in CHOICES}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--parts", default="check,time,profile", help="what to do")
    parser.add_argument("--tune", action="store_true", help="vary the tiles first, and go on with the best")
    parser.add_argument("--seconds", type=float, default=280, help="begin nothing new after that")
    parser.add_argument("--warm", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm:
        warm_one(*arguments.warm)
        return
    if arguments.out is None:
        parser.error("--out must be given")
    began, parts = time.perf_counter(), arguments.parts.split(",")
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = facts() | {"check": [], "tune": [], "time": [], "profile": [], "failed": []}

    def attempt(part: str, what: tuple[Any, ...], run: Callable[[], Any]) -> None:
        if time.perf_counter() - began > arguments.seconds:
            result["failed"].append({"part": part, "what": what, "error": "no time left"})
            return
        try:
            rows = run()
            result[part] += rows if isinstance(rows, list) else [rows]
            print(part, json.dumps(rows)[:400], f"{time.perf_counter() - began:.0f} s", flush=True)
        except Exception:
            result["failed"].append({"part": part, "what": what, "error": traceback.format_exc()[-1500:]})
            print(part, "FAILED", what, traceback.format_exc()[-600:], flush=True)
        result["seconds"] = round(time.perf_counter() - began, 1)
        (arguments.out / "train_gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    rules = (*OPTIMIZERS, "sgd", "adam", "none") if "check" in parts else OPTIMIZERS
    warm([[network, rule] for network in NETWORKS for rule in rules])
    result["compile_s"] = round(time.perf_counter() - began, 1)
    if "check" in parts:
        for network in NETWORKS:
            for batch in (128, 77):
                attempt("check", (network, batch), lambda n=network, b=batch: check(n, b))
    if arguments.tune:
        attempt("tune", (), tune)
    if "time" in parts:
        # The most wanted first: DLRM, QR(4), Adagrad, 128.
        for network in NETWORKS:
            for scheme in SCHEMES:
                model = build(network, scheme)
                for batch in BATCHES:
                    for optimizer in OPTIMIZERS:
                        for layers in ("fused", "plain"):
                            what = (network, scheme, optimizer, batch, layers)
                            attempt("time", what, lambda m=model, w=what: timed(m, *w))
                        torch.cuda.empty_cache()
                del model
    if "profile" in parts:
        for what in (
            ("dlrm", "QR(4)", "adagrad", "fused"),
            ("dlrm", "QR(4)", "adagrad", "plain"),
            ("dcn", "QR(4)", "adagrad", "fused"),
            ("dlrm", "QR(4)", "amsgrad", "fused"),
        ):
            attempt("profile", what, lambda w=what: profiled(*w))
    result["settings_at_the_end"] = {name: setting(name) for name in CHOICES}
    (arguments.out / "train_gpu.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

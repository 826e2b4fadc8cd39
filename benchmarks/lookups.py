"""Lookups and steps: hot and cold ids over a pool beside QR(4), narrow rows, state in few bits, and rows in few bits.

    python benchmarks/lookups.py --out benchmarks/results/lookups_cpu.json
    python benchmarks/lookups.py --device cuda --out benchmarks/results/lookups_h200.json [--commit SHA]

On one CPU thread, in processor time; or on a GPU in CUDA graphs of four batches, by events. The 26 Criteo Kaggle
features at D = 16, on a GPU at 64 too, Zipf ids; ``small`` tables have a hundredth of the ids, so that they fit in the
cache. Four parts, each measured in turns, so that all its providers see the same disturbances:

    pool     QR(4) and HotCold tables of as many rows, an eighth of each table's ids hot, one pool: lookup and step of
             Adagrad, with ids by frequency and with lists of hot ids
    narrow   the same HotCold tables beside ones of the same bytes with rows of D/2 and D/4 numbers: lookup and step
    state    QR(4): step of Adagrad with sums of squares in float32, bfloat16 and log8
    bits     QR(4) in float32, 8 and 4 bits: lookup
"""

import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, get_args

import result_file
import torch
from torch import Tensor, nn

from quorem import QR, EmbeddingCollection, Full, HotCold, Pool, Table, optim, quantize_
from quorem.data.shape import CARDINALITIES
from quorem.experiments.bench import grid, measure, run
from quorem.optimizer_names import StateDtype

HOT, SMALL, BATCHES = 8, 100, 4  # one id in HOT is hot; tables of up to SMALL ids stay full
Call = Callable[[int], Any]  # with the number of a batch


def collection(
    cardinalities: tuple[int, ...], kind: str, device: str, dim: int, width: int | None = None
) -> EmbeddingCollection:
    """Tables of one kind: ``qr``, ``pool`` (ids by frequency) or ``lists`` (hot ids by a list).

    With rows of ``width`` numbers there are as many more of them.
    """
    wider = 1 if width is None else dim // width
    rows = sum(rows for n in cardinalities for rows, _ in QR(4).spec(n, dim).shapes)
    pool = Pool((rows - sum(n // HOT if n > SMALL else n for n in cardinalities)) * wider)
    tables = []
    for t, n in enumerate(cardinalities):
        num_hot = min(n // HOT * wider, n - n // HOT)
        hot_cold = HotCold(num_hot, cold=pool, width=width) if n > SMALL else Full()
        counts = torch.arange(n, 0, -1) if kind == "lists" and n > SMALL else None
        tables.append(Table(f"C{t}", n, dim, QR(4) if kind == "qr" else hot_cold, frequencies=counts))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables that stay full
        return EmbeddingCollection(tables, device=device)


def lookup(module: nn.Module, ids: list[Tensor]) -> Call:
    """A lookup of a batch."""
    return torch.no_grad()(lambda b: module(ids[b]))


def step(module: EmbeddingCollection, ids: list[Tensor]) -> Call:
    """A lookup, backward and update, where an optimizer is applied in the backward pass."""
    vectors = module(ids[0])
    grad = torch.randn(vectors.shape, dtype=vectors.dtype, device=vectors.device) / len(ids[0])
    return lambda b: module(ids[b]).backward(grad)


def in_graph(call: Call) -> Call:
    """Seconds of a batch, in a CUDA graph of all batches."""
    replay = measure.captured([partial(call, b) for b in range(BATCHES)])

    def timed(_: int, inputs: Call = call) -> float:  # a graph does not keep what it reads alive
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / BATCHES

    return timed


def on_processor(call: Call) -> Call:
    """Seconds of a batch on the processor."""

    def timed(b: int) -> float:
        start = time.process_time()
        call(b)
        return time.process_time() - start

    return timed


def in_turns(calls: dict[str, Call], seconds: float, least: int) -> dict[str, list[float]]:
    """Seconds of each call, a turn each, at least ``least`` of them and for about ``seconds`` in all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end = time.perf_counter() + seconds
    turn = 0
    order, draw = list(calls), random.Random(0)
    while turn < least or time.perf_counter() < end:
        draw.shuffle(order)  # none always follows the one that leaves least in the cache
        for name in order:
            times[name].append(calls[name](turn % BATCHES))
        turn += 1
    return times


def rows_of(part: str, setting: dict[str, Any], times: dict[str, list[float]], base: str) -> list[dict[str, Any]]:
    """A row for each provider, with the ratio of its median to that of ``base``."""
    rows = []
    for name, seconds in times.items():
        median, ratio = statistics.median(seconds), statistics.median(seconds) / statistics.median(times[base])
        about = {"p50_us": round(median * 1e6, 1), "calls": len(seconds), f"ratio_to_{base}": round(ratio, 3)}
        rows.append({"part": part, **setting, "provider": name, **about})
        print(*rows[-1].values(), flush=True)
    return rows


def measured(part: str, size: str, dim: int, device: str) -> list[dict[str, Any]]:
    """The rows of one part."""
    timed, seconds = (in_graph, 0.5) if device == "cuda" else (on_processor, 2.0)
    cardinalities = tuple(max(n // 100, 2) for n in CARDINALITIES) if size == "small" else CARDINALITIES
    rows = []
    if part == "pool":
        modules: dict[str, Any] = {k: collection(cardinalities, k, device, dim) for k in ("qr", "pool", "lists")}
        for module in modules.values():
            optim.apply_in_backward(module, optim.Adagrad, lr=0.01)
    elif part == "narrow":
        modules = {
            f"rows of {width or dim}": collection(cardinalities, "pool", device, dim, width)
            for width in (None, dim // 2, dim // 4)
        }
        for module in modules.values():
            optim.apply_in_backward(module, optim.Adagrad, lr=0.01)
    elif part == "state":
        modules = {dtype: collection(cardinalities, "qr", device, dim) for dtype in get_args(StateDtype)}
        for dtype, module in modules.items():
            optim.apply_in_backward(module, optim.Adagrad, lr=0.01, state_dtype=dtype)
    else:
        modules = {"float32": collection(cardinalities, "qr", device, dim)}
        modules |= {f"{bits} bits": quantize_(collection(cardinalities, "qr", device, dim), bits) for bits in (8, 4)}
    base, modes = next(iter(modules)), {"lookup": lookup, "step": step}
    if part in ("bits", "state"):
        del modes["step" if part == "bits" else "lookup"]
    for batch in (2048, 65536):
        ids = [grid.draw_ids("zipf", cardinalities, batch, seed=seed).to(device) for seed in range(BATCHES)]
        for mode, make in modes.items():
            calls = {name: timed(make(module, ids)) for name, module in modules.items()}
            setting = {"tables": size, "dim": dim, "batch": batch, "mode": mode}
            rows += rows_of(part, setting, in_turns(calls, seconds, 5), base)
    return rows


def main() -> None:
    parser = result_file.parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python benchmarks/lookups.py --device {options.device}"
    results: dict[str, Any] = {"facts": run.facts_of_run(torch.device(options.device), command, options.commit)}
    results["rows"] = []
    cells = [(16, "small"), (16, "full")] + [(64, "small")] * (options.device == "cuda")
    for (dim, size), part in product(cells, ("bits", "pool", "narrow", "state")):
        results["rows"] += measured(part, size, dim, options.device)
        result_file.write(options.out, results)


if __name__ == "__main__":
    main()

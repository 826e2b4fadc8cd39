"""Measure the times of calls in turns; the bytes that an op must move, and the time of a copy of so many bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from ...ops import layout
from ...ops.rows import lookup_reads
from ...paper.schemes import TableSpec


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of one sample, seconds of all samples of a call, and limits of their number."""

    sample: float = 2e-3
    total: float = 1.0
    least: int = 5
    most: int = 100


# On a GPU a sample is so long that most of its runs find the host's code in the caches, as in a training loop.
EFFORTS = {"cpu": Effort(), "cuda": Effort(2e-2, 0.4, most=50), "quick": Effort(2e-4, 1e-3, 3, 3)}


@dataclass
class Call:
    """A function to time, and its samples."""

    name: str  # of its provider
    run: Callable[[], Any]
    count: int = 1  # operations that one run performs
    graph: bool = False  # whether it replays a CUDA graph
    seconds: list[float] = field(default_factory=list)  # of one operation, for each sample

    def quantiles(self) -> tuple[float, float, float]:
        """The 20%, 50% and 80% quantiles of the samples, in microseconds."""
        low, middle, high = np.quantile(np.array(self.seconds) * 1e6, [0.2, 0.5, 0.8])
        return float(low), float(middle), float(high)


def time_in_turns(calls: Sequence[Call], effort: Effort, round_of: int = 4) -> None:
    """Time each call many times, one sample of each call in turn; the calls must have run before."""
    threads, plans = torch.get_num_threads(), []
    for call in calls:
        timer = Timer("run()", globals={"run": call.run}, num_threads=threads)
        seconds = timer.timeit(round_of).mean
        runs = max(1, round(effort.sample / seconds))
        runs = -(-runs // round_of) * round_of if runs > 1 else 1
        samples = int(min(max(effort.total / (runs * seconds), effort.least), effort.most))
        plans.append((call, timer, runs, samples))
    for turn in range(max((samples for *_, samples in plans), default=0)):
        for call, timer, runs, samples in plans:
            if turn < samples:
                call.seconds.append(timer.timeit(runs).mean / call.count)


def captured(runs: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A CUDA graph of all ``runs``, one after another; they are first run on a separate stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for run in runs:
                run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def copy_bandwidth(device: torch.device, effort: Effort, size: int | None = None) -> float:
    """Bytes per second of a large copy; bytes that are read and bytes that are written both count."""
    size = size or (2**30 if device.type == "cuda" else 2**28)
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    call = Call("copy", lambda: target.copy_(source))
    call.run()
    time_in_turns([call], effort)
    return 2 * size / (call.quantiles()[1] / 1e6)


def bytes_to_move(specs: Sequence[TableSpec], batches: Sequence[Tensor], mode: str) -> int:
    """The fewest bytes that one operation must move, in float32, as a mean over ``batches``.

    Forward: read ids and each distinct row, write vectors. A step adds a second pass: read ids, rows and gradients, and
    read and write each distinct row and its Adagrad state. The networks of path-based tables are read as a whole.
    """
    storage = layout.build(specs, [None] * len(specs))
    integers = layout.Layout(*(tensor.to(batches[0].device) for tensor in storage.layout))
    networks = sum(spec.num_parameters - sum(rows * width for rows, width in spec.shapes) for spec in specs)
    total = 0
    for ids in batches:
        reads = lookup_reads(ids, integers)
        distinct = len(reads.rows[reads.used.expand_as(reads.rows)].unique()) * storage.width * 4
        inputs = ids.numel() * ids.element_size() + distinct + networks * 4
        vectors = len(ids) * len(integers.slots) * storage.width * 4
        total += inputs + vectors
        if mode == "step":
            total += inputs + vectors + 3 * (distinct + networks * 4)
    return total // len(batches)

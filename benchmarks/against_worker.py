"""The worker of ``against.py``: lookups and training steps of one source tree, by its public names only.

It reads one question a line, as JSON, and answers each in a line. Its argument is the core to run on, if it is given:
then the backward pass runs on the thread that calls it.
"""

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import quorem
from quorem.data.shape import scaled_cardinalities

ROTATION = 4  # batches of ids that a measurement goes round
STEPS = 3  # taken before the first sample, on each batch


def draw_ids(cardinalities: Sequence[int], batch: int, seed: int) -> Any:
    """Log-uniform ids, as ``quorem bench --ids zipf`` draws them; written again so that both trees get the same."""
    n = torch.tensor(cardinalities, dtype=torch.float64)
    u = torch.rand(batch, len(n), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.minimum(((n + 1) ** u - 1).long(), n.long() - 1)


class Cell:
    """What a worker measures: one module and one operation on a few batches."""

    def __init__(self, mode: str, scheme: str, dim: int, batch: int, scale: float, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        cardinalities = scaled_cardinalities(scale)
        names = {name: getattr(quorem, name) for name in ("QR", "GeneralizedQR", "ChineseRemainder", "Path", "Full")}
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tables that stay full
            tables = [quorem.Table(f"C{i}", n, dim, eval(scheme, names)) for i, n in enumerate(cardinalities)]
            self.module = quorem.EmbeddingCollection(tables, device=device)
        self.ids = [draw_ids(cardinalities, batch, seed).to(device) for seed in range(ROTATION)]
        self.runs: list[Callable[[], Any]] = [self._operation(mode, ids) for ids in self.ids]
        for _ in range(STEPS):
            for run in self.runs:
                run()
        self.replay = self._captured() if self.device.type == "cuda" else None

    def _operation(self, mode: str, ids: Any) -> Callable[[], Any]:
        if mode == "forward":
            return torch.no_grad()(lambda: self.module(ids))
        if not hasattr(self, "rest"):
            rule = quorem.optim.AMSGrad if mode == "step_amsgrad" else quorem.optim.Adagrad
            quorem.optim.apply_in_backward(self.module, rule, lr=0.01)
            networks = [p for group in self.module.paths for p in group.parameters()]
            self.rest = [rule(networks, lr=0.01)] if networks else []
        with torch.no_grad():
            shape = self.module(ids[:1]).shape[1:]
        draw = torch.Generator().manual_seed(len(ids))
        grad = (torch.randn(len(ids), *shape, generator=draw) / len(ids)).to(self.device)

        def step() -> None:
            self.module(ids).backward(grad)
            for optimizer in self.rest:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    def _captured(self) -> Callable[[], Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for run in self.runs * 2:
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in self.runs:
                run()
        return graph.replay

    def digest(self) -> str:
        """Of the vectors that the module gives."""
        with torch.no_grad():
            vectors = self.module(self.ids[0]).float().cpu().contiguous()
        return hashlib.sha256(vectors.numpy().tobytes()).hexdigest()

    def time(self, graph: bool, runs: int) -> tuple[float, float]:
        """Microseconds of one operation, over ``runs`` rounds of the batches; and those on cores."""

        def once() -> None:
            if graph and self.replay is not None:
                self.replay()
            else:
                for run in self.runs:
                    run()

        once()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began, began_on_cores = time.perf_counter(), time.process_time()
        for _ in range(runs):
            once()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, on_cores = time.perf_counter() - began, time.process_time() - began_on_cores
        return seconds / (runs * ROTATION) * 1e6, on_cores / (runs * ROTATION) * 1e6


def work(core: int | None) -> None:
    """Answer the parent's questions until it closes the pipe."""
    if core is not None:
        os.sched_setaffinity(0, {core})
        torch.autograd.set_multithreading_enabled(False)
    cell: Cell | None = None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to stderr
    for line in sys.stdin:
        question = json.loads(line)
        do = question.pop("do")
        if do == "about":
            name = torch.cuda.get_device_name() if question["device"] == "cuda" else "cpu"
            answer = {"torch": torch.__version__, "device": name}
        elif do == "prepare":
            cell = None  # before the next one is built
            cell = Cell(**question)
            answer = {"graphs": [False, True] if cell.replay else [False], "digest": cell.digest()}
        else:
            assert cell is not None
            if do == "runs":
                us, _ = cell.time(question["graph"], 1)
                answer = {"runs": max(1, round(question["seconds"] * 1e6 / (us * ROTATION)))}
            else:
                us, on_cores = cell.time(question["graph"], question["runs"])
                answer = {"us": us, "us_on_cores": on_cores}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    work(int(sys.argv[1]) if len(sys.argv) > 1 else None)

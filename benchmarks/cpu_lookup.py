"""Lookup and training step on a CPU: fused kernels, plain PyTorch, a loop over tables, and FBGEMM where installed.

All providers hold the same tables and see the same ids, and take turns, so that a noisy machine is noisy for all.
The work is the 26 Criteo Kaggle features at 4 collisions, multiplied, with log-uniform ids. Before anything is timed,
every provider's output and updated tables are compared with the loop's.

    python benchmarks/cpu_lookup.py --batches 1 128 2048 16384 --dim 16 --out benchmarks/results/cpu_lookup.csv
"""

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quorem import QR, EmbeddingCollection, Table
from quorem.data.shape import CARDINALITIES
from quorem.ops import cpu
from quorem.optim import Adagrad, apply_in_backward

LR, EPS = 0.01, 1e-10
TURN = 5  # calls of a provider before the next one's tables take over the caches
FIELDS = ("op", "provider", "batch", "dim", "q20", "median", "q80", "times_loop", "floor_mb", "threads")
FIELDS += ("clock", "device", "torch", "numba", "fbgemm", "commit", "date")


def criteo_tables(dim: int, collisions: int = 4) -> list[Table]:
    """The 26 tables of Criteo Kaggle, stored by quotient and remainder."""
    return [Table(f"C{f + 1}", n, dim, QR(collisions)) for f, n in enumerate(CARDINALITIES)]


def log_uniform_ids(size: int, cardinalities: tuple[int, ...], seed: int = 0) -> Tensor:
    """Ids ``[size, F]`` whose logarithm is uniform: low ids are frequent."""
    draw = torch.Generator().manual_seed(seed)
    n = torch.tensor(cardinalities)
    u = torch.rand(size, len(n), generator=draw, dtype=torch.float64)
    return (n.double() ** u).long().sub(1).clamp(max=n - 1)


class Loop(nn.Module):
    """One pair of ``nn.EmbeddingBag`` a feature, looked up one after the other."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.strides = [spec.partitions[0].size for spec in tables.specs]
        self.parts = nn.ModuleList(
            nn.ModuleList(nn.EmbeddingBag.from_pretrained(t.detach().clone(), freeze=False, mode="sum", sparse=True)
                          for t in tables.tables(f))
            for f in range(len(tables.specs))
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(ids))
        out = []
        for f, (m, pair) in enumerate(zip(self.strides, self.parts, strict=True)):
            i = ids[:, f]
            if len(pair) == 1:
                out.append(pair[0](i, offsets))
            else:
                out.append(pair[0](i % m, offsets) * pair[1](i // m, offsets))
        return torch.stack(out, 1)

    def tables(self) -> list[Tensor]:
        return [table.weight for pair in self.parts for table in pair]


class Fbgemm(nn.Module):
    """All remainder and quotient tables in one ``SplitTableBatchedEmbeddingBagsCodegen``, then the product."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        parts = [spec.partitions for spec in tables.specs]
        composed = [f for f, p in enumerate(parts) if len(p) > 1]
        self.order = torch.tensor(composed + [f for f, p in enumerate(parts) if len(p) == 1])
        self.back = self.order.argsort()
        self.composed, self.dim = len(composed), tables.embedding_dims[0]
        self.m = torch.tensor([parts[f][0].size for f in self.order.tolist()])[:, None]
        stored = [tables.tables(f)[0] for f in self.order.tolist()] + [tables.tables(f)[1] for f in composed]
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(len(t), self.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in stored],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
        )
        for own, t in zip(self.tbe.split_embedding_weights(), stored, strict=True):
            own.copy_(t.detach())

    def forward(self, ids: Tensor) -> Tensor:
        i = ids.T[self.order]
        rows = torch.cat([i % self.m, i[: self.composed] // self.m[: self.composed]])
        out = self.tbe(rows.flatten(), torch.arange(rows.numel() + 1)).view(len(ids), -1, self.dim)
        first, second = out.split([len(self.order), self.composed], 1)
        product = first[:, : self.composed] * second
        return torch.cat([product, first[:, self.composed :]], 1)[:, self.back]


class Reference(nn.Module):
    """The same tables by plain PyTorch: what runs where Numba is missing."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.collection = tables

    def forward(self, ids: Tensor) -> Tensor:
        kernels = dict(cpu.kernels())
        cpu.kernels().clear()
        try:
            return self.collection(ids)
        finally:
            cpu.kernels().update(kernels)


def available(name: str) -> bool:
    """Whether a provider can run here."""
    if name != "fbgemm":
        return True
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        return False
    return True


def forwards(dim: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The lookup of each provider, all on the same tables."""
    fused = EmbeddingCollection(criteo_tables(dim))
    out = {"loop": Loop(fused), "reference": Reference(fused), "fused": fused}
    if available("fbgemm"):
        out["fbgemm"] = Fbgemm(fused)
    return {name: torch.no_grad()(module) for name, module in out.items()}


def steps(dim: int) -> dict[str, Callable[[Tensor, Tensor], list[Tensor]]]:
    """A training step of each provider, forward, backward and Adagrad, from the same tables; gives some of them."""
    fused = EmbeddingCollection(criteo_tables(dim))
    loop = Loop(fused)
    optimizer = torch.optim.Adagrad(loop.parameters(), lr=LR, eps=EPS)

    def loop_step(ids: Tensor, grad: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        loop(ids).backward(grad)
        optimizer.step()
        return [loop.tables()[f] for f in (0, 1, 4)]

    providers = {"loop": loop_step}
    if available("fbgemm"):
        fbgemm = Fbgemm(fused)

        def fbgemm_step(ids: Tensor, grad: Tensor) -> list[Tensor]:
            fbgemm(ids).backward(grad)
            weights = fbgemm.tbe.split_embedding_weights()
            back = fbgemm.back.tolist()
            return [weights[back[0]], weights[len(back)], weights[back[2]]]

        providers["fbgemm"] = fbgemm_step
    apply_in_backward(fused, Adagrad, lr=LR, eps=EPS)

    def fused_step(ids: Tensor, grad: Tensor) -> list[Tensor]:
        fused(ids).backward(grad)
        return [fused.tables(0)[0], fused.tables(0)[1], fused.tables(2)[0]]

    providers["fused"] = fused_step
    return providers


def interleave(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 5,
) -> dict[str, list[float]]:
    """Microseconds of each call, taken in turns of ``TURN`` calls until ``seconds`` have passed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, call in calls.items():
            for _ in range(TURN):
                start = clock()
                call()
                times[name].append((clock() - start) * 1e6)
    return times


def floor_bytes(ids: Tensor, dim: int, train: bool) -> int:
    """Bytes that no implementation can avoid (docs/kernels.md), float32 and int64."""
    specs = [t.scheme.spec(t.num_embeddings, dim) for t in criteo_tables(dim)]
    rows = sum(len(p(ids[:, f]).unique()) for f, spec in enumerate(specs) for p in spec.partitions)
    forward = 8 * ids.numel() + 4 * dim * (rows + ids.numel())
    return forward + (forward + 12 * dim * rows if train else 0)


def same(name: str, found: list[Tensor], expected: list[Tensor]) -> None:
    """Raise AssertionError where a provider differs."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def measure(
    op: str, dim: int, batches: list[int], seconds: float, clock: Callable[[], float]
) -> list[dict[str, object]]:
    """One row per provider and batch size."""
    providers = forwards(dim) if op == "forward" else steps(dim)
    rows = []
    for size in batches:
        ids = log_uniform_ids(size, CARDINALITIES)
        grad = torch.randn(size, len(CARDINALITIES), dim, generator=torch.Generator().manual_seed(1))
        args = (ids,) if op == "forward" else (ids, grad)
        results = {name: call(*args) for name, call in providers.items()}
        as_list = {name: list(r) if isinstance(r, list) else [r] for name, r in results.items()}
        for name, found in as_list.items():
            same(name, found, as_list["loop"])
        del results, as_list
        times = interleave({name: partial(call, *args) for name, call in providers.items()}, seconds, clock)
        loop = statistics.median(times["loop"])
        for name, taken in times.items():
            low, *_, high = statistics.quantiles(taken, n=5)
            rows.append({
                "op": op, "provider": name, "batch": size, "dim": dim, "q20": round(low, 1),
                "median": round(statistics.median(taken), 1), "q80": round(high, 1),
                "times_loop": round(loop / statistics.median(taken), 2),
                "floor_mb": round(floor_bytes(ids, dim, op != "forward") / 1e6, 3),
            })  # fmt: skip
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def environment() -> dict[str, object]:
    """Where and on what the rows were measured."""
    from importlib.metadata import PackageNotFoundError, version

    def found(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "threads": torch.get_num_threads(), "device": f"{platform.machine()} CPU", "torch": torch.__version__,
        "numba": found("numba"), "fbgemm": found("fbgemm-gpu-cpu"), "commit": commit,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 128, 2048, 16384])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ops", nargs="+", choices=("forward", "step"), default=["forward", "step"])
    parser.add_argument("--seconds", type=float, default=10, help="per operation and batch size")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*tables stay full")
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    rows = [row for op in options.ops for row in measure(op, options.dim, options.batches, options.seconds, clock)]
    if options.out:
        fresh = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerows(row | environment() | {"clock": options.clock} for row in rows)


if __name__ == "__main__":
    main()

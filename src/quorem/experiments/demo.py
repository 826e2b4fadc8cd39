"""The library at work on one large table: each scheme's size, distinct vectors and lookup time; then a task learned."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..embeddings import Embedding
from ..schemes import QR, ChineseRemainder, Full, GeneralizedQR, Hash, Path, Scheme

SAMPLE = 100_000  # ids whose vectors are compared
LOOKUP, REPEATS = 65_536, 15  # ids of a timed lookup, and how often it is repeated
LEARNED_IDS, STEPS, BATCH = 100_000, 400, 4096

SCHEMES: dict[str, Scheme] = {
    "Full()": Full(),
    "Hash(4)": Hash(4),
    "QR(4)": QR(4),
    "QR(60)": QR(60),
    "GeneralizedQR(3)": GeneralizedQR(3),
    "ChineseRemainder(3)": ChineseRemainder(3),
    "Path(4, (64,))": Path(4, (64,)),
}
LEARNERS: dict[str, Scheme] = {
    "Full()": Full(),
    "Hash(16)": Hash(16),
    "QR(16, operation='add')": QR(16, operation="add"),
    "QR(16, operation='mult')": QR(16, operation="mult"),
}


@dataclass(frozen=True)
class Measured:
    """What one scheme stores for the table, the different vectors among sampled ids, and the time of a lookup."""

    name: str
    rows: tuple[int, ...]
    parameters: int
    compression: float
    sampled: int
    distinct: int
    seconds: float


@dataclass(frozen=True)
class Learned:
    """How well one scheme's vectors learned the task: the share of the targets' variance that is left."""

    name: str
    parameters: int
    error: float


def measure(n: int, d: int, seed: int) -> Iterator[Measured]:
    """Build the table ``[n, d]`` by each scheme in turn; count the vectors of sampled ids, and time a lookup."""
    draw = torch.Generator().manual_seed(seed)
    sample = torch.randperm(n, generator=draw)[:SAMPLE]
    batch = torch.randint(n, (LOOKUP,), generator=draw)
    torch.manual_seed(seed)
    for name, scheme in SCHEMES.items():
        table = Embedding(n, d, scheme).requires_grad_(False)
        distinct = len(torch.unique(table(sample), dim=0))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            table(batch)
            times.append(time.perf_counter() - began)
        rows = tuple(r for r, _ in table.specs[0].shapes)
        yield Measured(name, rows, table.num_parameters, table.compression, len(sample), distinct, min(times))


def learn(n: int, d: int, seed: int) -> Iterator[Learned]:
    """Learn a random target vector for each of ``n`` ids from a stream of ids, by each scheme in turn.

    Id i has frequency proportional to 1 / (i + 1): low ids are frequent, as where ids are given in order of first
    appearance. The error weighs ids by frequency.
    """
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(n, d, generator=draw)
    frequency = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    frequency /= frequency.sum()
    uniform = torch.rand(STEPS, BATCH, generator=draw, dtype=torch.float64)
    stream = torch.searchsorted(frequency.cumsum(0), uniform).clamp(max=n - 1)
    for name, scheme in LEARNERS.items():
        torch.manual_seed(seed)
        table = Embedding(n, d, scheme)
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.3)
        for ids in stream:
            optimizer.zero_grad()
            _squared(table(ids) - target[ids]).mean().backward()
            optimizer.step()
        with torch.no_grad():
            left, whole = (frequency @ _squared(x).double() for x in (table.to_dense() - target, target))
        yield Learned(name, table.num_parameters, float(left / whole))


def show(n: int, d: int, seed: int, console: Console) -> None:
    """Run both parts on one core, with a progress bar, and print what they found."""
    threads, learned_ids = torch.get_num_threads(), min(n, LEARNED_IDS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    torch.set_num_threads(1)  # a lookup is too short to share, least of all with other processes
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            measured = list(progress.track(measure(n, d, seed), len(SCHEMES), description="a table by each scheme"))
            learned = list(progress.track(learn(learned_ids, d, seed), len(LEARNERS), description="a task learned"))
    finally:
        torch.set_num_threads(threads)
    full = measured[0].seconds
    _print(
        console,
        f"One table of {n:,} ids x {d}, stored by each scheme",
        ("scheme", "stored rows", "params", "MB", "smaller", "distinct", "time"),
        [
            (
                m.name,
                " + ".join(f"{r:,}" for r in m.rows),
                _count(m.parameters),
                f"{m.parameters * 4 / 1e6:.4g}" if m.parameters >= 1e6 else f"{m.parameters * 4 / 1e6:.2f}",
                f"{m.compression:,.0f}x",
                f"{m.distinct:,}",
                f"{m.seconds / full:.1f}x",
            )
            for m in measured
        ],
        f"distinct: different vectors among {measured[0].sampled:,} ids. time: a lookup of {LOOKUP:,} uniform ids on"
        f" one core, best of {REPEATS}, relative to the full table's {full * 1e3:.1f} ms.",
    )
    _print(
        console,
        f"A random vector for each of {learned_ids:,} ids, learned from {STEPS * BATCH:,} draws",
        ("scheme", "params", "error left"),
        [(entry.name, _count(entry.parameters), f"{entry.error:.1%}") for entry in learned],
        "Low ids are frequent (1 / rank); the error weighs ids by frequency, and less is better.",
    )


def _print(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], note: str) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("scheme", "stored rows") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    console.print(table)
    console.print(note, highlight=False)


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:,.2f}M" if parameters >= 1e6 else f"{parameters:,}"


def _squared(x: Tensor) -> Tensor:
    """Squared length of each vector."""
    return x.square().sum(-1)

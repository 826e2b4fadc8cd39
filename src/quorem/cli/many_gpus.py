"""What tables cost on many GPUs, for ``quorem plan --world-size``."""

import textwrap
from collections.abc import Mapping, Sequence
from math import ceil

from ..integrations.scale import estimate
from ..modules.collection import Table
from ..optimizer_names import Optimizer
from ..planner.budget import show_bytes


def describe(named: Mapping[str, Sequence[Table]], world_size: int, *, batch_size: int, optimizer: Optimizer) -> str:
    """Memory, sent bytes and step time of one GPU, a line for each way to store the tables; and what to replicate.

    Args:
        named: the tables, by a name for each way to store them.
        world_size: number of GPUs.
        batch_size: batch size of each GPU.
        optimizer: the optimizer, whose state is in memory beside the rows.

    >>> tables = [Table("user", 1_000_000, 16), Table("day", 7, 16)]
    >>> print(describe({"full": tables}, 8, batch_size=4096, optimizer="adagrad"))
    On 8 GPUs with 4,096 samples each and adagrad, of one GPU in a step:
    tables  memory  all-to-all  gradients summed  replicated  step, estimated
    full    16 MB   487.4 kB    784 B             1 of 2      0.00333 ms
    A table is worth replicating with up to 2,048 rows, half as many as a GPU has samples: its gradients are then
    summed, and no vectors are exchanged.
    full: all of them from 2,000,000 samples a GPU on (1,000,000 rows)
    """
    rows = [("tables", "memory", "all-to-all", "gradients summed", "replicated", "step, estimated")]
    hints = []
    for name, tables in named.items():
        cost = estimate(tables, world_size, batch_size=batch_size, optimizer=optimizer)
        sharded = [traffic for traffic in cost.tables if not traffic.replicated]
        memory, exchanged, summed = (
            show_bytes(round(size)) for size in (cost.memory, cost.id_bytes + cost.vector_bytes, cost.reduce_bytes)
        )
        replicated = f"{len(cost.tables) - len(sharded)} of {len(cost.tables)}"
        memory += "" if cost.fits else ", does not fit"
        rows.append((name, memory, exchanged, summed, replicated, f"{cost.seconds * 1e3:.3g} ms"))
        if sharded:
            last = max(sharded, key=lambda traffic: traffic.table.num_rows / traffic.vectors)
            needed = ceil(2 * last.table.num_rows / last.vectors)
            hints.append(f"{name}: all of them from {needed:,} samples a GPU on ({last.table.num_rows:,} rows)")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    text = (
        f"A table is worth replicating with up to {batch_size // 2:,} rows, half as many as a GPU has samples: its"
        " gradients are then summed, and no vectors are exchanged."
    )
    about = f"On {world_size} GPUs with {batch_size:,} samples each and {optimizer}, of one GPU in a step:"
    return "\n".join([about, *lines, *textwrap.wrap(text, 110), *hints])

"""What tables cost on many GPUs, for ``quorem plan --world-size``."""

from collections.abc import Mapping, Sequence

from ..integrations.scale import estimate
from ..modules.collection import Table
from ..optimizer_names import Optimizer
from ..planner.budget import show_bytes


def describe(named: Mapping[str, Sequence[Table]], world_size: int, *, batch_size: int, optimizer: Optimizer) -> str:
    """Memory, sent bytes and step time of one GPU, a line for each way to store the tables.

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
    A table is worth replicating with up to 2,048 rows, half as many as a GPU has samples.
    """
    rows = [("tables", "memory", "all-to-all", "gradients summed", "replicated", "step, estimated")]
    for name, tables in named.items():
        cost = estimate(tables, world_size, batch_size=batch_size, optimizer=optimizer)
        memory, exchanged, summed = (
            show_bytes(round(size)) for size in (cost.memory, cost.id_bytes + cost.vector_bytes, cost.reduce_bytes)
        )
        replicated = f"{sum(traffic.replicated for traffic in cost.tables)} of {len(cost.tables)}"
        memory += "" if cost.fits else ", does not fit"
        rows.append((name, memory, exchanged, summed, replicated, f"{cost.seconds * 1e3:.3g} ms"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    about = f"On {world_size} GPUs with {batch_size:,} samples each and {optimizer}, of one GPU in a step:"
    rule = f"A table is worth replicating with up to {batch_size // 2:,} rows, half as many as a GPU has samples."
    return "\n".join([about, *lines, rule])

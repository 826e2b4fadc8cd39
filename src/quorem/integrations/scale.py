"""An estimate of what sharded tables cost on many GPUs: memory, exchanged bytes, and the time of a step.

The tables are those that ``quorem.integrations.torchrec`` gives to TorchRec. Small ones are replicated, and their
gradients are summed over all GPUs. The others are sharded by tables and columns so that every GPU has an equal share:
row numbers are sent to the GPU that has the table, vectors come back, and their gradients are sent there again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checks import check_choice, check_int
from ..modules.collection import EmbeddingCollection, Table
from ..ops.state import RULES
from ..optimizer_names import Optimizer
from .features import Feature, StoredTable, features_of
from .shards import Shards, balanced_shards, distinct_rows

ID_BYTES = LENGTH_BYTES = 4  # bytes of a row number, and of the length of a bag


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs and how they are connected; bandwidths are bytes per second, of one GPU in one direction.

    The default is an NVIDIA H200 in nodes of 8 with a 400 Gb/s network card for each GPU.

    Args:
        memory: bytes of memory of a GPU.
        row_bandwidth: bandwidth of reading single rows; the default was measured for rows of 256 bytes
            (docs/benchmarks.md), and is a third of the bandwidth of a copy.
        gpus_per_node: number of GPUs in a node.
        node_bandwidth: bandwidth to the other GPUs of the node.
        network_bandwidth: bandwidth to GPUs of other nodes.

    >>> Machine(memory=80e9).gpus_per_node
    8
    """

    memory: float = 141e9
    row_bandwidth: float = 1.4e12
    gpus_per_node: int = 8
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9


class TableTraffic(NamedTuple):
    """A stored table, what a sample reads of it, and whether it is replicated."""

    table: StoredTable
    reads: tuple[float, ...]  # rows that a sample reads, for each key
    bags: float  # bags of row numbers for a sample: one for each key; for shards, the batch's bags over its samples
    vectors: float  # vectors sent for a sample: one for each bag, or one for each row where bags are pooled later
    replicated: bool


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one GPU stores, sends and waits for in a training step of the tables.

    Args:
        tables: the tables, and how they are distributed.
        memory: bytes of rows and optimizer state of one GPU.
        id_bytes: bytes of row numbers and lengths that are sent to other GPUs.
        vector_bytes: bytes of vectors and of their gradients that are sent to other GPUs.
        reduce_bytes: bytes that are sent to sum the gradients of replicated tables.
        lookup_seconds: time to read rows and to update them.
        exchange_seconds: time of all-to-all and all-reduce.
        fits: whether the memory of a GPU suffices.
    """

    tables: tuple[TableTraffic, ...]
    memory: float
    id_bytes: float
    vector_bytes: float
    reduce_bytes: float
    lookup_seconds: float
    exchange_seconds: float
    fits: bool

    @property
    def sent_bytes(self) -> float:
        """Bytes that a GPU sends in a step."""
        return self.id_bytes + self.vector_bytes + self.reduce_bytes

    @property
    def seconds(self) -> float:
        """Time of a step if nothing overlaps."""
        return self.lookup_seconds + self.exchange_seconds


def is_replicated(table: StoredTable, vectors: float) -> bool:
    """Whether a table should be replicated: if it has at most half as many rows as a GPU's batch would send vectors.

    The gradient of a replicated table has as many rows as the table, so at most half as many bytes are sent. The factor
    of two makes up for the optimizer, which passes over all rows of a replicated table in every step.
    """
    return table.num_rows <= vectors / 2


def estimate(
    tables: Sequence[Table],
    world_size: int,
    *,
    batch_size: int,
    ids_per_sample: Mapping[str, float] | None = None,
    optimizer: Optimizer = "rowwise_adagrad",
    bytes_per_number: int = 4,
    machine: Machine = Machine(),  # noqa: B008 - frozen
    replicate: bool = True,
    num_shards: int | None = None,
) -> Estimate:
    """What training the tables costs on ``world_size`` GPUs.

    Args:
        tables: the tables, with any schemes.
        world_size: number of GPUs.
        batch_size: batch size of each GPU.
        ids_per_sample: mean number of ids by feature; 1 where absent.
        optimizer: the optimizer, whose state is in memory beside the rows.
        bytes_per_number: bytes of a number in rows, state and vectors.
        machine: the GPUs.
        replicate: whether small tables are replicated.
        num_shards: as in ``quorem.integrations.torchrec``: if given, every row of a batch is sent once, and no table is
            replicated.

    Raises:
        ValueError: if a number is below 1, or ``optimizer`` is unknown.

    >>> tables = [Table("user", 100_000_000, 64), Table("day", 7, 64)]
    >>> cost = estimate(tables, 8, batch_size=4096)
    >>> [traffic.replicated for traffic in cost.tables], round(cost.memory / 1e9, 2)
    ([False, True], 3.25)
    """
    check_int("world_size", world_size)
    check_int("batch_size", batch_size)
    check_choice("optimizer", optimizer, Optimizer)
    features, id_lists = features_of(EmbeddingCollection(tables, device="meta"))
    if num_shards is None:
        traffic = traffic_of(features, batch_size, ids_per_sample or {}, replicate and world_size > 1)
    else:
        shards = balanced_shards(features, id_lists, tables, num_shards)
        traffic = traffic_of_shards(
            shards, distinct_rows(features, id_lists, tables, batch_size, ids_per_sample or {}), batch_size
        )
    others = (world_size - 1) / world_size  # share of the exchanged data that leaves the GPU
    memory = id_bytes = vector_bytes = reduce_bytes = touched = 0.0
    for table, reads, bags, vectors, replicated in traffic:
        rule = RULES[optimizer]
        state = 1 if rule.by_row else len(rule.averages) * table.width
        size = table.num_rows * (table.width + state) * bytes_per_number
        row = table.width * bytes_per_number
        # The forward pass reads the row. The backward pass reads gradient, row and state, and writes row and state.
        touched += batch_size * sum(reads) * (4 * row + 2 * state * bytes_per_number)
        if replicated:
            memory += size
            reduce_bytes += 2 * others * table.num_rows * row
        else:
            memory += size / world_size
            id_bytes += others * batch_size * (sum(reads) * ID_BYTES + bags * LENGTH_BYTES)
            vector_bytes += 2 * others * batch_size * vectors * row
    return Estimate(
        tables=tuple(traffic),
        memory=memory,
        id_bytes=id_bytes,
        vector_bytes=vector_bytes,
        reduce_bytes=reduce_bytes,
        lookup_seconds=touched / machine.row_bandwidth,
        exchange_seconds=exchange_seconds(id_bytes + vector_bytes, reduce_bytes, world_size, machine),
        fits=memory <= machine.memory,
    )


def traffic_of(
    features: Sequence[Feature], batch_size: int, ids_per_sample: Mapping[str, float], replicate: bool
) -> list[TableTraffic]:
    """The stored tables of the features, each once, and whether it is replicated."""
    reads: dict[StoredTable, list[float]] = {}
    vectors: dict[StoredTable, float] = {}
    for f in features:
        ids = ids_per_sample.get(f.name, 1)
        for rows, table in zip(f.rows_per_id.values(), f.stored, strict=True):
            reads.setdefault(table, []).append(ids * rows)
            vectors[table] = vectors.get(table, 0) + (1 if f.summed else ids * rows)
    traffic = []
    for table, of_keys in reads.items():
        replicated = replicate and is_replicated(table, batch_size * vectors[table])
        traffic.append(TableTraffic(table, tuple(of_keys), len(of_keys), vectors[table], replicated))
    return traffic


def traffic_of_shards(shards: Shards, distinct: Mapping[str, int], batch_size: int) -> list[TableTraffic]:
    """The shards. All shards of one width have the same number of bags: as many as the most distinct rows of one."""
    traffic = []
    for group in shards.groups:
        counts = [sum(distinct[part.name] for part in table.parts) for table in group]
        bags = max(counts) / batch_size
        traffic += [
            TableTraffic(table, (count / batch_size,), bags, bags, False)
            for table, count in zip(group, counts, strict=True)
        ]
    return traffic


def exchange_seconds(all_to_all: float, all_reduce: float, world_size: int, machine: Machine) -> float:
    """Time of an all-to-all and an all-reduce in which each GPU sends so many bytes; the slower link counts."""
    if world_size <= machine.gpus_per_node:
        return (all_to_all + all_reduce) / machine.node_bandwidth
    inside = (machine.gpus_per_node - 1) / (world_size - 1)
    exchange = max(all_to_all * inside / machine.node_bandwidth, all_to_all * (1 - inside) / machine.network_bandwidth)
    # Gradients are summed within nodes first; then each GPU sends its share of the node's sum over the network.
    share = all_reduce / machine.gpus_per_node
    return exchange + all_reduce / machine.node_bandwidth + share / machine.network_bandwidth

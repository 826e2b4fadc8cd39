"""Constraints by which TorchRec's planner handles composed tables well."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.constants import MIN_CW_DIM
from torchrec.distributed.planner.types import ParameterConstraints

from ..features import Feature, StoredTable
from ..shards import distinct_rows
from .collections import REPLICATED, Collection
from .rows import UniqueRows


def constraints(
    model: nn.Module,
    *,
    batch_size: int,
    ids_per_sample: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, ParameterConstraints]:
    """Constraints for ``EmbeddingShardingPlanner``: how many rows a sample reads, and which tables are replicated.

    A table is replicated (data-parallel) if it has at most half as many rows as a rank would send vectors for it: then
    at most half as many bytes are sent, for the gradient of the whole table. The factor of two makes up for the
    optimizer, which passes over all rows of a replicated table in every step. All others may have any other sharding
    type that TorchRec has for the device. Unpooled tables are never replicated on the CPU, where FBGEMM would pool them
    (torchrec#1255).

    Args:
        model: a model with collections of ``quorem.integrations.torchrec``, not yet sharded.
        batch_size: batch size of each rank.
        ids_per_sample: mean number of ids by feature; 1 where absent.
        device: device that the tables will be on.

    Raises:
        ValueError: if the model contains no such collection, or ``ids_per_sample`` names a feature that none has.

    >>> from quorem import QR, Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> bags = EmbeddingBagCollection([Table("user", 1_000_000, 16, QR(4, operation="add")), Table("day", 7, 16)])
    >>> by_table = constraints(bags, batch_size=2048)
    >>> by_table["user"].pooling_factors, by_table["user"].sharding_types, by_table["day"].sharding_types
    ([2.0], ['table_wise'], ['data_parallel'])
    """
    device_type = torch.device(device).type
    ids_per_sample = {} if ids_per_sample is None else ids_per_sample
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    if not collections:
        raise ValueError(f"model ({type(model).__name__}) must contain a collection of quorem.integrations.torchrec")
    names = {f.name for collection in collections for f in collection.rows.features}
    if extra := sorted(set(ids_per_sample) - names):
        raise ValueError(f"ids_per_sample names {', '.join(map(repr, extra))} but must name features of the model")
    by_table: dict[str, ParameterConstraints] = {}
    for collection in collections:
        rows, unpooled, replicated = collection.rows, set[StoredTable](), set[StoredTable]()
        if isinstance(rows, UniqueRows):  # no shard is replicated, since a row is sent once however often it is read
            distinct = distinct_rows(rows.features, rows.id_lists, collection.tables, batch_size, ids_per_sample)
            reads = {table: [sum(distinct[part.name] for part in table.parts) / batch_size] for table in rows.stored}
        else:
            reads, vectors = _traffic(rows.features, ids_per_sample)
            of_keys = {key: table for f in rows.features for key, table in zip(f.keys, f.stored, strict=True)}
            unpooled = {table for key, table in of_keys.items() if key not in rows.bags}
            replicated = {table for table in reads if table.num_rows <= batch_size * vectors[table] / 2}
            if device_type == "cpu":
                replicated -= unpooled
        for table, rows_read in reads.items():
            sharder = EmbeddingCollectionSharder() if table in unpooled else EmbeddingBagCollectionSharder()
            by_table[table.name] = ParameterConstraints(
                sharding_types=[REPLICATED] if table in replicated else _types(sharder, table.width, device_type),
                pooling_factors=rows_read,
                is_weighted=rows.weighted and not isinstance(rows, UniqueRows),
                bounds_check_mode=BoundsCheckMode.NONE,  # row numbers are in range by construction
            )
    return by_table


def _traffic(
    features: Sequence[Feature], ids_per_sample: Mapping[str, float]
) -> tuple[dict[StoredTable, list[float]], dict[StoredTable, float]]:
    """For each stored table, how many rows a sample reads by each key, and how many vectors are sent for it."""
    reads: dict[StoredTable, list[float]] = {}
    vectors: dict[StoredTable, float] = {}
    for f in features:
        ids = ids_per_sample.get(f.name, 1)
        for rows, table in zip(f.rows_per_id.values(), f.stored, strict=True):
            reads.setdefault(table, []).append(ids * rows)
            vectors[table] = vectors.get(table, 0) + (1 if f.summed else ids * rows)  # pooled, or a vector for each row
    return reads, vectors


def _types(sharder: Any, width: int, device_type: str) -> list[str]:
    """The sharding types that TorchRec has for tables of this width, without replication."""
    types = [kind for kind in sharder.sharding_types(device_type) if kind != REPLICATED]
    if width < 2 * MIN_CW_DIM:  # TorchRec's planner does not split such columns
        types = [kind for kind in types if "column" not in kind]
    return types

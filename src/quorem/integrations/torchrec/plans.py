"""Constraints by which TorchRec's planner handles composed tables well."""

from collections.abc import Mapping

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints

from .collections import Collection


def constraints(
    model: nn.Module,
    *,
    batch_size: int,
    ids_per_sample: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, ParameterConstraints]:
    """Constraints for ``EmbeddingShardingPlanner``: how many rows a sample reads, and that tables stay whole by rows.

    No table is replicated, since a row is sent once however often a batch reads it.

    Args:
        model: a model with collections of ``quorem.integrations.torchrec``, not yet sharded.
        batch_size: batch size of each rank.
        ids_per_sample: mean number of ids by feature; 1 where absent.
        device: device that the tables will be on.

    Raises:
        ValueError: if the model contains no such collection, or ``ids_per_sample`` names a feature that none has.

    >>> from quorem import Table
    >>> from quorem.integrations.torchrec import EmbeddingBagCollection
    >>> by_table = constraints(EmbeddingBagCollection([Table("day", 7, 16)]), batch_size=70)
    >>> by_table["rows16:0"].pooling_factors, by_table["rows16:0"].sharding_types[0]
    ([0.1], 'table_wise')
    """
    ids_per_sample = {} if ids_per_sample is None else ids_per_sample
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    if not collections:
        raise ValueError(f"model ({type(model).__name__}) must contain a collection of quorem.integrations.torchrec")
    names = {name for collection in collections for name in collection.rows.names}
    if extra := sorted(set(ids_per_sample) - names):
        raise ValueError(f"ids_per_sample names {', '.join(map(repr, extra))} but must name features of the model")
    types = EmbeddingBagCollectionSharder().sharding_types(torch.device(device).type)
    by_table = {}
    for collection in collections:
        distinct = collection.rows.expected_rows(batch_size, ids_per_sample)
        for shard in (shard for group in collection.rows.groups for shard in group):
            by_table[shard.name] = ParameterConstraints(
                sharding_types=[kind for kind in types if kind in ("table_wise", "column_wise", "table_column_wise")],
                pooling_factors=[sum(distinct[part.name] for part in shard.parts) / batch_size],
                bounds_check_mode=BoundsCheckMode.NONE,  # row numbers are in range by construction
            )
    return by_table

"""A table whose cold ids read a pool, without the other tables of the pool.

In a pool the cold ids of all its tables have one numbering. Alone, a table lists the row that each of its cold ids
reads in each partition of the pool.
"""

import torch

from ..ops.layout import pool_key
from ..partitions import ExplicitPartition
from ..schemes import Custom, Full, HotCold, Scheme, TableSpec
from ..tables import Tables

MOST_COLD = 2**24  # cold ids whose rows are listed: 128 MB for each partition of the pool


def spec_alone(tables: Tables, t: int) -> TableSpec:
    """The spec of table ``t``, whose pool becomes tables of its own, with the same vectors.

    Raises:
        ValueError: if it has too many cold ids to list their rows.

    >>> from quorem import EmbeddingCollection, HotCold, Pool, Table
    >>> tables = EmbeddingCollection([Table(name, 100, 4, HotCold(10, cold=Pool(40))) for name in "ab"])
    >>> spec_alone(tables, 1).shapes
    ((10, 4), (21, 4), (19, 4))
    """
    spec, key = tables.specs[t], pool_key(tables.pools, tables.specs[t])
    if spec.num_composed > MOST_COLD:
        raise ValueError(f"must be loaded with the whole file: {spec.num_composed:,} cold ids read its pool")
    cold: Scheme = Full()
    if spec.num_composed:
        first, mixing = tables.pool_numbering(t)
        mixed = mixing(torch.arange(first, first + spec.num_composed, device="cpu"))
        rows = tuple(ExplicitPartition(mixed % extent.rows) for extent in tables.pools[key])
        cold = Custom(rows, check=False, operation="add", force=True)
    return HotCold(spec.num_hot, cold=cold, num_rest=spec.num_rest, force=True).spec(
        spec.num_embeddings, spec.embedding_dim
    )

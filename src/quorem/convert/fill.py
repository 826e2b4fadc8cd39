"""Fill the rows of a collection that replaces trained tables: fit them, or draw them with the same deviation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import init
from ..collection import EmbeddingCollection
from ..fit import fit_
from ..ops.layout import pool_key
from ..schemes import HotCold, Scheme
from ..schemes.frequency import composed_ids, places


def fill_(
    single: EmbeddingCollection,
    trained: Mapping[str, Tensor],
    schemes: Mapping[str, Scheme],
    counts: Mapping[str, Tensor],
    fit: bool,
) -> None:
    """Fill a collection from trained tables.

    Args:
        single: the collection.
        trained: the trained tables, by name.
        schemes: schemes of the tables that are composed; all others are copied.
        counts: how often the ids of a table occur, by name.
        fit: whether composed tables are fitted; otherwise they are drawn with the deviation of the trained table.
    """
    for t, (name, spec) in enumerate(zip(single.names, single.specs, strict=True)):
        if name not in schemes:
            with torch.no_grad():
                single.tables(t)[0].copy_(trained[name])
        elif fit:
            stored = single.tables(t)
            pool = [torch.empty_like(table) for table in _pool_tables(single, t)]  # a dummy: the pool is filled below
            fit_(stored + pool, spec, trained[name], counts.get(name), ranks=single.ranks_of[t])
        else:
            init.init_(single.tables(t), spec, std=init.deviation(trained[name]))
    for key in single.pools:
        _fill_pool_(single, single.pool_members(key), trained, counts, fit)


def _fill_pool_(
    single: EmbeddingCollection,
    members: list[int],
    trained: Mapping[str, Tensor],
    counts: Mapping[str, Tensor],
    fit: bool,
) -> None:
    """Fill the rows of a pool for the cold ids of all its tables, ``members``."""
    names, stored = [single.names[t] for t in members], _pool_tables(single, members[0])
    if not fit:
        deviations = [std for name in names if (std := init.deviation(trained[name])) is not None]
        std = sum(deviations) / len(deviations) if deviations else None
        init.pool_(stored, [single.specs[t] for t in members], std=std)
        return
    cold = {name: _cold_ids(single, t) for name, t in zip(names, members, strict=True)}
    vectors = torch.cat([trained[name][ids] for name, ids in cold.items()])
    weighted = all(name in counts for name in names)
    frequencies = torch.cat([counts[name][ids.cpu()] for name, ids in cold.items()]) if weighted else None
    pool = single.specs[members[0]].pool
    assert pool is not None
    spec = HotCold(0, cold=pool, force=True).spec(len(vectors), vectors.shape[1])
    fit_(stored, spec, vectors, frequencies)


def _pool_tables(single: EmbeddingCollection, table: int) -> list[Tensor]:
    """The stored tables of a table's pool; empty if it has no pool."""
    return [
        extent.of(single.stored.detach())
        for extent in single.pools.get(pool_key(single.pools, single.specs[table]), ())
    ]


def _cold_ids(single: EmbeddingCollection, table: int) -> Tensor:
    """The composed ids of a table, in the order of their numbers."""
    spec = single.specs[table]
    return composed_ids(places(spec, single.ranks_of[table]), spec).to(single.stored.device)

"""Fill the rows of a collection that replaces trained tables: fit them, or draw them with the same deviation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..fit import fit_
from ..modules.collection import EmbeddingCollection
from ..ops.layout import pool_key
from ..paper import init
from ..paper.schemes import HotCold
from ..paper.schemes.frequency import composed_ids, places
from .groups import WeightGroup


def fill_(single: EmbeddingCollection, groups: Mapping[str, WeightGroup], fit: bool) -> None:
    """Fill a collection from trained tables.

    Args:
        single: the collection.
        groups: the trained tables, by name; those without a choice are copied, all others are composed.
        fit: whether composed tables are fitted; otherwise they are drawn with the deviation of the trained table.
    """
    for t, (name, spec) in enumerate(zip(single.names, single.specs, strict=True)):
        group, stored = groups[name], single.tables(t)
        trained = group.first.weight.detach()
        if group.choice is None:
            with torch.no_grad():
                stored[0].copy_(trained)
        elif fit:
            pool = [torch.empty_like(table) for table in _pool_tables(single, t)]  # a dummy: the pool is filled below
            fit_(stored + pool, spec, trained, group.counts, ranks=single.ranks_of[t])
        else:
            init.init_(stored, spec, std=init.deviation(trained))
    for key in single.pools:
        _fill_pool_(single, {t: groups[single.names[t]] for t in single.pool_members(key)}, fit)


def _fill_pool_(single: EmbeddingCollection, groups: Mapping[int, WeightGroup], fit: bool) -> None:
    """Fill the rows of a pool for the cold ids of all its tables, by position."""
    members = list(groups)
    stored, trained = _pool_tables(single, members[0]), {t: groups[t].first.weight.detach() for t in members}
    if not fit:
        deviations = [std for weight in trained.values() if (std := init.deviation(weight)) is not None]
        std = sum(deviations) / len(deviations) if deviations else None
        init.pool_(stored, [single.specs[t] for t in members], std=std)
        return
    cold = {t: _cold_ids(single, t) for t in members}
    vectors = torch.cat([trained[t][ids] for t, ids in cold.items()])
    counts = [group.counts[cold[t].cpu()] for t, group in groups.items() if group.counts is not None]
    frequencies = torch.cat(counts) if len(counts) == len(groups) else None
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

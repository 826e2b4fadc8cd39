"""Fill the rows of a collection that replaces trained tables: fit them, or draw them with the same deviation."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..fit import fit_
from ..fit.narrow import fit_matrix_
from ..fit.target import weights_of
from ..modules.collection import EmbeddingCollection
from ..ops.layout import pool_key
from ..paper import init
from ..paper.schemes import HotCold
from ..paper.schemes.frequency import cold_ids
from .groups import WeightGroup


def fill_(single: EmbeddingCollection, groups: Mapping[str, WeightGroup], fit: bool) -> None:
    """Fill a collection from trained tables.

    Args:
        single: the collection.
        groups: the trained tables, by name; those without a choice are copied, all others are composed.
        fit: whether composed tables are fitted; otherwise they are drawn with the deviation of the trained table.
    """
    targets: dict[int, Tensor] = {}  # what the rows of each table are to be composed to
    for t, (name, spec) in enumerate(zip(single.names, single.specs, strict=True)):
        group, stored = groups[name], single.tables(t)
        targets[t] = trained = group.first.weight.detach()
        if fit and (matrix := single.projection(t)) is not None:
            with torch.no_grad():
                targets[t] = trained = fit_matrix_(matrix, trained, weights_of(group.counts, trained.device), None)
            spec = replace(spec, embedding_dim=spec.width)
        if group.choice is None:
            with torch.no_grad():
                stored[0].copy_(trained)
        elif fit:
            pool = [torch.empty_like(table) for table in _pool_tables(single, t)]  # a dummy: the pool is filled below
            fit_(stored + pool, spec, trained, group.counts, ranks=single.ranks_of[t])
        else:
            init.init_(stored, spec, std=init.deviation(trained))
    for key in single.pools:
        members = single.pool_members(key)
        counts = {t: groups[single.names[t]].counts for t in members}
        _fill_pool_(single, {t: targets[t] for t in members}, counts, fit)


def _fill_pool_(
    single: EmbeddingCollection, trained: Mapping[int, Tensor], counts: Mapping[int, Tensor | None], fit: bool
) -> None:
    """Fill the rows of a pool for the cold ids of all its tables, by position."""
    members = list(trained)
    stored = _pool_tables(single, members[0])
    if not fit:
        deviations = [std for weight in trained.values() if (std := init.deviation(weight)) is not None]
        std = sum(deviations) / len(deviations) if deviations else None
        init.pool_(stored, [single.specs[t] for t in members], std=std)
        return
    numbers = {t: torch.arange(single.specs[t].num_composed, device=single.stored.device) for t in members}
    cold = {t: cold_ids(nth, single.specs[t], single.ranks_of[t]) for t, nth in numbers.items()}
    vectors = torch.cat([trained[t][ids] for t, ids in cold.items()])
    of_cold = [count[cold[t].cpu()] for t, count in counts.items() if count is not None]
    frequencies = torch.cat(of_cold) if len(of_cold) == len(members) else None
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

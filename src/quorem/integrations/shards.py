"""Divide the rows of all tables among a few plain tables that are read equally often, usually one for each rank."""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_int
from ..modules.collection import Table
from ..paper.schemes.frequency import Ranks
from .features import Feature, Part, StoredTable

NOMINAL_BATCH = 8192  # batch size for which shards are balanced


class PartLocation(NamedTuple):
    """Where the rows of a part are."""

    group: int  # number of the group of shards that have one width
    shard: int  # number of the shard within the group
    base: int  # number of the part's first row within the shard


class Shards(NamedTuple):
    """The plain tables of each width, and where each part is, by its name."""

    groups: tuple[tuple[StoredTable, ...], ...]
    locations: Mapping[str, PartLocation]


def balanced_shards(features: Sequence[Feature], id_lists: Tensor, tables: Sequence[Table], num_shards: int) -> Shards:
    """Divide the parts of the features among tables of each width that are read about equally often.

    Args:
        features: the features of a collection.
        id_lists: the lists of hot and cold ids.
        tables: the tables, by whose frequencies reads are estimated.
        num_shards: the most tables of one width; there are fewer if there are fewer parts, since a part is not split.
    """
    check_int("num_shards", num_shards)
    distinct = distinct_rows(features, id_lists, tables, NOMINAL_BATCH, {})
    by_width: dict[int, dict[str, Part]] = {}
    for f in features:
        widths = [f.stored[0].width] * len(f.parts) if f.merged else [table.width for table in f.stored]
        for width, part in zip(widths, f.parts, strict=True):
            by_width.setdefault(width, {})[part.name] = part
    groups, locations = [], {}
    for group, (width, parts) in enumerate(by_width.items()):
        parts_of: list[list[Part]] = [[] for _ in range(min(num_shards, len(parts)))]
        loads = [0] * len(parts_of)
        for part in sorted(parts.values(), key=lambda part: -distinct[part.name]):
            shard = loads.index(min(loads))
            locations[part.name] = PartLocation(group, shard, sum(other.num_rows for other in parts_of[shard]))
            loads[shard] += distinct[part.name]
            parts_of[shard].append(part)
        groups.append(tuple(StoredTable(f"rows{width}:{s}", width, tuple(t)) for s, t in enumerate(parts_of)))
    return Shards(tuple(groups), locations)


def drawn_ids(table: Table, count: int) -> Tensor:
    """Draw ``count`` ids by the table's frequencies, or by Zipf's law: rank i has a share of about ``log(1 + 1 / i)``.

    >>> drawn_ids(Table("user", 10, 16, frequencies=torch.tensor([0] * 9 + [5])), 3)
    tensor([9, 9, 9])
    """
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    n, counts = table.num_embeddings, table.frequencies
    if isinstance(counts, Tensor) and float(counts.sum()) > 0:
        sums = counts.double().cumsum(0)
        return torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_(max=n - 1)
    ids = (uniform * log(1 + n)).exp().long().sub_(1).clamp_(0, n - 1)
    if isinstance(counts, Ranks):
        listed = torch.cat([counts.hot.cpu(), counts.cold.cpu()]).long()
        is_listed = ids < len(listed)
        ids[is_listed] = listed[ids[is_listed]]
    return ids


def distinct_rows(
    features: Sequence[Feature],
    id_lists: Tensor,
    tables: Sequence[Table],
    batch_size: int,
    ids_per_sample: Mapping[str, float],
) -> dict[str, int]:
    """How many distinct rows of each part a batch reads, by name of the part; at least one of each.

    Args:
        features: the features that read the tables.
        id_lists: the lists of hot and cold ids.
        tables: the tables, whose frequencies are used.
        batch_size: number of samples.
        ids_per_sample: mean number of ids by feature; 1 where absent.
    """
    by_name = {table.name: table for table in tables}
    rows: dict[str, list[Tensor]] = {}
    for f in features:
        ids = drawn_ids(by_name[f.table], max(1, round(batch_size * ids_per_sample.get(f.name, 1)))).unique()
        reads = f.reads(ids, id_lists.cpu())
        for j, (part, row) in enumerate(zip(f.parts, reads.rows, strict=True)):
            rows.setdefault(part.name, []).append(row if reads.used is None else row[reads.used[:, j]])
    return {name: max(1, len(torch.cat(of_part).unique())) for name, of_part in rows.items()}

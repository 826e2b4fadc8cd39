"""Divide the rows of all tables among a few plain tables that are read equally often, usually one for each rank."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..checks import check_int
from ..modules.collection import Table
from .distinct import distinct_rows
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

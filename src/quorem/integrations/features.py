"""How a collection is stored in the plain tables of another engine, such as TorchRec, and which rows an id reads."""

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from ..modules import id_rules
from ..modules.collection import EmbeddingCollection
from ..ops.layout import BITS, COLD, HOT, OFFSET, build, pool_key
from ..paper import init
from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import Mixing
from ..paper.schemes import TableSpec


class Part(NamedTuple):
    """The rows of one stored table of quorem's, by its name, and the interval that their initial values come from."""

    name: str
    num_rows: int
    low: float
    high: float


class StoredTable(NamedTuple):
    """A plain table: the rows of one or more parts, one after another."""

    name: str
    width: int
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows of all parts."""
        return sum(part.num_rows for part in self.parts)


class PartReads(NamedTuple):
    """The rows that N ids read in the K parts of their table."""

    rows: list[Tensor]  # K tensors [N]: the row of each id in each part
    used: Tensor | None  # bool [N, K]: which parts each id reads; None where it reads all


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature: the table it reads, and the keys under which its rows are looked up.

    Where vectors are sums of rows, all parts of a table are in one plain table (``merged``); tables that share a pool
    are in one plain table as well. Otherwise each part has a plain table and a key.

    Args:
        name: name of the feature.
        table: name of its table.
        spec: spec of its table.
        padding: the padding id, or None.
        stored: the plain table of each key.
        parts: the parts that an id may read: rows of hot ids and of the rest, then those of each partition.
        bases: for each part, the number of its first row in the plain table.
        partitions: partitions of the composed ids: those of the table, or of its pool.
        offset: number of the table's first composed id among all ids of its pool.
        bits: number of bits of the mixing of a pool.
        hot: first entry and length of the list of hot ids; None where ids are in order of frequency.
        cold: the same for the list of cold ids.
        rule: which ids are replaced, and by which (``id_rules``); None if all stay as they are.
        listed: the listed ids, if unknown ids are hashed onto these.
    """

    name: str
    table: str
    spec: TableSpec
    padding: int | None
    stored: tuple[StoredTable, ...]
    parts: tuple[Part, ...]
    bases: tuple[int, ...]
    partitions: tuple[Partition | ExplicitPartition, ...]
    offset: int = 0
    bits: int = 0
    hot: tuple[int, int] | None = None
    cold: tuple[int, int] | None = None
    rule: tuple[int, ...] | None = None
    listed: id_rules.Listed | None = None

    @property
    def merged(self) -> bool:
        """Whether one plain table has all rows that the feature reads."""
        return len(self.stored) == 1

    @property
    def summed(self) -> bool:
        """Whether a bag of ids is a sum over a bag of rows: true for all but ``mult`` and path-based tables."""
        return self.spec.hidden is None and (self.merged or self.spec.operation != "mult")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the row numbers."""
        return (self.name,) if self.merged else tuple(f"{self.name}:{j}" for j in range(len(self.stored)))

    @property
    def width(self) -> int:
        """Width of the feature's vector: K D for feature generation, D otherwise."""
        return self.spec.embedding_dim * self.spec.num_vectors

    @property
    def first_partition(self) -> int:
        """Position of the first part that is a partition: 1 if part 0 has the rows of hot ids and of the rest."""
        return 1 if self.spec.num_own else 0

    @property
    def rows_per_id(self) -> dict[str, float]:
        """How many rows of each key's table an id reads on average, if the ids follow Zipf's law in order of rank.

        The i-th most frequent of n ids then has a share of the lookups of about ``log(1 + 1 / i) / log(1 + n)``.
        """
        spec, k = self.spec, len(self.partitions)
        scale = log(1 + spec.num_embeddings)
        hot, rest = log(1 + spec.num_hot) / scale, 1 - log(1 + spec.num_embeddings - spec.num_rest) / scale
        own_share = hot + rest if spec.num_own else 0.0  # of the lookups that read one row, not a composed vector
        if self.merged:
            return {self.name: own_share + (1 - own_share) * k}
        parts = [own_share] * self.first_partition + [1 - own_share] * k
        return dict(zip(self.keys, parts, strict=True))

    def ids_of_table(self, ids: Tensor) -> Tensor:
        """``ids`` ``[N]`` after the feature's rule: raw ids are mixed into the table's ids, unknown ids replaced."""
        if self.rule is None:
            return ids
        limit = torch.tensor([self.spec.num_embeddings], device=ids.device)
        listed = [] if self.listed is None else [self.listed._replace(feature=0)]
        rules = torch.tensor([self.rule], device=ids.device)
        return id_rules.replaced_ids(ids[:, None], None, rules, limit, listed)[:, 0]

    def reads(self, ids: Tensor, id_lists: Tensor) -> PartReads:
        """The rows that ``ids`` ``[N]`` read; ``id_lists`` has the lists of hot and cold ids."""
        spec, rows, used = self.spec, [], None
        numbers = ids.long()
        if spec.num_own:
            row, numbers, composed = self._places(numbers, id_lists)
            rows, used = [row], torch.stack([~composed, *[composed] * len(self.partitions)], 1)
        if spec.pool is not None:
            numbers = Mixing(self.bits)(numbers + self.offset)
        elif spec.permutation is not None:
            numbers = spec.permutation(numbers)
        rows += [partition(numbers) for partition in self.partitions]
        if max(table.num_rows for table in self.stored) < 2**31:
            rows = [row.int() for row in rows]  # half as many bytes to send
        return PartReads(rows, used)

    def _places(self, ids: Tensor, id_lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each id its row in the first part, its number among the composed ids, and whether it is composed."""
        spec = self.spec
        if self.hot is None:
            composed = (ids >= spec.num_hot) & (ids < spec.num_embeddings - spec.num_rest)
            row, numbers = ids.clamp(max=spec.num_hot), ids - spec.num_hot
        else:
            row, is_hot = search(id_lists[self.hot[0] :][: self.hot[1]], ids)
            composed, numbers = ~is_hot, ids - row
            if spec.num_rest and self.cold is not None:
                numbers, composed = search(id_lists[self.cold[0] :][: self.cold[1]], ids)
                row = torch.where(is_hot, row, spec.num_hot)
        return row, numbers.clamp(0, max(spec.num_composed - 1, 0)), composed


def search(ordered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries of a rising list are below each id, and whether the id is in it.

    >>> search(torch.tensor([2, 5]), torch.tensor([1, 5, 9]))
    (tensor([0, 1, 2]), tensor([False,  True, False]))
    """
    below = torch.searchsorted(ordered, ids.to(ordered.dtype))
    if not len(ordered):
        return below, torch.zeros_like(ids, dtype=torch.bool)
    return below, ordered[below.clamp(max=len(ordered) - 1)] == ids


def features_of(collection: EmbeddingCollection) -> tuple[list[Feature], Tensor]:
    """The features of a single-device collection, and the lists of its tables' hot and cold ids, concatenated."""
    layout = build(collection.specs, collection.padding, collection.table_of, collection.ranks_of).layout
    pools = _pools(collection)
    rules, hashed = id_rules.rules_of(collection, layout)
    listed = {each.feature: each for each in hashed}
    features: list[Feature] = []
    for f, (name, t) in enumerate(zip(collection.features, collection.table_of, strict=True)):
        spec, table, slot = collection.specs[t], collection.names[t], layout.slots[layout.spans[f, 0]].tolist()
        parts, partitions = _parts(collection, t), spec.partitions[: len(spec.shapes) - (spec.num_own > 0)]
        stored: tuple[StoredTable, ...]
        if spec.pool is not None:
            pool = pools[pool_key(collection.pools, spec)]
            stored = (pool,)
            shared = [part for part in pool.parts if part.name.startswith("pools.")]
            partitions = tuple(Partition(1, part.num_rows) for part in shared)
            parts += shared
        elif spec.operation == "add" or len(partitions) <= 1:
            stored = (StoredTable(table, spec.width, tuple(parts)),)
        else:
            widths = [width for _, width in spec.shapes]
            stored = tuple(StoredTable(f"{table}:{j}", widths[j], (part,)) for j, part in enumerate(parts))
        merged = stored[0].parts if len(stored) == 1 else ()
        bases = {part.name: sum(p.num_rows for p in merged[:i]) for i, part in enumerate(merged)}
        ranks = collection.ranks_of[t]
        features.append(
            Feature(
                name=name,
                table=table,
                spec=spec,
                padding=collection.padding[t],
                stored=stored,
                parts=tuple(parts),
                bases=tuple(bases.get(part.name, 0) for part in parts),
                partitions=partitions,
                offset=slot[OFFSET],
                bits=slot[BITS],
                hot=None if ranks is None else (slot[HOT], len(ranks.hot)),
                cold=None if ranks is None else (slot[COLD], len(ranks.cold)),
                rule=rules[f] if rules else None,
                listed=listed.get(f),
            )
        )
    return features, layout.ranks


def _parts(collection: EmbeddingCollection, t: int) -> list[Part]:
    """The parts of a table outside the pools."""
    spec = collection.specs[t]
    intervals = init.intervals(spec, std=collection.start_std([t]))
    return [
        Part(f"tables.{collection.names[t]}.{j}", rows, *interval)
        for j, ((rows, _), interval) in enumerate(zip(spec.shapes, intervals, strict=True))
    ]


def _pools(collection: EmbeddingCollection) -> dict[str, StoredTable]:
    """A plain table for each pool: first the other rows of the tables that share it, then the rows of the pool."""
    tables = {}
    for key, extents in collection.pools.items():
        members = collection.pool_members(key)
        outside = [part for t in members for part in _parts(collection, t)]
        bound = init.pool_bound(len(extents), [collection.specs[t] for t in members], collection.start_std(members))
        rows = [Part(f"pools.{key}.{j}", extent.rows, -bound, bound) for j, extent in enumerate(extents)]
        width = collection.specs[members[0]].width
        tables[key] = StoredTable(key.replace(".", ":"), width, tuple(outside + rows))
    return tables

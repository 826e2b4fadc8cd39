"""The layout: any mix of schemes as one small table of integers that every kernel reads.

All rows of a module lie in one parameter ``stored`` ``[R, W]``, where W is the greatest common divisor of the widths
of its tables; a row of a table that is ``pitch * W`` wide is ``pitch`` consecutive rows of ``stored``. The output is a
list of S *slots* of W columns. A slot takes one feature's ids and combines up to K rows, by sum or by product:

    out[n, s] = op_k stored[base[s, k] + bucket_k(id) * pitch[s, k]],   id = ids[n, feature[s]]

Concatenation and feature generation are slots of one row each, so two operations serve the paper's four.

Shapes: B batch, F features, S slots, K partitions, R rows, W columns, M map entries, V ids of a jagged batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..frequency import Pool, Ranks
from ..partitions import ExplicitPartition, Mixing, Partition
from ..schemes import TableSpec

SLOT_COLUMNS, PART_COLUMNS = 14, 5
FEATURE, OPERATION, LIMIT, MULTIPLIER, SHIFT, PADDING, OWN, REST, COMPOSED, OFFSET, BITS, HOT, COLD, GROUP = range(
    SLOT_COLUMNS
)
STRIDE, SIZE, BASE, PITCH, MAP = range(PART_COLUMNS)
ADD, MULT = 0, 1
NO_PADDING = -1
NO_RANKS = -1  # in HOT and COLD: ids come by frequency, so there is no list to search
UNUSED = -1  # in BASE: this slot has fewer than K partitions
CLOSED_FORM = -1  # in MAP: the bucket is (number // stride) % size, not an entry of ``maps``


@dataclass(frozen=True)
class Extent:
    """Where one table lies in ``stored``."""

    base: int
    rows: int
    pitch: int

    def of(self, stored: Tensor) -> Tensor:
        """This table ``[rows, pitch * W]`` as a view of ``stored`` ``[R, W]``."""
        return stored[self.base : self.base + self.rows * self.pitch].view(self.rows, self.pitch * stored.shape[1])


class Layout(NamedTuple):
    """The integers by which an op finds the rows of an id."""

    slots: Tensor  # int64 [S, 14]
    parts: Tensor  # int64 [S, K, 5]
    maps: Tensor  # int64 [M]: the index maps of explicit partitions, end to end
    spans: Tensor  # int64 [F, 2]: first slot and number of slots of each feature
    ranks: Tensor  # int32 or int64 [H]: the hot and cold ids of tables that are given frequencies, end to end


@dataclass(frozen=True)
class Storage:
    """The shape of ``stored``, where each table and pool lies in it, and how ids find their rows."""

    width: int
    num_rows: int
    extents: tuple[tuple[Extent, ...], ...]  # [tables][stored tables of each]
    pools: dict[str, tuple[Extent, ...]]  # by name; by name and width where a pool has several
    layout: Layout


class _Pooled(NamedTuple):
    """A pool of one width: its partitions, and the first number of each table's cold ids."""

    pool: Pool
    partitions: tuple[Partition, ...]
    bits: int
    offsets: dict[int, int]


def build(
    specs: Sequence[TableSpec],
    padding: Sequence[int | None],
    features: Sequence[int] | None = None,
    ranks: Sequence[Ranks | None] | None = None,
) -> Storage:
    """Place the tables of ``specs``. The integers are on the CPU, whatever torch's default device.

    Args:
        specs: what each table is.
        padding: the id of each table that stands for nothing, or None.
        features: the table that each feature reads; each its own where absent.
        ranks: the hot and cold ids of each table, or None where its ids come by frequency.
    """
    features = range(len(specs)) if features is None else features
    ranks = [None] * len(specs) if ranks is None else ranks
    width = gcd(
        *(w for spec in specs for w in (spec.embedding_dim * (spec.pool is not None), *(w for _, w in spec.shapes)))
    )
    extents, num_rows = [], 0
    for spec in specs:
        tables = []
        for rows, table_width in spec.shapes:
            tables.append(Extent(num_rows, rows, table_width // width))
            num_rows += rows * tables[-1].pitch
        extents.append(tuple(tables))
    pools: dict[str, tuple[Extent, ...]] = {}
    pooled = _pooled(specs)
    for name, entry in pooled.items():
        tables = []
        for part in entry.partitions:
            tables.append(Extent(num_rows, part.size, specs[next(iter(entry.offsets))].embedding_dim // width))
            num_rows += part.size * tables[-1].pitch
        pools[name] = tuple(tables)

    maps: list[Tensor] = []
    lists: list[Tensor] = []
    slots_of: list[list[list[int]]] = []
    parts_of: list[list[list[list[int]]]] = []
    mapped = ranked = 0
    for t, (spec, pad) in enumerate(zip(specs, padding, strict=True)):
        name = next((name for name, entry in pooled.items() if t in entry.offsets), None)
        head = _slot_row(spec, pad)
        partitions, tables = spec.partitions, list(extents[t])
        if name is not None:
            head[OFFSET], head[BITS] = pooled[name].offsets[t], pooled[name].bits
            partitions = pooled[name].partitions
            tables += pools[name]
        if ranks[t] is not None and spec.num_own:
            for column, ids in ((HOT, ranks[t].hot), (COLD, ranks[t].cold)):
                head[column] = ranked
                lists.append(ids)
                ranked += len(ids)
        own = [[1, spec.num_own, tables[0].base, tables[0].pitch, CLOSED_FORM]] if spec.num_own else []
        columns = []
        for part, extent in zip(partitions, tables[len(own) :], strict=False):
            if isinstance(part, ExplicitPartition):
                columns.append([1, part.size, extent.base, extent.pitch, mapped])
                maps.append(part.index)
                mapped += len(part.index)
            else:
                columns.append([part.stride, part.size, extent.base, extent.pitch, CLOSED_FORM])
        composed = len(columns) > 1 and (spec.operation in ("add", "mult") or name is not None)
        groups = [columns] if composed or not columns else [[c] for c in columns]
        rows = []
        for group in groups:
            for unit in range((group or own)[0][PITCH]):
                # Hot ids have one row for all slots: the slot's columns of it are as many units in as slots before it.
                first = [[*c[:BASE], c[BASE] + len(rows), *c[PITCH:]] for c in own]
                rows.append(first + [[*c[:BASE], c[BASE] + unit, *c[PITCH:]] for c in group])
        slots_of.append([head] * len(rows))
        parts_of.append(rows)

    slots: list[list[int]] = []
    parts: list[list[list[int]]] = []
    spans: list[list[int]] = []
    group_of = _groups(features, pooled)
    for f, t in enumerate(features):
        spans.append([len(slots), len(slots_of[t])])
        for unit, (head, rows) in enumerate(zip(slots_of[t], parts_of[t], strict=True)):
            row = list(head)
            row[FEATURE] = f
            row[GROUP] = spans[group_of[f]][0] + unit  # slots that share rows have the number of the first of them
            slots.append(row)
            parts.append(rows)
    most = max(map(len, parts))
    unused = [1, 1, UNUSED, 1, CLOSED_FORM]
    wide = any(ids.dtype == torch.int64 for ids in lists)
    layout = Layout(
        slots=torch.tensor(slots, device="cpu"),
        parts=torch.tensor([p + [unused] * (most - len(p)) for p in parts], device="cpu"),
        maps=torch.cat(maps) if maps else torch.empty(0, dtype=torch.int64, device="cpu"),
        spans=torch.tensor(spans, device="cpu"),
        ranks=torch.cat([ids.to(torch.int64 if wide else torch.int32) for ids in lists])
        if lists
        else torch.empty(0, dtype=torch.int32, device="cpu"),
    )
    return Storage(width, num_rows, tuple(extents), pools, layout)


def _slot_row(spec: TableSpec, padding: int | None) -> list[int]:
    """The row of ``slots`` of one table; FEATURE, OFFSET, BITS, HOT, COLD and GROUP are still to be filled in."""
    row = [0] * SLOT_COLUMNS
    row[OPERATION] = MULT if spec.operation == "mult" else ADD
    row[LIMIT] = spec.num_embeddings
    row[MULTIPLIER], row[SHIFT] = (spec.permutation.multiplier, spec.permutation.shift) if spec.permutation else (1, 0)
    row[PADDING] = NO_PADDING if padding is None else padding
    row[OWN], row[REST] = spec.num_own, spec.num_embeddings - spec.num_rest
    row[COMPOSED] = max(spec.num_composed, 1)
    row[HOT] = row[COLD] = NO_RANKS
    return row


def _pooled(specs: Sequence[TableSpec]) -> dict[str, _Pooled]:
    """The pools of ``specs``, each over one numbering of the cold ids of its tables."""
    members: dict[tuple[str, int], list[int]] = {}
    for t, spec in enumerate(specs):
        if spec.pool is not None:
            first = members.setdefault((spec.pool.name, spec.embedding_dim), [])
            first.append(t)
            if specs[first[0]].pool != spec.pool:
                raise ValueError(
                    f"pool {spec.pool.name!r} must be the same in all tables: {specs[first[0]].pool}, {spec.pool}"
                )
    names = [name for name, _ in members]
    pooled = {}
    for (name, d), tables in members.items():
        offsets, total = {}, 0
        for t in tables:
            offsets[t], total = total, total + specs[t].num_composed
        pool = specs[tables[0]].pool
        partitions = tuple(Partition(1, size) for size in pool.sizes(total))
        key = f"{name}.{d}" if names.count(name) > 1 else name
        pooled[key] = _Pooled(pool, partitions, Mixing.covering(max(total, 2)).bits, offsets)
    return pooled


def _groups(features: Sequence[int], pooled: dict[str, _Pooled]) -> list[int]:
    """For each feature, the first feature that it shares rows with: by its table, or by a pool."""
    pool_of = {t: name for name, entry in pooled.items() for t in entry.offsets}
    first: dict[object, int] = {}
    return [first.setdefault(pool_of.get(t, t), f) for f, t in enumerate(features)]

"""The layout: any mix of schemes as one small table of integers that every kernel reads.

All rows of a module lie in one parameter ``stored`` ``[R, W]``, where W is the greatest common divisor of the widths
of its tables; a row of a table that is ``pitch * W`` wide is ``pitch`` consecutive rows of ``stored``. The output is a
list of S *slots* of W columns. A slot takes one feature's ids and combines up to K rows, by sum or by product:

    out[n, s] = op_k stored[base[s, k] + bucket_k(id) * pitch[s, k]],   id = ids[n, feature[s]]

Where some ids have rows of their own (``frequency``), these are the slot's first part, and an id reads either it or the
others. Slots that share rows, by a table or a pool that several features read, have one GROUP: the first of them.

Concatenation and feature generation are slots of one row each, so two operations serve the paper's four.

Shapes: B batch, F features, S slots, K partitions, R rows, W columns, M map entries, V ids of a jagged batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import Mixing
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks

SLOT_COLUMNS, PART_COLUMNS = 14, 5
FEATURE, OPERATION, LIMIT, MULTIPLIER, SHIFT, PADDING, OWN, REST, COMPOSED, OFFSET, BITS, HOT, COLD, GROUP = range(
    SLOT_COLUMNS
)
STRIDE, SIZE, BASE, PITCH, MAP = range(PART_COLUMNS)
ADD, MULT = 0, 1
NO_PADDING = -1
NO_RANKS = -1  # in HOT and COLD: ids are in order of frequency, so there is no list to search
UNUSED = -1  # in BASE: this slot has fewer than K partitions
CLOSED_FORM = -1  # in MAP: the bucket is (number // stride) % size, not an entry of ``maps``
UNUSED_PART = (1, 1, UNUSED, 1, CLOSED_FORM)
LARGEST = 2**62  # limit of the integers
MOST_BITS = 62  # the most bits of a number that is mixed


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

    slots: Tensor  # [S, 14]; it, ``parts`` and ``spans`` are int32 if all their integers fit, else int64
    parts: Tensor  # [S, K, 5]
    maps: Tensor  # int64 [M]: the index maps of explicit partitions, concatenated
    spans: Tensor  # [F, 2]: first slot and number of slots of each feature
    ranks: Tensor  # int32 or int64 [H]: hot and cold ids of the tables that have frequencies, concatenated


def extents_of(layout: Layout) -> Tensor:
    """The first row of each stored table, rising, and its pitch, int64 ``[T, 2]``.

    The slots of a table start at ``pitch`` consecutive rows, of which the first is the table's.
    """
    starts: list[list[int]] = []
    for base, pitch in layout.parts[..., [BASE, PITCH]].flatten(0, 1).unique(dim=0).tolist():
        if base != UNUSED and (not starts or base >= sum(starts[-1])):
            starts.append([base, pitch])
    return torch.tensor(starts, device=layout.parts.device)


def num_rows_read(layout: Layout) -> int:
    """The number of rows that ``stored`` must have, so that every id reads rows that exist.

    Kernels do not look where an address leads, so every layout is checked here once. If it is on a GPU, this waits.

    Raises:
        TypeError: if ``maps`` is not int64, or another tensor neither int32 nor int64.
        ValueError: if the integers are not those of a layout, such as after ``to_empty``.
    """
    slots_type, *same, ranks_type = (t.dtype for t in (layout.slots, layout.parts, layout.spans, layout.ranks))
    types = {slots_type, ranks_type, torch.int32, torch.int64}
    if len(types) > 2 or {*same} != {slots_type} or layout.maps.dtype != torch.int64:
        raise TypeError(f"layout ({', '.join(str(t.dtype) for t in layout)}) must be torch.int64 or torch.int32")
    slots, parts, spans = (tensor.cpu().long() for tensor in (layout.slots, layout.parts, layout.spans))
    maps, ranks = layout.maps, layout.ranks
    feature, limit, composed, group = (slots[:, c] for c in (FEATURE, LIMIT, COMPOSED, GROUP))
    multiplier, shift = slots[:, MULTIPLIER], slots[:, SHIFT]
    own, rest, offset, bits = (slots[:, c] for c in (OWN, REST, OFFSET, BITS))
    stride, size, base, pitch, start = parts.unbind(-1)  # in the order of the columns
    fits = (
        ((feature >= 0) & (feature < len(spans)) & (limit > 0) & (limit < 2**63 - 1)).all()
        & ((own >= 0) & (own <= limit + 1) & (rest >= 0) & (rest <= limit)).all()
        & ((multiplier > 0) & (multiplier <= composed) & (shift >= 0) & (shift < composed)).all()
        & ((stride > 0) & (pitch > 0) & (base >= UNUSED) & (base < LARGEST)).all()
        & ((size > 0) & (size < LARGEST // pitch.clamp(min=1)) & (base[:, :1] >= 0)).all()
        & ((start == CLOSED_FORM) | ((start >= 0) & (composed[:, None] <= len(maps) - start))).all()
        & ((spans >= 0) & (spans <= len(slots)) & (spans.sum(1, keepdim=True) <= len(slots))).all()
    )
    if fits:
        has_rest = (rest < limit).long()
        hot, num_cold = own - has_rest, rest - own + has_rest
        ranked = slots[:, HOT] != NO_RANKS
        listed = torch.where(has_rest > 0, num_cold, 0)
        fits &= (
            ((hot >= 0) & (num_cold >= 0) & (composed == num_cold.clamp(min=1))).all()
            & ((own == 0) | ((size[:, 0] == own) & (start[:, 0] == CLOSED_FORM))).all()
            & ((bits >= 0) & (bits <= MOST_BITS) & (offset >= 0)).all()
            & ((bits == 0) | (offset <= (1 << bits.clamp(0, MOST_BITS)) - composed)).all()
            & ((group >= 0) & (group < len(slots))).all()
            & (~ranked | (slots[:, HOT] >= 0) & (slots[:, HOT] <= len(ranks) - hot)).all()
            & (~ranked | (slots[:, COLD] >= 0) & (slots[:, COLD] <= len(ranks) - listed)).all()
        )
        mapped = torch.stack([start, composed[:, None].expand_as(start), size], -1)[start != CLOSED_FORM]
        for first, length, buckets in mapped.unique(dim=0).tolist():
            part = maps[first : first + length]
            fits &= bool((part.min() >= 0) & (part.max() < buckets))
    if not fits:
        raise ValueError("the layout's integers are none of a layout: were they replaced, or never initialized?")
    return int((base + (size - 1) * pitch + 1)[base != UNUSED].max())


def check_rows(stored: Tensor, num_rows: int) -> None:
    """Raise ValueError if ``stored`` does not have the rows that ``num_rows_read`` asks for."""
    if stored.shape[0] < num_rows:
        raise ValueError(f"stored has {stored.shape[0]} rows but must have {num_rows}: the layout reads them")


@dataclass(frozen=True)
class Storage:
    """The shape of ``stored``, where each table and pool lies in it, and how ids find their rows."""

    width: int
    num_rows: int
    extents: tuple[tuple[Extent, ...], ...]  # [tables][stored tables of each]
    pools: dict[str, tuple[Extent, ...]]  # by name; by name and width where a pool has several
    layout: Layout


class _StoredPool(NamedTuple):
    """A pool of one width: where its rows lie, and the first number of each of its tables' cold ids."""

    extents: tuple[Extent, ...]
    offsets: dict[int, int]
    bits: int


class _TableSlots(NamedTuple):
    """The slots of a table, for each feature that reads it: rows of ``slots`` and ``parts``."""

    slot: list[int]
    parts: list[list[list[int]]]


def build(
    specs: Sequence[TableSpec],
    padding: Sequence[int | None],
    features: Sequence[int] | None = None,
    ranks: Sequence[Ranks | None] | None = None,
) -> Storage:
    """Place the tables of ``specs`` in one storage. All integers are on the CPU, whatever torch's default device is.

    Args:
        specs: spec of each table.
        padding: padding id of each table, or None.
        features: the table that each feature reads; None if each table has one feature.
        ranks: hot and cold ids of each table; None for a table whose ids are in order of frequency.
    """
    features = range(len(specs)) if features is None else features
    ranks = [None] * len(specs) if ranks is None else ranks
    width = gcd(*(w for spec in specs for _, w in spec.shapes), *(s.width for s in specs if s.pool is not None))
    free = _FreeRows()
    extents = tuple(tuple(free.take(rows, w // width) for rows, w in spec.shapes) for spec in specs)
    pools = _pools_of(specs, width, free)
    pool_of = {t: name for name, pool in pools.items() for t in pool.offsets}

    maps, lists, tables = _Joined(torch.int64), _Joined(torch.int32), []
    for t, (spec, pad) in enumerate(zip(specs, padding, strict=True)):
        pool = pools[pool_of[t]] if t in pool_of else None
        tables.append(_table_slots(t, spec, pad, extents[t], pool, ranks[t], maps, lists))

    first_readers: dict[object, int] = {}  # the first feature that reads each table or pool
    slots: list[list[int]] = []
    parts: list[list[list[int]]] = []
    spans: list[list[int]] = []
    for f, t in enumerate(features):
        spans.append([len(slots), len(tables[t].parts)])
        group = spans[first_readers.setdefault(pool_of.get(t, t), f)][0]
        for unit, slot_parts in enumerate(tables[t].parts):
            slot = list(tables[t].slot)
            slot[FEATURE], slot[GROUP] = f, group + unit
            slots.append(slot)
            parts.append(slot_parts)
    most = max(map(len, parts))
    parts = [p + [[*UNUSED_PART]] * (most - len(p)) for p in parts]
    integers = [torch.tensor(values, device="cpu") for values in (slots, parts, spans)]
    narrow = max(free.first, *(int(values.max()) for values in integers)) < 2**31
    all_slots, all_parts, all_spans = (values.int() if narrow else values for values in integers)
    layout = Layout(all_slots, all_parts, maps.tensor(), all_spans, lists.tensor())
    return Storage(width, free.first, extents, {name: pool.extents for name, pool in pools.items()}, layout)


class _Joined:
    """Concatenated lists of integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.lists, self.length = [torch.empty(0, dtype=dtype, device="cpu")], 0

    def add(self, values: Tensor) -> int:
        """Append a list; returns its start."""
        self.lists.append(values)
        self.length += len(values)
        return self.length - len(values)

    def tensor(self) -> Tensor:
        return torch.cat(self.lists)


class _FreeRows:
    """The rows of ``stored`` that belong to no table yet."""

    def __init__(self) -> None:
        self.first = 0

    def take(self, rows: int, pitch: int) -> Extent:
        """Give the next rows to a table."""
        extent = Extent(self.first, rows, pitch)
        self.first += rows * pitch
        return extent


def _pools_of(specs: Sequence[TableSpec], width: int, free: _FreeRows) -> dict[str, _StoredPool]:
    """The pools of ``specs``, each with one numbering of the cold ids of all its tables."""
    members: dict[tuple[str, int], list[int]] = {}
    for t, spec in enumerate(specs):
        if spec.pool is not None:
            tables = members.setdefault((spec.pool.name, spec.width), [])
            tables.append(t)
            other = specs[tables[0]].pool
            if other != spec.pool:
                raise ValueError(f"pool {spec.pool.name!r} must be the same in all tables, not {other} and {spec.pool}")
    names = [name for name, _ in members]
    pools = {}
    for (name, d), tables in members.items():
        offsets, num_cold = {}, 0
        for t in tables:
            offsets[t], num_cold = num_cold, num_cold + specs[t].num_composed
        pool = specs[tables[0]].pool
        assert pool is not None
        extents = tuple(free.take(rows, d // width) for rows in pool.sizes(num_cold))
        key = f"{name}.{d}" if names.count(name) > 1 else name
        pools[key] = _StoredPool(extents, offsets, Mixing.covering(num_cold).bits)
    return pools


def pool_key(pools: Mapping[str, object], spec: TableSpec) -> str:
    """The key of a table's pool: its name, with the width if pools of several widths share it; "" without a pool."""
    if spec.pool is None:
        return ""
    return spec.pool.name if spec.pool.name in pools else f"{spec.pool.name}.{spec.width}"


def _table_slots(
    table: int,
    spec: TableSpec,
    padding: int | None,
    extents: tuple[Extent, ...],
    pool: _StoredPool | None,
    ranks: Ranks | None,
    maps: _Joined,
    lists: _Joined,
) -> _TableSlots:
    slot = [0] * SLOT_COLUMNS
    slot[OPERATION] = MULT if spec.operation == "mult" else ADD
    slot[LIMIT] = spec.num_embeddings
    permutation = spec.permutation
    slot[MULTIPLIER], slot[SHIFT] = (permutation.multiplier, permutation.shift) if permutation else (1, 0)
    slot[PADDING] = NO_PADDING if padding is None else padding
    slot[OWN], slot[REST], slot[COMPOSED] = spec.num_own, spec.num_embeddings - spec.num_rest, max(spec.num_composed, 1)
    slot[HOT] = slot[COLD] = NO_RANKS
    if ranks is not None and spec.num_own:
        slot[HOT], slot[COLD] = lists.add(ranks.hot), lists.add(ranks.cold)
    own = [[1, spec.num_own, extents[0].base, extents[0].pitch, CLOSED_FORM]] if spec.num_own else []
    tables, partitions = extents[len(own) :], spec.partitions
    if pool is not None:
        slot[OFFSET], slot[BITS] = pool.offsets[table], pool.bits
        tables, partitions = pool.extents, tuple(Partition(1, extent.rows) for extent in pool.extents)
    composed = []
    for part, extent in zip(partitions, tables, strict=False):
        if isinstance(part, ExplicitPartition):
            composed.append([1, part.size, extent.base, extent.pitch, maps.add(part.index)])
        else:
            composed.append([part.stride, part.size, extent.base, extent.pitch, CLOSED_FORM])
    together = not composed or spec.operation in ("add", "mult")
    parts: list[list[list[int]]] = []
    for group in [composed] if together else [[part] for part in composed]:
        for unit in range((group or own)[0][PITCH]):
            # An id's own row is as wide as all slots of the table together: slot i reads its i-th unit.
            parts.append([_unit(part, len(parts)) for part in own] + [_unit(part, unit) for part in group])
    return _TableSlots(slot, parts)


def _unit(part: list[int], unit: int) -> list[int]:
    """A row of ``parts`` for the ``unit``-th of the ``pitch`` rows of ``stored`` that make up a row of the table."""
    return [*part[:BASE], part[BASE] + unit, *part[PITCH:]]

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

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import Mixing
from ..paper.schemes import TableSpec
from ..paper.schemes.frequency import Ranks

SLOT_COLUMNS, PART_COLUMNS = 12, 5
FEATURE, OPERATION, LIMIT, PADDING, OWN, REST, COMPOSED, OFFSET, BITS, HOT, COLD, GROUP = range(SLOT_COLUMNS)
STRIDE, SIZE, BASE, PITCH, MAP = range(PART_COLUMNS)
ADD, MULT = 0, 1
NO_PADDING = -1
NO_RANKS = -1  # in HOT and COLD: ids are in order of frequency, so there is no list to search
UNUSED = -1  # in BASE: this slot has fewer than K partitions
CLOSED_FORM = -1  # in MAP: the bucket is (number // stride) % size, not an entry of ``maps``
UNUSED_PART = (1, 1, UNUSED, 1, CLOSED_FORM)
_CHECKED = (FEATURE, LIMIT, COMPOSED, GROUP, OWN, REST, OFFSET, BITS)
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

    slots: Tensor  # [S, 12]; it, ``parts`` and ``spans`` are int32 if all their integers fit, else int64
    parts: Tensor  # [S, K, 5]
    maps: Tensor  # int64 [M]: the index maps of explicit partitions, concatenated
    spans: Tensor  # [F, 2]: first slot and number of slots of each feature
    ranks: Tensor  # int32 or int64 [H]: hot and cold ids of the tables that have frequencies, concatenated


def num_rows_read(layout: Layout) -> int:
    """The number of rows that ``stored`` must have, so that every id reads rows that exist.

    Kernels do not check addresses, so every layout is checked here once. Integers that are no layout, such as those
    after ``to_empty``, are a TypeError or ValueError. For a layout on a GPU, this waits for the GPU.
    """
    slots_type, *same, ranks_type = (t.dtype for t in (layout.slots, layout.parts, layout.spans, layout.ranks))
    types = {slots_type, ranks_type, torch.int32, torch.int64}
    if len(types) > 2 or {*same} != {slots_type} or layout.maps.dtype != torch.int64:
        raise TypeError(f"layout ({', '.join(str(t.dtype) for t in layout)}) must be torch.int64 or torch.int32")
    slots, parts, spans = (tensor.cpu().long() for tensor in (layout.slots, layout.parts, layout.spans))
    maps, ranks = layout.maps, layout.ranks
    feature, limit, composed, group, own, rest, offset, bits = (slots[:, c] for c in _CHECKED)
    stride, size, base, pitch, start = parts.unbind(-1)  # in the order of the columns
    has_rest = (rest < limit).long()
    hot, cold = own - has_rest, rest - own + has_rest
    owned, mapped, ranked = own > 0, start != CLOSED_FORM, slots[:, HOT] != NO_RANKS
    length = composed[:, None].expand_as(start)[mapped]  # of each index map
    largest = 2**63 - 1
    bounds: list[tuple[Tensor, Any, Any]] = [  # values, the least that they may be, and the most
        (feature, 0, len(spans) - 1),
        (group, 0, len(slots) - 1),
        (limit, 1, largest - 1),
        (hot, 0, limit),
        (cold, 0, limit),
        (rest, 0, limit),
        (composed, cold.clamp(min=1), cold.clamp(min=1)),
        (bits, 0, MOST_BITS),
        (offset, 0, torch.where(bits > 0, (1 << bits.clamp(0, MOST_BITS)) - composed, largest)),
        (spans, 0, len(slots)),
        (spans.sum(1), 0, len(slots)),
        (stride, 1, largest),
        (pitch, 1, largest),
        (size, 1, LARGEST // pitch.clamp(min=1) - 1),
        (base, UNUSED, LARGEST - 1),
        (base[:, 0], 0, LARGEST),
        (size[owned, 0], own[owned], own[owned]),
        (start[owned, 0], CLOSED_FORM, CLOSED_FORM),
        (start[mapped], 0, len(maps) - length),
        (slots[ranked, HOT], 0, len(ranks) - hot[ranked]),
        (slots[ranked, COLD], 0, len(ranks) - (cold * has_rest)[ranked]),
    ]
    fits = all(bool(((least <= values) & (values <= most)).all()) for values, least, most in bounds)
    if fits and mapped.any():
        for first, count, buckets in torch.stack([start[mapped], length, size[mapped]], 1).unique(dim=0).tolist():
            part = maps[first : first + count]
            fits = fits and bool((part.min() >= 0) & (part.max() < buckets))
    if not fits:
        raise ValueError("the module's integers describe no layout: were they replaced, or never initialized?")
    return int((base + (size - 1) * pitch + 1)[base != UNUSED].max())


def check_rows(stored_rows: int, num_rows: int) -> None:
    """Raise ValueError if ``stored`` has fewer rows than ``num_rows_read`` asks for."""
    if stored_rows < num_rows:
        raise ValueError(f"stored has {stored_rows} rows but must have {num_rows}: the layout reads them")


def checksum(layout: Layout) -> int:
    """Of all integers of a layout; for one on a GPU, this waits for the GPU."""
    return zlib.crc32(b"".join(tensor.cpu().numpy().tobytes() for tensor in layout))


class StoredPool(NamedTuple):
    """A pool of one width: where its rows lie, and how the cold ids of its tables are numbered."""

    extents: tuple[Extent, ...]
    offsets: dict[int, int]  # the tables that share the pool, and the number of each one's first cold id
    mixing: Mixing  # what is applied to the numbers

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions of mixed numbers, one for each extent."""
        return tuple(Partition(1, extent.rows) for extent in self.extents)


@dataclass(frozen=True)
class Storage:
    """The shape of ``stored``, where each table and pool lies in it, and how ids find their rows."""

    width: int
    num_rows: int
    extents: tuple[tuple[Extent, ...], ...]  # [tables][stored tables of each]
    pools: dict[str, StoredPool]  # by name; by name and width where a pool has several
    layout: Layout


class _Placed:
    """What has been placed so far: rows of ``stored``, index maps, and lists of hot and cold ids."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.maps = [torch.empty(0, dtype=torch.int64, device="cpu")]
        self.lists = [torch.empty(0, dtype=torch.int32, device="cpu")]

    def table(self, rows: int, pitch: int) -> Extent:
        """Give the next rows to a table."""
        extent = Extent(self.num_rows, rows, pitch)
        self.num_rows += rows * pitch
        return extent


def _append(tensors: list[Tensor], more: Tensor) -> int:
    """Append to tensors that will lie end to end; returns where the new one starts."""
    start = sum(map(len, tensors))
    tensors.append(more)
    return start


def build(
    specs: Sequence[TableSpec],
    padding: Sequence[int | None],
    features: Sequence[int] | None = None,
    ranks: Sequence[Ranks | None] | None = None,
) -> Storage:
    """Place the tables of ``specs`` in one storage. All integers are on the CPU, whatever torch's default device is.

    Each table has a padding id or None, and ``ranks`` if its ids are not in order of frequency. ``features`` are the
    tables that the features read; None if each table has one feature.
    """
    features = range(len(specs)) if features is None else features
    ranks = [None] * len(specs) if ranks is None else ranks
    width = gcd(*(w for spec in specs for _, w in spec.shapes), *(s.width for s in specs if s.pool is not None))
    placed = _Placed()
    extents = tuple(tuple(placed.table(rows, w // width) for rows, w in spec.shapes) for spec in specs)
    pools = _pools_of(specs, width, placed)
    pool_of = {t: pool for pool in pools.values() for t in pool.offsets}

    tables = []  # a row of ``slots``, and ``parts`` for each slot
    for t, (spec, pad) in enumerate(zip(specs, padding, strict=True)):
        pool = pool_of.get(t)
        slot = _slot(spec, pad, ranks[t], placed)
        if pool is not None:
            slot[OFFSET], slot[BITS] = pool.offsets[t], pool.mixing.bits
        tables.append((slot, _parts(spec, extents[t], pool, placed)))

    first_readers: dict[object, int] = {}  # the first feature that reads each table, or each pool by its extents
    slots: list[list[int]] = []
    parts: list[list[list[int]]] = []
    spans: list[list[int]] = []
    for f, t in enumerate(features):
        slot, parts_of_table = tables[t]
        spans.append([len(slots), len(parts_of_table)])
        group = spans[first_readers.setdefault(pool_of[t].extents if t in pool_of else t, f)][0]
        for unit, slot_parts in enumerate(parts_of_table):
            slots.append(list(slot))
            slots[-1][FEATURE], slots[-1][GROUP] = f, group + unit
            parts.append(slot_parts)
    most = max(map(len, parts))
    parts = [p + [[*UNUSED_PART]] * (most - len(p)) for p in parts]
    integers = [torch.tensor(values, device="cpu") for values in (slots, parts, spans)]
    narrow = max(placed.num_rows, *(int(values.max()) for values in integers)) < 2**31
    all_slots, all_parts, all_spans = (values.int() if narrow else values for values in integers)
    layout = Layout(all_slots, all_parts, torch.cat(placed.maps), all_spans, torch.cat(placed.lists))
    return Storage(width, placed.num_rows, extents, pools, layout)


def _pools_of(specs: Sequence[TableSpec], width: int, placed: _Placed) -> dict[str, StoredPool]:
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
        extents = tuple(placed.table(rows, d // width) for rows in pool.sizes(num_cold))
        key = f"{name}.{d}" if names.count(name) > 1 else name
        pools[key] = StoredPool(extents, offsets, Mixing.covering(num_cold))
    return pools


def _slot(spec: TableSpec, padding: int | None, ranks: Ranks | None, placed: _Placed) -> list[int]:
    """A row of ``slots``; the feature, the group and what is the pool's are filled in later."""
    slot = [0] * SLOT_COLUMNS
    slot[OPERATION] = MULT if spec.operation == "mult" else ADD
    slot[LIMIT] = spec.num_embeddings
    slot[PADDING] = NO_PADDING if padding is None else padding
    slot[OWN], slot[REST], slot[COMPOSED] = spec.num_own, spec.num_embeddings - spec.num_rest, max(spec.num_composed, 1)
    slot[HOT] = slot[COLD] = NO_RANKS
    if ranks is not None and spec.num_own:
        slot[HOT], slot[COLD] = _append(placed.lists, ranks.hot), _append(placed.lists, ranks.cold)
    return slot


def _parts(
    spec: TableSpec, extents: tuple[Extent, ...], pool: StoredPool | None, placed: _Placed
) -> list[list[list[int]]]:
    """The rows of ``parts`` of each slot of a table."""
    own = [[1, spec.num_own, extents[0].base, extents[0].pitch, CLOSED_FORM]] if spec.num_own else []
    tables, partitions = extents[len(own) :], spec.partitions
    if pool is not None:
        tables, partitions = pool.extents, pool.partitions
    composed = []
    for part, extent in zip(partitions, tables, strict=False):
        if isinstance(part, ExplicitPartition):
            composed.append([1, part.size, extent.base, extent.pitch, _append(placed.maps, part.index)])
        else:
            composed.append([part.stride, part.size, extent.base, extent.pitch, CLOSED_FORM])
    together = not composed or spec.operation in ("add", "mult")
    parts: list[list[list[int]]] = []
    for group in [composed] if together else [[part] for part in composed]:
        for unit in range((group or own)[0][PITCH]):
            # An id's own row is as wide as all slots of the table together: slot i reads its i-th unit.
            of_units = [(part, len(parts)) for part in own] + [(part, unit) for part in group]
            parts.append([[*part[:BASE], part[BASE] + unit, *part[PITCH:]] for part, unit in of_units])
    return parts

"""Lookups in plain torch operators, for graphs that are exported: none of quorem's ops, partitions as constants.

Features whose tables are stored alike form a group, and go through one chain of operators, whose constants are the
group's integers of the layout. ``ops.rows`` defines what every step computes; steps that change nothing are left out.

An id outside its table gives NaN, or what ``Tables.exported_unknown`` says, unless ``unknown`` of the table has a rule.
It is clamped into the table before any arithmetic: -1 would read the last row, and an id past n could alias another.

Shapes: B batch, F features of the module, G features of a group, V jagged ids, W columns of ``stored``. Ids of a group
are ``[B, G]`` or, jagged, ``[V]``; ``...`` stands for either.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import layout as column
from ..ops.codes import dequantize
from ..ops.rows import IdBatch, accumulator, places
from ..paper.hashing import mixed_ids
from ..paper.renumbering import mixing_rounds

if TYPE_CHECKING:
    from .lookup import Tables


class Group:
    """Features whose tables are stored alike: their integers of the layout, as constants.

    For jagged ids ``member`` ``[V]`` is the position in ``features`` of each id's feature.
    """

    def __init__(self, tables: "Tables", features: Sequence[int], member: Tensor | None = None) -> None:
        self.tables, self.features, self.member = tables, list(features), member
        spans = [tables.lists["spans"][f] for f in features]
        self.slots = [tables.lists["slots"][first] for first, _ in spans]
        self.parts = [tables.lists["parts"][first : first + count] for first, count in spans]
        self.num_slots, self.has_own = spans[0][1], self.slots[0][column.OWN] > 0
        self.composed_parts = range(self.has_own, sum(part[column.BASE] != column.UNUSED for part in self.parts[0][0]))

    def constant(self, values: Sequence[Any]) -> Any:
        """Integers of each feature, to be used with ids ``[...]``; a single one where all are equal."""
        flat = {i for value in values for i in (value if isinstance(value, list) else [value])}
        if len(flat) == 1:
            return flat.pop()
        constants = torch.tensor(values, device=self.tables.live_stored.device)
        return constants if self.member is None else constants.index_select(0, self.member)

    def slot(self, name: int) -> Any:
        """A column of ``layout.slots``."""
        return self.constant([slot[name] for slot in self.slots])

    def part(self, k: int, name: int) -> Any:
        """A column of the k-th part of ``layout.parts``, for each slot if there are several."""
        values = [[slot[k][name] for slot in slots] for slots in self.parts]
        return self.constant(values if self.num_slots > 1 else [value for (value,) in values])

    def by_slot(self, values: Tensor) -> Tensor:
        """Values ``[...]`` for use with ``part``: ``[..., 1]`` where a feature has several slots."""
        return values[..., None] if self.num_slots > 1 else values

    def hot(self) -> list[int]:
        """Number of hot ids of each feature."""
        return [slot[column.OWN] - (slot[column.REST] < slot[column.LIMIT]) for slot in self.slots]


class Vectors(NamedTuple):
    """Composed vectors ``[..., D]``, not valid where ``known`` or ``counted`` is false."""

    vectors: Tensor
    known: Tensor | None  # [...]: the id is one of its table; None if every id is
    counted: Tensor | None  # [...]: the id is not padding; None if no table has padding


def lookup(tables: "Tables", batch: IdBatch) -> Tensor:
    """Composed vectors ``[B, S, W]`` of a batch, those of a bag pooled. Narrow rows are not projected yet."""
    ids, groups, spans, parts = _cast(batch.ids, torch.int64), _alike(tables), tables.lists["spans"], []
    for features in groups:
        if batch.offsets is None:
            columns = ids if len(groups) == 1 else ids.index_select(1, torch.tensor(features, device=ids.device))
            part = _filled(composed(Group(tables, features), columns), tables.exported_unknown)
        else:
            part = _pooled(tables, features, batch)
        count = sum(spans[f][1] for f in features)
        parts.append(_cast(part, tables.dtype).reshape(part.shape[0], count, tables.width))
    together = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    in_groups = [spans[f] for features in groups for f in features]
    slots = [slot for first, count in in_groups for slot in range(first, first + count)]
    if slots == sorted(slots):
        return together
    in_order = sorted(range(len(slots)), key=slots.__getitem__)
    return together.index_select(1, torch.tensor(in_order, device=ids.device))


def composed(group: Group, ids: Tensor) -> Vectors:
    """Vectors of int64 ids ``[...]`` of one group; ids out of range give the vector of another id."""
    tables, t = group.tables, group.tables.table_of[group.features[0]]
    known: Any = None
    counted: Any = None
    if tables.raw_ids[t]:
        number = ids = mixed_ids(ids, group.slot(column.LIMIT))
    else:
        last = group.constant([slot[column.LIMIT] - 1 for slot in group.slots])
        number = ids.clamp(0, last) if isinstance(last, int) else torch.minimum(ids.clamp(min=0), last)
        known = number == ids
    if any(slot[column.PADDING] != column.NO_PADDING for slot in group.slots):
        counted = ids != group.slot(column.PADDING)
    place = _place(group, number) if group.has_own else number
    if tables.unknown[t] != "error":  # then ids are not raw
        place = torch.where(known, place, _replacement(group, ids, tables.unknown[t]))
        counted = None if counted is None else counted | ~known  # the id -1 is not padding
        known = None
    if not group.has_own:
        return Vectors(_cold(group, place), known, counted)
    own = group.slot(column.OWN)
    is_composed = place >= own
    (vectors,) = _read(group, [_row(group, 0, group.by_slot(torch.where(is_composed, 0, place)))])
    if group.composed_parts:
        cold = _cold(group, torch.where(is_composed, place - own, 0))
        vectors = torch.where(is_composed[..., None], cold, vectors)
    return Vectors(vectors, known, counted)


def _filled(found: Vectors, unknown: str) -> Tensor:
    """The vectors, with zeros for padding, and NaN or zeros for ids out of range."""
    vectors, factor = found.vectors, None
    if found.counted is not None:
        factor = found.counted.to(vectors.dtype)
    if found.known is not None:
        known, fill = vectors.new_ones(()) if factor is None else factor, torch.nan if unknown == "nan" else 0.0
        factor = torch.where(found.known, known, fill)
    if factor is None:
        return vectors
    # A product with ones, since ONNX Runtime takes eight times as long to broadcast the last axis.
    factor = factor[..., None] @ vectors.new_ones(1, vectors.shape[-1])
    if found.counted is None and unknown == "nan":
        return vectors * factor  # 1 or NaN, twice as fast
    return torch.where(factor == 1, vectors, factor)  # a row that is not finite stays so if it is multiplied by 0


def _pooled(tables: "Tables", features: Sequence[int], batch: IdBatch) -> Tensor:
    """Pooled vectors ``[B, G, D]`` of the features of one group; ids past the last offset are ignored."""
    ids, offsets, count = _cast(batch.ids, torch.int64), batch.offsets, len(features)
    assert offsets is not None
    size, bag = (offsets.shape[0] - 1) // len(tables.features), bags_of(ids, offsets)
    target, member = bag, None
    if len(tables.features) > 1:
        rows = torch.full((), size, device=ids.device).clamp(min=1)  # a tensor: torch.export takes a size to be over 1
        feature = bag // rows
        positions = [features.index(f) if f in features else -1 for f in range(len(tables.features))]
        member = torch.tensor([*positions, -1], device=ids.device)[feature.clamp(max=len(positions))]
        target = torch.where(member >= 0, bag % rows * count + member, size * count)
        ids, member = torch.where(member >= 0, ids, 0), member.clamp(min=0)
    found = composed(Group(tables, features, member), ids)
    counted = found.counted
    if found.known is not None:
        counted = found.known if counted is None else counted & found.known

    def scattered(values: Tensor) -> Tensor:
        """Sums by bag; a last one, which is dropped, is for ids that are in no bag."""
        zeros = values.new_zeros(size * count + 1, values.shape[1])
        return zeros.index_put((target,), values, accumulate=True)[:-1]

    if batch.sample_weights is not None:
        weighted = found.vectors * batch.sample_weights.to(found.vectors.dtype)[:, None]
        found = found._replace(vectors=weighted)
    pooled = scattered(_filled(found, tables.exported_unknown))
    if batch.mean:
        ones = torch.ones_like(ids) if counted is None else counted
        pooled = pooled / scattered(ones.to(pooled.dtype)[:, None]).clamp(min=1)
    return pooled.view(size, count, pooled.shape[1])


def bags_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """The bag ``[V]`` of each jagged id: the number of bags that end at or before it."""
    ends = offsets.new_zeros(ids.shape[0] + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    return ends.cumsum(0)[:-1]


def _alike(tables: "Tables") -> list[list[int]]:
    """The features in groups of tables that are stored alike, ordered by their first features."""
    groups: dict[object, list[int]] = {}
    for feature, t in enumerate(tables.table_of):
        group = Group(tables, [feature])
        ((slot,), (parts,)) = group.slots, group.parts
        kinds = tuple(
            tuple(part[column.MAP] >= 0 for part in each if part[column.BASE] != column.UNUSED) for each in parts
        )
        operation = slot[column.OPERATION] if len(group.composed_parts) > 1 else None
        rows = (kinds, operation, group.has_own, slot[column.HOT] != column.NO_RANKS, slot[column.BITS])
        networks = tuple(feature in each.members for each in tables.networks())
        groups.setdefault((rows, networks, tables.raw_ids[t], tables.unknown[t]), []).append(feature)
    return list(groups.values())


def _row(group: Group, k: int, bucket: Tensor) -> Tensor:
    """The rows of ``stored`` for buckets of the k-th part, ``[...]``, or ``[..., P]`` where a feature has P slots."""
    pitch = group.part(k, column.PITCH)
    return (bucket if isinstance(pitch, int) and pitch == 1 else bucket * pitch) + group.part(k, column.BASE)


def _read(group: Group, rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows of ``stored`` in the accumulator's dtype, ``[..., W]``; those of several slots side by side."""
    stored, width, bits = group.tables.live_stored, group.tables.width, group.tables.bits
    if not bits:
        numbers = [_cast(F.embedding(each, stored), accumulator(stored)) for each in rows]
    else:  # all rows at once: fewer operators
        numbers = list(dequantize(stored, torch.stack(list(rows)), width, bits).unbind())
    return numbers if group.num_slots == 1 else [each.flatten(-2) for each in numbers]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which would be an operator of the graph even where nothing changes."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _cold(group: Group, number: Tensor) -> Tensor:
    """Composed vectors of numbers, the arguments of the partitions (``ops.rows.locate`` and ``buckets_of``)."""
    bits = group.slots[0][column.BITS]
    if bits:
        number = mixing_rounds(number + group.slot(column.OFFSET), bits)
    rows = _read(group, [_row(group, k, _bucket(group, group.by_slot(number), k)) for k in group.composed_parts])
    vectors = rows[0]
    for row in rows[1:]:
        vectors = vectors * row if group.slots[0][column.OPERATION] == column.MULT else vectors + row
    return vectors if not group.tables.networks() else _through_networks(group, number, vectors)


def _bucket(group: Group, number: Tensor, k: int) -> Tensor:
    """The bucket of each number under the k-th part of each feature."""
    pairs = zip(group.slots, group.parts, strict=True)
    parts = [(slot, each[k]) for slot, slots in pairs for each in slots]
    start, have_maps = group.part(k, column.MAP), {part[column.MAP] >= 0 for _, part in parts}
    if have_maps == {True}:
        return group.tables.maps[number + start]
    bucket = number
    if any(part[column.STRIDE] > 1 for _, part in parts):
        bucket = number // group.part(k, column.STRIDE)
    covered = all(part[column.STRIDE] * part[column.SIZE] >= slot[column.COMPOSED] for slot, part in parts)
    if group.slots[0][column.BITS] or not covered:
        bucket = bucket % group.part(k, column.SIZE)
    if True in have_maps:  # of some slots: rows are concatenated
        maps = group.tables.maps
        bucket = torch.where(start >= 0, maps[(number + start).clamp(0, maps.shape[0] - 1)], bucket)
    return bucket


def _through_networks(group: Group, number: Tensor, vectors: Tensor) -> Tensor:
    """Path networks (section 4.1), if the group has some; the weights of each id's networks are gathered."""
    networks = next((each for each in group.tables.networks() if group.features[0] in each.members), None)
    if networks is None:
        return vectors
    act = {"relu": torch.relu, "sigmoid": torch.sigmoid}[networks.activation]
    vectors = _cast(vectors, networks.weights[0].dtype)
    for level in range(len(networks.counts)):
        parts = [networks.levels[networks.members.index(f)][level] for f in group.features]
        stride, size, base = (
            group.constant([part[name] for part in parts]) for name in (column.STRIDE, column.SIZE, column.BASE)
        )
        network = number // stride % size + base
        for i in networks.layers_of(level):
            vectors = vectors if i == networks.layers_of(level)[0] else act(vectors)
            product = (vectors[..., None, :] @ networks.weights[i][network])[..., 0, :]
            vectors = product + networks.biases[i][network]
    return vectors


def _place(group: Group, ids: Tensor) -> Tensor:
    """The place of each id in its ``HotCold`` table, where own rows come first."""
    hot, ranks = group.hot(), group.tables.ranks
    if group.slots[0][column.HOT] == column.NO_RANKS:
        ranks = ranks[:0]
    pairs = zip(group.slots, hot, strict=True)
    cold = [slot[column.REST] - count for slot, count in pairs if slot[column.REST] < slot[column.LIMIT]]
    return places(ids, group.constant(group.slots), ranks, longest=max(hot + cold))


def _replacement(group: Group, ids: Tensor, policy: str) -> Any:
    """The place that unknown ids get: that of the rest, or of a composed id, never that of padding."""
    if policy == "rest":
        return group.constant(group.hot())
    count = group.slot(column.COMPOSED)
    number = mixed_ids(ids, count)
    skipped = [group.tables.rules[f].skipped for f in group.features]
    if max(skipped) >= 0:
        number = torch.where(number == group.constant(skipped), (number + 1) % count, number)
    return number + group.slot(column.OWN) if group.has_own else number

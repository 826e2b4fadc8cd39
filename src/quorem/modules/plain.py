"""Lookups in plain torch operators, for graphs that are exported: none of quorem's ops, partitions as constants.

Features whose tables are stored alike form a group, and go through one chain of operators with one constant for each
feature. ``ops.rows`` defines what every step computes.

An id outside its table gives NaN, or what ``Tables.exported_unknown`` says, unless ``unknown`` of the table has a rule.
It is clamped into the table before any arithmetic: -1 would read the last row, and an id past n could alias another.

Shapes: B batch, F features of the module, G features of a group, V jagged ids, W columns of ``stored``. Ids of a group
are ``[B, G]`` or, jagged, ``[V]``; ``...`` stands for either.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.codes import FIRST_SCALE, NARROW, code_bytes
from ..ops.layout import pool_key
from ..ops.rows import IdBatch, accumulator
from ..paper.hashing import mixed_ids
from ..paper.partitions import ExplicitPartition, Partition
from ..paper.renumbering import MIXING_FACTORS
from ..paper.schemes import TableSpec
from .id_rules import SKIPPED
from .path_networks import path_scheme

if TYPE_CHECKING:
    from .lookup import Tables

# The finite float16 numbers from 0, by their bits. One tensor, so that a graph has one copy.
HALVES = torch.from_numpy(np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32))[:, None]

NARROW_SCALES = ((torch.arange(256, dtype=torch.int32) << 20) + FIRST_SCALE).view(torch.float32)[:, None]


class Group:
    """Features whose tables are stored alike.

    Args:
        tables: the module.
        features: the features, as positions in the module.
        member: for jagged ids, the position in ``features`` of each id's feature ``[V]``.
    """

    def __init__(self, tables: "Tables", features: Sequence[int], member: Tensor | None = None) -> None:
        self.tables, self.features, self.member = tables, list(features), member
        self.members = [tables.table_of[f] for f in features]
        self.specs = [tables.specs[t] for t in self.members]
        self.spec = self.specs[0]

    def constant(self, values: Sequence[int]) -> Any:
        """One integer for each feature, to be used with ids ``[...]``; a single one where all are equal."""
        if len(set(values)) == 1:
            return values[0]
        constants = torch.tensor(values, device=self.tables.live_stored.device)
        return constants if self.member is None else constants.index_select(0, self.member)


class Vectors(NamedTuple):
    """Composed vectors ``[..., D]``, not valid where ``known`` or ``counted`` is false."""

    vectors: Tensor
    known: Tensor | None  # [...]: the id is one of its table; None if every id is
    counted: Tensor | None  # [...]: the id is not padding; None if no table has padding


def lookup(tables: "Tables", batch: IdBatch, *, maximum: bool = False, checks: bool = True) -> Tensor:
    """Composed vectors ``[B, S, W]`` of a batch, those of a bag pooled; with ``maximum``, by their maximum.

    Narrow rows are not projected yet, except before a maximum, which only a module of one table takes. ``checks``:
    wrong offsets give NaN.
    """
    ids, groups, parts = _cast(batch.ids, torch.int64), _alike(tables), []
    sound = _sound(batch.offsets, len(tables.features)) if checks and batch.offsets is not None else None
    for features in groups:
        if batch.offsets is None:
            columns = ids if len(groups) == 1 else ids.index_select(1, torch.tensor(features, device=ids.device))
            part = _filled(composed(Group(tables, features), columns), tables.exported_unknown)
        else:
            part = _pooled(tables, features, batch, maximum)
            part = part if sound is None else part * sound.to(part.dtype)
            if maximum:
                return _cast(part, tables.dtype)
        slots = sum(_num_slots(tables, f) for f in features)
        parts.append(_cast(part, tables.dtype).reshape(part.shape[0], slots, tables.width))
    together = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    order = [f for features in groups for f in features]
    if order == sorted(order):
        return together
    starts, first = {}, 0
    for f in order:
        starts[f], first = first, first + _num_slots(tables, f)
    slots_in_order = [starts[f] + i for f in sorted(order) for i in range(_num_slots(tables, f))]
    return together.index_select(1, torch.tensor(slots_in_order, device=ids.device))


def composed(group: Group, ids: Tensor) -> Vectors:
    """Vectors of int64 ids ``[...]`` of one group; ids out of range give the vector of another id."""
    tables, spec, t = group.tables, group.spec, group.members[0]
    limits, policy = [each.num_embeddings for each in group.specs], tables.unknown[t]
    known: Any = None
    if tables.raw_ids[t]:
        number = ids = mixed_ids(ids, group.constant(limits))
    else:
        last = group.constant([limit - 1 for limit in limits])
        number = ids.clamp(0, last) if isinstance(last, int) else torch.minimum(ids.clamp(min=0), last)
        known = number == ids
    pads = [tables.padding[t] for t in group.members]
    padding = [-1 if pad is None else pad for pad in pads]  # an id of the table, even if ids are raw
    counted: Any = ids != group.constant(padding) if max(padding) >= 0 else None
    if counted is not None and policy != "error":
        counted = counted | ~known  # the id -1 is not padding
    replacement = None if policy == "error" or known is None else _replacement(group, ids, policy)
    if not spec.num_own:
        if replacement is not None:
            number = torch.where(known, number, replacement)
        vectors = _cold(group, number)
    else:
        own = group.constant([each.num_own for each in group.specs])
        place = _place(group, number)
        if replacement is not None:
            place = torch.where(known, place, replacement + (own if policy == "hash" else 0))
        is_composed = place >= own
        base = group.constant([tables.extents[t][0].base for t in group.members])
        (vectors,) = _read(tables, [torch.where(is_composed, 0, place)], [base], [tables.extents[t][0].pitch])
        if spec.num_composed:
            cold = _cold(group, torch.where(is_composed, place - own, 0))
            vectors = torch.where(is_composed[..., None], cold, vectors)
    return Vectors(vectors, known if policy == "error" else None, counted)


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


def _sound(offsets: Tensor, num_features: int) -> Tensor:
    """1, or NaN if offsets do not start at 0, decrease, or have a wrong length, since a graph cannot raise.

    Offsets past the last id are not in it: they make ``_pooled`` scatter out of bounds, which runtimes refuse.
    """
    wrong = (offsets[1:] < offsets[:-1]).sum() + offsets[0].abs() + (offsets.shape[0] - 1) % num_features
    return torch.where(wrong == 0, 1.0, torch.nan)


def _pooled(tables: "Tables", features: Sequence[int], batch: IdBatch, maximum: bool) -> Tensor:
    """Pooled vectors ``[B, G, D]`` of the features of one group; ids past the last offset are ignored."""
    ids, offsets, count = _cast(batch.ids, torch.int64), batch.offsets, len(features)
    assert offsets is not None
    size, num_ids = (offsets.shape[0] - 1) // len(tables.features), ids.shape[0]
    # The bag of an id is the number of bags that end at or before it.
    ends = ids.new_zeros(num_ids + 1).scatter_add(0, offsets[1:], torch.ones_like(offsets[1:]))
    bag = ends.cumsum(0)[:-1]
    target, member = bag, None
    if len(tables.features) > 1:
        rows = torch.full((), size, device=ids.device).clamp(min=1)  # a tensor: torch.export takes a size to be over 1
        feature = bag // rows
        positions = [features.index(f) if f in features else -1 for f in range(len(tables.features))]
        member = torch.tensor([*positions, -1], device=ids.device)[feature.clamp(max=len(positions))]
        target = torch.where(member >= 0, bag % rows * count + member, size * count)
        ids, member = torch.where(member >= 0, ids, 0), member.clamp(min=0)
    found = composed(Group(tables, features, member), ids)
    unknown = tables.exported_unknown
    counted = found.counted
    if found.known is not None:
        counted = found.known if counted is None else counted & found.known

    def scattered(values: Tensor) -> Tensor:
        """Sums by bag; a last one, which is dropped, is for ids that are in no bag."""
        zeros = values.new_zeros(size * count + 1, values.shape[1])
        return zeros.index_put((target,), values, accumulate=True)[:-1]

    if maximum:
        matrix, vectors = tables.projection(), found.vectors
        if matrix is not None:
            vectors = (_cast(vectors, matrix.dtype).unflatten(-1, (-1, matrix.shape[0])) @ matrix).flatten(-2)
        vectors = vectors if counted is None else torch.where(counted[:, None], vectors, -torch.inf)
        lowest = vectors.new_full((size * count + 1, vectors.shape[1]), -torch.inf)
        pooled = lowest.scatter_reduce(0, target[:, None].expand(vectors.shape), vectors, "amax")[:-1]
        pooled = torch.where(pooled == -torch.inf, 0.0, pooled)
        if found.known is not None and unknown == "nan":
            pooled = torch.where(scattered((~found.known).to(pooled.dtype)[:, None]) > 0, torch.nan, pooled)
    else:
        if batch.sample_weights is not None:
            weighted = found.vectors * batch.sample_weights.to(found.vectors.dtype)[:, None]
            found = found._replace(vectors=weighted)
        pooled = scattered(_filled(found, unknown))
        if batch.mean:
            ones = torch.ones_like(ids) if counted is None else counted
            pooled = pooled / scattered(ones.to(pooled.dtype)[:, None]).clamp(min=1)
    return pooled.view(size, count, pooled.shape[1])


def _alike(tables: "Tables") -> list[list[int]]:
    """The features in groups of tables that are stored alike, ordered by their first features."""
    groups: dict[object, list[int]] = {}
    for feature, t in enumerate(tables.table_of):
        spec, path = tables.specs[t], path_scheme(tables.specs[t])
        kinds = tuple(isinstance(part, ExplicitPartition) for part in spec.partitions)
        operation = spec.operation if len(spec.partitions) > 1 else "one table"
        own_rows = (spec.num_own > 0, tables.ranks_of[t] is not None, spec.num_composed > 0)
        networks = None if path is None else (path.hidden, path.activation)
        rule = (tables.raw_ids[t], tables.unknown[t])
        widths = tuple(width for _, width in spec.shapes)
        key = (operation, kinds, widths, own_rows, pool_key(tables.pools, spec), networks, rule)
        groups.setdefault(key, []).append(feature)
    return list(groups.values())


def _num_slots(tables: "Tables", feature: int) -> int:
    spec = tables.specs[tables.table_of[feature]]
    return spec.width * spec.num_vectors // tables.width


def _read(
    tables: "Tables", rows: Sequence[Tensor], bases: Sequence[Tensor | int], pitches: Sequence[int]
) -> list[Tensor]:
    """Rows ``[...]`` of tables that start at ``bases``: ``[..., pitch * W]``, in the accumulator's dtype."""
    stored, width, bits, found = tables.live_stored, tables.width, tables.bits, []
    for row, base, pitch in zip(rows, bases, pitches, strict=True):
        units = row + base if pitch == 1 else (row * pitch + base)[..., None] + torch.arange(pitch, device=row.device)
        found.append(units)
    if not bits:
        numbers = [_cast(F.embedding(units, stored), accumulator(stored)) for units in found]
    elif len(set(pitches)) == 1 and len(rows) > 1:  # fewer operators
        numbers = list(_dequantized(F.embedding(torch.stack(found), stored), width, bits).unbind())
    else:
        numbers = [_dequantized(F.embedding(units, stored), width, bits) for units in found]
    return [each if pitch == 1 else each.flatten(-2) for each, pitch in zip(numbers, pitches, strict=True)]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which would be an operator of the graph even where nothing changes."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _dequantized(rows: Tensor, width: int, bits: int) -> Tensor:
    """``codes.dequantize`` without a view of bytes as another dtype, which ONNX does not have.

    Products with small matrices are exact here, and ONNX Runtime broadcasts last axes more slowly.
    """
    size, device = code_bytes(width, bits), rows.device
    codes, ends = rows[..., :size].float(), rows[..., size:]
    if bits == 4:
        high = (codes / 16).floor()
        codes = torch.stack([codes - high * 16, high], -1).flatten(-2)
    if width <= NARROW:
        return (codes[..., :width] - 2 ** (bits - 1)) * F.embedding(ends[..., 0].long(), NARROW_SCALES.to(device))
    ends = ends.float()
    bits_of_scale = (ends @ torch.tensor([[1.0], [256.0], [0.0], [0.0]], device=device))[..., 0].long()
    scale = F.embedding(bits_of_scale, HALVES.to(device))
    zero = ends @ torch.tensor([[0.0], [0.0], [1.0], [0.0]], device=device).expand(4, width)
    return (codes[..., :width] - zero) * scale


def _cold(group: Group, number: Tensor) -> Tensor:
    """Composed vectors of numbers, the arguments of the partitions."""
    tables, spec, specs = group.tables, group.spec, group.specs
    permutations = [each.permutation for each in specs]
    if any(permutations):
        multipliers = group.constant([p.multiplier if p else 1 for p in permutations])
        shifts = group.constant([p.shift if p else 0 for p in permutations])
        number = (number * multipliers + shifts) % group.constant([max(each.num_composed, 1) for each in specs])
    if spec.pool is not None:
        numberings = [tables.pool_numbering(t) for t in group.members]
        number = _mixed(number + group.constant([first for first, _ in numberings]), numberings[0][1].bits)
        extents = [tables.pools[pool_key(tables.pools, spec)]] * len(group.members)
        partitions: list[Any] = [[Partition(1, extent.rows) for extent in each] for each in extents]
    else:
        extents = [tables.extents[t][spec.num_own > 0 :] for t in group.members]
        partitions = [each.partitions for each in specs]
    stored = range(len(extents[0]))
    buckets = [_bucket(group, number, [each[j] for each in partitions], j) for j in stored]
    bases = [group.constant([each[j].base for each in extents]) for j in stored]
    rows = _read(tables, buckets, bases, [extent.pitch for extent in extents[0]])
    if spec.operation in ("concat", "feature"):
        return torch.cat(rows, -1)
    vectors = rows[0]
    for row in rows[1:]:
        vectors = vectors * row if spec.operation == "mult" else vectors + row
    return vectors if path_scheme(spec) is None else _through_networks(group, number, vectors)


def _bucket(group: Group, number: Tensor, partitions: Sequence[Partition | ExplicitPartition], j: int) -> Tensor:
    """The bucket of each number under the j-th partition of each feature."""
    if isinstance(partitions[0], ExplicitPartition):
        return group.tables.maps[number + group.constant([_map_start(group.tables, t, j) for t in group.members])]
    closed = [each for each in partitions if isinstance(each, Partition)]
    if max(each.stride for each in closed) > 1:
        number = number // group.constant([each.stride for each in closed])
    pairs = zip(closed, group.specs, strict=True)
    if group.spec.pool is None and all(part.stride * part.size >= spec.num_composed for part, spec in pairs):
        return number
    return number % group.constant([each.size for each in closed])


def _through_networks(group: Group, number: Tensor, vectors: Tensor) -> Tensor:
    """Path networks (section 4.1); the weights of each id's networks are gathered."""
    tables = group.tables
    networks = next(each for each in tables.networks() if group.features[0] in each.members)
    act = {"relu": torch.relu, "sigmoid": torch.sigmoid}[networks.activation]
    names = list(networks.tables)
    vectors = _cast(vectors, networks.weights[0].dtype)
    for level in range(len(networks.counts)):
        sizes = [networks.tables[name][level] for name in names]
        firsts = [sum(sizes[: names.index(tables.names[t])]) for t in group.members]
        network = _bucket(group, number, [each.partitions[level + 1] for each in group.specs], level + 1)
        network = network + group.constant(firsts)
        for i in networks.layers_of(level):
            vectors = vectors if i == networks.layers_of(level)[0] else act(vectors)
            product = (vectors[..., None, :] @ networks.weights[i][network])[..., 0, :]
            vectors = product + networks.biases[i][network]
    return vectors


def _place(group: Group, ids: Tensor) -> Tensor:
    """The place of each id in its ``HotCold`` table, where own rows come first (``ops.rows``)."""
    specs, t = group.specs, group.members[0]
    hot = group.constant([each.num_hot for each in specs])
    rest = group.constant([int(each.num_rest > 0) for each in specs])
    if group.tables.ranks_of[t] is None:
        place = torch.where(ids < hot, ids, ids + rest)
        return torch.where(ids >= group.constant([_first_rest(each) for each in specs]), hot, place)
    starts = [_rank_starts(group.tables, t) for t in group.members]
    listed = [each.num_composed if each.num_rest else 0 for each in specs]
    below_hot, is_hot = _search(group, ids, [hot for hot, _ in starts], [each.num_hot for each in specs])
    below_cold, is_cold = _search(group, ids, [cold for _, cold in starts], listed)
    own = group.constant([each.num_own for each in specs])
    with_rest = torch.where(is_cold, below_cold + own, hot)
    if all(each.num_rest for each in specs):
        cold = with_rest
    else:
        cold = torch.where(torch.as_tensor(rest, device=ids.device) > 0, with_rest, ids - below_hot + own)
    return torch.where(is_hot, below_hot, cold)


def _search(group: Group, ids: Tensor, starts: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """For each id, how many entries of its sorted list are below it, and whether the list has it; by bisection."""
    below, ranks = torch.zeros_like(ids), group.tables.ranks
    if not max(lengths):
        return below, below > 0
    start, length, last = group.constant(starts), group.constant(lengths), ranks.shape[0] - 1
    for step in reversed(range(max(lengths).bit_length())):
        further = below + 2**step
        entry = ranks[(further + start - 1).clamp(max=last)]
        below = torch.where((entry < ids) & (further <= length), further, below)
    return below, (ranks[(below + start).clamp(max=last)] == ids) & (below < length)


def _replacement(group: Group, ids: Tensor, policy: str) -> Any:
    """What unknown ids become: the place of the rest, or the number of a composed id, never that of padding."""
    if policy == "rest":
        return group.constant([each.num_hot for each in group.specs])
    count = group.constant([each.num_composed for each in group.specs])
    number = mixed_ids(ids, count)
    skipped = [group.tables.rules[f][SKIPPED] for f in group.features]
    if max(skipped) < 0:
        return number
    return torch.where(number == group.constant(skipped), (number + 1) % count, number)


def _mixed(number: Tensor, bits: int) -> Tensor:
    """``renumbering.mixed_numbers`` of numbers in ``[0, 2**bits)``; ONNX has no shift of signed integers."""
    divisor = 2 ** (bits // 2 + 1)
    for factor in MIXING_FACTORS:
        number = ((number ^ (number // divisor)) * factor) & (2**bits - 1)
    return number ^ (number // divisor)


def _first_rest(spec: TableSpec) -> int:
    return spec.num_embeddings - spec.num_rest


def _map_start(tables: "Tables", table: int, j: int) -> int:
    """Where the index map of a table's j-th partition starts in ``maps``, which holds those of all tables in order."""
    before = [(t, i) for t, spec in enumerate(tables.specs) for i, p in enumerate(spec.partitions)]
    maps = [(key, tables.specs[key[0]].partitions[key[1]]) for key in before if key < (table, j)]
    return sum(part.index.shape[0] for _, part in maps if isinstance(part, ExplicitPartition))


def _rank_starts(tables: "Tables", table: int) -> tuple[int, int]:
    """Where a table's lists of hot and of cold ids start in ``ranks``, which holds those of all tables in order."""
    before = [ranks for ranks in tables.ranks_of[:table] if ranks is not None]
    start = sum(ranks.hot.shape[0] + ranks.cold.shape[0] for ranks in before)
    ranks = tables.ranks_of[table]
    assert ranks is not None
    return start, start + ranks.hot.shape[0]

"""Groups of features whose tables are stored alike: all that an exported program needs to look them up together.

The tables of a group share the operation, the number of partitions, the widths and the shape of their networks, so that
their ids ``[N, G]`` go through one chain of operators with one constant per feature. The j-th stored tables of all
features are concatenated. ``ops.rows`` defines what every step computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..id_rules import SKIPPED, UnknownIds
from ..ops.layout import Extent, pool_key
from ..partitions import ExplicitPartition, Partition
from ..paths import PathNetworks, path_scheme
from ..schemes import AnyPartition, TableSpec
from ..tables import Tables


@dataclass(frozen=True)
class JoinedTables:
    """Stored tables to be concatenated; two objects with the same name hold the same tables."""

    name: str
    tables: list[Tensor]  # numbers [rows, width]; if quantized, bytes [rows, pitch * bytes of a piece]
    starts: list[int] | None  # first row of each feature's table; None if all are 0
    pitch: int  # number of pieces of a row that are quantized separately


@dataclass(frozen=True)
class Buckets:
    """One partition of each feature: ``(number // stride) % size``, or ``maps[number]``.

    A field is None if no feature of the group needs it: all strides are 1, or no remainder changes anything.
    """

    strides: list[int] | None
    sizes: list[int] | None
    maps: JoinedTables | None


@dataclass(frozen=True)
class Level:
    """One level of path networks (section 4.1): which network an id goes through, and the layers of all networks."""

    buckets: Buckets
    weights: list[JoinedTables]  # per layer: [networks, in, out]
    biases: list[JoinedTables]


@dataclass(frozen=True)
class OwnRows:
    """Rows that are not composed: one per hot id, and one for the rest (``schemes.HotCold``)."""

    rows: JoinedTables
    num_hot: list[int]
    has_rest: list[int]  # 0 or 1
    rest_from: list[int]  # number of ids that do not belong to the rest
    num_listed: list[int]  # length of the list of cold ids; 0 in tables without a rest, whose cold ids are not listed
    hot: JoinedTables | None  # sorted lists of ids; None if ids are numbered by frequency
    cold: JoinedTables | None


@dataclass(frozen=True)
class FeatureGroup:
    """Features whose tables are stored alike."""

    features: list[int]  # positions in the module
    limits: list[int]  # number of ids
    raw: bool  # whether ids are raw, and hashed to ids of the table
    unknown_ids: UnknownIds  # how an id outside the table is treated
    num_composed: list[int]
    skipped: list[int] | None  # numbers of the padding ids, to which no unknown id is hashed
    padding: list[int] | None  # -1 for a table without padding; an id of the table even if ids are raw
    own_rows: OwnRows | None
    permutation: tuple[list[int], list[int], list[int]] | None  # multiplier, shift and modulus
    mixing: tuple[list[int], int] | None  # for a pool: the offset added to each table's numbers, and the mixed bits
    operation: str
    width: int  # output columns of a table
    buckets: list[Buckets]
    rows: list[JoinedTables]
    levels: list[Level]
    activation: str | None


def groups_of(tables: Tables) -> list[FeatureGroup]:
    """The groups of a module, ordered by their first features."""
    alike: dict[object, list[int]] = {}
    for feature, t in enumerate(tables.table_of):
        spec = tables.specs[t]
        explicit = tuple(isinstance(p, ExplicitPartition) for p in spec.partitions)
        path = path_scheme(spec)
        widths = tuple(width for _, width in spec.shapes)
        operation = spec.operation if len(spec.partitions) > 1 else "one table"
        own_rows = (spec.num_own > 0, tables.ranks_of[t] is not None, spec.num_composed > 0)
        networks = None if path is None else (path.hidden, path.activation)
        policy = (tables.raw_ids[t], tables.unknown[t])
        key = (operation, explicit, widths, own_rows, pool_key(tables.pools, spec), networks, policy)
        alike.setdefault(key, []).append(feature)
    return [group_of(tables, features) for features in alike.values()]


def group_of(tables: Tables, features: list[int]) -> FeatureGroup:
    """The group of some features of a module, whose tables must be stored alike."""
    members = [tables.table_of[feature] for feature in features]
    specs = [tables.specs[t] for t in members]
    padding = [-1 if (pad := tables.padding[t]) is None else pad for t in members]
    first = 1 if specs[0].num_own else 0  # the first stored table holds the ids' own rows
    spec = specs[0]
    networks = [n for n in tables.paths if isinstance(n, PathNetworks) and features[0] in n.members]
    mixing = None
    if spec.pool is not None:
        mixing, buckets, rows = _pool(tables, members)
    else:
        stored = range(len(tables.extents[members[0]]) - first)
        rows = [_stored(tables, members, first + j) for j in stored]
        buckets = [_buckets(specs, members, j) for j in stored]
    return FeatureGroup(
        features=features,
        limits=[spec.num_embeddings for spec in specs],
        raw=tables.raw_ids[members[0]],
        unknown_ids=tables.unknown[members[0]],
        num_composed=[spec.num_composed for spec in specs],
        skipped=_skipped(tables, features),
        padding=padding if any(pad >= 0 for pad in padding) else None,
        own_rows=_own_rows(tables, members) if first else None,
        permutation=_permutation(specs),
        mixing=mixing,
        operation=spec.operation,
        width=spec.embedding_dim * spec.num_vectors,
        buckets=buckets,
        rows=rows,
        levels=_levels(tables, networks[0], members) if networks else [],
        activation=networks[0].activation if networks else None,
    )


def joined_tables(group: FeatureGroup) -> list[JoinedTables]:
    """All tables that a group reads: stored rows, index maps, lists of ids, and layers of networks."""
    tables = [*group.rows, *(buckets.maps for buckets in group.buckets)]
    if group.own_rows is not None:
        tables += [group.own_rows.rows, group.own_rows.hot, group.own_rows.cold]
    for level in group.levels:
        tables += [level.buckets.maps, *level.weights, *level.biases]
    return [each for each in tables if each is not None]


def columns_in_order(groups: Sequence[FeatureGroup]) -> list[int]:
    """For each output column, with features in order, its position in the concatenated columns of the groups."""
    columns, first = {}, 0
    for group in groups:
        for feature in group.features:
            columns[feature] = range(first, first + group.width)
            first += group.width
    return [column for feature in sorted(columns) for column in columns[feature]]


def _skipped(tables: Tables, features: Sequence[int]) -> list[int] | None:
    if "id_rules" not in tables._buffers:
        return None
    skipped: list[int] = tables.id_rules[list(features), SKIPPED].tolist()
    return skipped if max(skipped) >= 0 else None


def _own_rows(tables: Tables, members: Sequence[int]) -> OwnRows:
    specs = [tables.specs[t] for t in members]
    lists = {t: ranks for t in members if (ranks := tables.ranks_of[t]) is not None}

    def joined(kind: str) -> JoinedTables | None:
        parts = {t: getattr(ranks, kind).long() for t, ranks in lists.items()}
        return _joined(f"ranks_{members[0]}_{kind}", parts, members) if parts else None

    return OwnRows(
        rows=_stored(tables, members, 0),
        num_hot=[spec.num_hot for spec in specs],
        has_rest=[int(spec.num_rest > 0) for spec in specs],
        rest_from=[spec.num_embeddings - spec.num_rest for spec in specs],
        num_listed=[spec.num_composed if spec.num_rest else 0 for spec in specs],
        hot=joined("hot"),
        cold=joined("cold"),
    )


def _permutation(specs: Sequence[TableSpec]) -> tuple[list[int], list[int], list[int]] | None:
    permutations = [spec.permutation for spec in specs]
    if not any(permutations):
        return None
    multipliers, shifts = [p.multiplier if p else 1 for p in permutations], [p.shift if p else 0 for p in permutations]
    return multipliers, shifts, [max(spec.num_composed, 1) for spec in specs]


def _pool(tables: Tables, members: Sequence[int]) -> tuple[tuple[list[int], int], list[Buckets], list[JoinedTables]]:
    """``mixing``, ``buckets`` and ``rows`` of a group whose tables share a pool."""
    key = pool_key(tables.pools, tables.specs[members[0]])
    numberings = [tables.pool_numbering(t) for t in members]
    extents = tables.pools[key]
    rows = [
        JoinedTables(f"pool_{key}_{j}", [_view(tables, extent)], None, extent.pitch) for j, extent in enumerate(extents)
    ]
    buckets = [Buckets(None, [extent.rows] * len(members), None) for extent in extents]
    return ([first for first, _ in numberings], numberings[0][1].bits), buckets, rows


def _stored(tables: Tables, members: Sequence[int], j: int) -> JoinedTables:
    """The j-th stored table of each member; a table that several features read is included once."""
    views = {t: _view(tables, tables.extents[t][j]) for t in members}
    return _joined(f"tables_{members[0]}_{j}", views, members, tables.extents[members[0]][j].pitch)


def _view(tables: Tables, extent: Extent) -> Tensor:
    tables.updates.flush_()
    return extent.of(tables.stored.detach())


def _joined(name: str, parts: dict[int, Tensor], members: Sequence[int], pitch: int = 1) -> JoinedTables:
    """Join one tensor per table, and note where the tensor of each member's table begins."""
    starts, end = {}, 0
    for t, part in parts.items():
        starts[t], end = end, end + len(part)
    return JoinedTables(name, list(parts.values()), [starts[t] for t in members] if len(parts) > 1 else None, pitch)


def _levels(tables: Tables, networks: PathNetworks, members: Sequence[int]) -> list[Level]:
    of_networks = list(dict.fromkeys(tables.table_of[feature] for feature in networks.members))
    specs = [tables.specs[t] for t in members]
    levels = []
    for level in range(len(networks.counts)):
        counts = {t: tables.specs[t].path_sizes[level] for t in of_networks}
        weights, biases = (
            [_layer(f"path_{kind}_{members[0]}_{i}", values[i], counts, members) for i in networks.layers_of(level)]
            for kind, values in (("weights", networks.weights), ("biases", networks.biases))
        )
        levels.append(Level(_buckets(specs, members, level + 1), weights, biases))
    return levels


def _layer(name: str, values: Tensor, counts: Mapping[int, int], members: Sequence[int]) -> JoinedTables:
    """One layer of the members' networks; ``counts`` says how many networks of each table are in ``values``."""
    parts = dict(zip(counts, values.detach().split(list(counts.values())), strict=True))
    return _joined(name, {t: parts[t] for t in members}, members)


def _buckets(specs: Sequence[TableSpec], members: Sequence[int], j: int) -> Buckets:
    """The j-th partition of each member."""
    partitions: list[AnyPartition] = [spec.partitions[j] for spec in specs]
    maps = {t: p.index for t, p in zip(members, partitions, strict=True) if isinstance(p, ExplicitPartition)}
    if maps:
        return Buckets(None, None, _joined(f"maps_{members[0]}_{j}", maps, members))
    closed = [p for p in partitions if isinstance(p, Partition)]
    wraps = any(p.stride * p.size < spec.num_composed for p, spec in zip(closed, specs, strict=True))
    strides = [p.stride for p in closed]
    return Buckets(strides if max(strides) > 1 else None, [p.size for p in closed] if wraps else None, None)

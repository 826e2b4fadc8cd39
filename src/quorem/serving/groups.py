"""Features whose tables are stored alike as one group: what an exported program needs to look them all up together.

The tables of a group share the operation, the number of partitions, the widths and the networks' shape, so that their
ids ``[N, G]`` go through one chain of operators with a constant per feature. The rows of their j-th tables follow each
other. ``ops.rows`` is the meaning of every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..ops.layout import Extent, pool_key
from ..partitions import ExplicitPartition, Partition
from ..paths import PathNetworks, path_scheme
from ..renumbering import Mixing
from ..schemes import AnyPartition, TableSpec
from ..store.model_file import tables_of
from ..tables import Tables

Unknown = Literal["nan", "zeros"]  # the vector of an id that is outside of its table


@dataclass(frozen=True)
class JoinedTables:
    """Stored tables that follow each other; two with one name are the same."""

    name: str
    tables: list[Tensor]  # numbers [rows, width]; where they are quantized, bytes [rows, pitch * bytes of a piece]
    starts: list[int] | None  # first row of each feature's table; None where all are 0
    pitch: int  # pieces of a row that are quantized alone


@dataclass(frozen=True)
class Buckets:
    """One partition of each feature: ``(number // stride) % size``, or ``maps[number]``.

    None stands for what no feature of the group needs: a stride of 1, a remainder that changes nothing.
    """

    strides: list[int] | None
    sizes: list[int] | None
    maps: JoinedTables | None


@dataclass(frozen=True)
class Level:
    """One level of path networks (section 4.1): which network an id takes, and the layers of all of them."""

    buckets: Buckets
    weights: list[JoinedTables]  # of each layer: [networks, in, out]
    biases: list[JoinedTables]


@dataclass(frozen=True)
class OwnRows:
    """Ids with rows of their own: hot ids, and one row for the rest (``schemes.HotCold``)."""

    rows: JoinedTables
    num_hot: list[int]
    has_rest: list[int]  # 0 or 1
    rest_from: list[int]  # number of ids that are not of the rest
    num_composed: list[int]
    hot: JoinedTables | None  # rising lists of ids; None where ids come by frequency
    cold: JoinedTables | None


@dataclass(frozen=True)
class FeatureGroup:
    """Features whose tables are stored alike."""

    features: list[int]  # as positions in the module
    limits: list[int]  # number of ids
    raw: bool  # any id is taken, and mixed into the table's
    unknown: str  # what an id outside the table is (``id_rules``)
    num_composed: list[int]
    padding: list[int] | None  # -1 for a table without; of raw ids, mixed
    own: OwnRows | None
    permutation: tuple[list[int], list[int], list[int]] | None  # multiplier, shift and modulus
    mixing: tuple[list[int], int] | None  # of a pool: what is added to each number, and the bits that are mixed
    operation: str
    width: int  # columns that come out of a table
    buckets: list[Buckets]
    rows: list[JoinedTables]
    levels: list[Level]
    activation: str | None


def groups_of(tables: Tables) -> list[FeatureGroup]:
    """The groups of a module, in the order of each one's first feature."""
    alike: dict[object, list[int]] = {}
    for feature, t in enumerate(tables.table_of):
        spec = tables.specs[t]
        explicit = tuple(isinstance(p, ExplicitPartition) for p in spec.partitions)
        path = path_scheme(spec)
        widths = tuple(width for _, width in spec.shapes)
        operation = spec.operation if len(spec.partitions) > 1 else "one table"
        own = (spec.num_own > 0, tables.ranks_of[t] is not None, spec.num_composed > 0)
        networks = None if path is None else (path.hidden, path.activation)
        policy = (tables.raw_ids[t], tables.unknown[t])
        key = (operation, explicit, widths, own, pool_key(tables.pools, spec), networks, policy)
        alike.setdefault(key, []).append(feature)
    return [group_of(tables, features) for features in alike.values()]


def group_of(tables: Tables, features: list[int]) -> FeatureGroup:
    """Some features of a module, whose tables must be stored alike, as a group."""
    members = [tables.table_of[feature] for feature in features]
    specs = [tables.specs[t] for t in members]
    padding = [-1 if (pad := tables.padding[t]) is None else pad for t in members]
    first = 1 if specs[0].num_own else 0  # what is stored for a table begins with its own rows
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
        unknown=tables.unknown[members[0]],
        num_composed=[spec.num_composed for spec in specs],
        padding=padding if any(pad >= 0 for pad in padding) else None,
        own=_own(tables, members) if first else None,
        permutation=_permutation(specs),
        mixing=mixing,
        operation=spec.operation,
        width=spec.embedding_dim * spec.num_vectors,
        buckets=buckets,
        rows=rows,
        levels=_levels(tables, networks[0], members) if networks else [],
        activation=networks[0].activation if networks else None,
    )


def columns_in_order(groups: Sequence[FeatureGroup]) -> list[int]:
    """Where the columns of each feature, in order, lie among the groups' columns end to end."""
    columns, place = {}, 0
    for group in groups:
        for feature in group.features:
            columns[feature] = range(place, place + group.width)
            place += group.width
    return [column for feature in sorted(columns) for column in columns[feature]]


def check_options(model: nn.Module, unknown: str, jagged: bool, sample_weights: bool) -> None:
    """Raise ValueError unless the options of an export fit a model."""
    tables = tables_of(model)
    if unknown not in get_args(Unknown):
        raise ValueError(f"unknown ({unknown!r}) must be {' or '.join(map(repr, get_args(Unknown)))}")
    pools = isinstance(tables, EmbeddingBag) or (isinstance(tables, EmbeddingCollection) and jagged)
    if jagged and not pools:
        raise ValueError(f"jagged ({jagged}) must be False for {type(tables).__name__}, which does not pool")
    if sample_weights and (not pools or tables.mode == "max"):
        raise ValueError(f"sample_weights ({sample_weights}) must be False: nothing is pooled by a weighted sum")


def output_shape(tables: Tables) -> list[int]:
    """The shape of a module's output after the batch."""
    if isinstance(tables, EmbeddingCollection):
        dims = tables.embedding_dims
        return [len(dims), dims[0]] if len(set(dims)) == 1 else [sum(dims)]
    spec = tables.specs[0]
    return [spec.num_vectors, spec.embedding_dim] if spec.operation == "feature" else [spec.embedding_dim]


def _own(tables: Tables, members: Sequence[int]) -> OwnRows:
    specs, lists = [tables.specs[t] for t in members], [tables.ranks_of[t] for t in members]
    hot = cold = None
    if lists[0] is not None:
        name = f"ranks_{members[0]}"
        hot = _joined(f"{name}_hot", {t: r.hot.long() for t, r in zip(members, lists, strict=True) if r}, members)
        cold = _joined(f"{name}_cold", {t: r.cold.long() for t, r in zip(members, lists, strict=True) if r}, members)
    return OwnRows(
        rows=_stored(tables, members, 0),
        num_hot=[spec.num_hot for spec in specs],
        has_rest=[int(spec.num_rest > 0) for spec in specs],
        rest_from=[spec.num_embeddings - spec.num_rest for spec in specs],
        num_composed=[spec.num_composed for spec in specs],
        hot=hot,
        cold=cold,
    )


def _permutation(specs: Sequence[TableSpec]) -> tuple[list[int], list[int], list[int]] | None:
    permutations = [spec.permutation for spec in specs]
    if not any(permutations):
        return None
    multipliers, shifts = [p.multiplier if p else 1 for p in permutations], [p.shift if p else 0 for p in permutations]
    return multipliers, shifts, [max(spec.num_composed, 1) for spec in specs]


def _pool(tables: Tables, members: Sequence[int]) -> tuple[tuple[list[int], int], list[Buckets], list[JoinedTables]]:
    """What is added to the numbers of each table of a pool and the bits that are mixed; its partitions; its rows."""
    key = pool_key(tables.pools, tables.specs[members[0]])
    sharing = [t for t, spec in enumerate(tables.specs) if pool_key(tables.pools, spec) == key]
    counts = [tables.specs[t].num_composed for t in sharing]
    before = {t: sum(counts[:place]) for place, t in enumerate(sharing)}
    bits = Mixing.covering(max(sum(counts), 2)).bits
    extents = tables.pools[key]
    rows = [
        JoinedTables(f"pool_{key}_{j}", [_view(tables, extent)], None, extent.pitch) for j, extent in enumerate(extents)
    ]
    buckets = [Buckets(None, [extent.rows] * len(members), None) for extent in extents]
    return ([before[t] for t in members], bits), buckets, rows


def _stored(tables: Tables, members: Sequence[int], j: int) -> JoinedTables:
    """The j-th stored table of each member; one that several features read is there once."""
    views = {t: _view(tables, tables.extents[t][j]) for t in members}
    return _joined(f"tables_{members[0]}_{j}", views, members, tables.extents[members[0]][j].pitch)


def _view(tables: Tables, extent: Extent) -> Tensor:
    tables.updates.flush_()
    return extent.of(tables.stored.detach())


def _joined(name: str, parts: dict[int, Tensor], members: Sequence[int], pitch: int = 1) -> JoinedTables:
    """Tensors by table, end to end, and where that of each member begins."""
    starts, end = {}, 0
    for t, part in parts.items():
        starts[t], end = end, end + len(part)
    return JoinedTables(name, list(parts.values()), [starts[t] for t in members] if len(parts) > 1 else None, pitch)


def _levels(tables: Tables, networks: PathNetworks, members: Sequence[int]) -> list[Level]:
    per_level = len(networks.weights) // len(networks.counts)
    of_networks = list(dict.fromkeys(tables.table_of[feature] for feature in networks.members))
    levels = []
    for level in range(len(networks.counts)):
        slices, end = {}, 0
        for t in of_networks:
            end, start = end + tables.specs[t].path_sizes[level], end
            slices[t] = slice(start, end)
        layers = range(level * per_level, (level + 1) * per_level)
        weights, biases = (
            [
                _joined(f"path_{kind}_{members[0]}_{i}", {t: values[i].detach()[slices[t]] for t in members}, members)
                for i in layers
            ]
            for kind, values in (("weights", networks.weights), ("biases", networks.biases))
        )
        levels.append(Level(_buckets([tables.specs[t] for t in members], members, level + 1), weights, biases))
    return levels


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

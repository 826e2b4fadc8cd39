"""Tables that are stored alike as one group: what an exported program needs to look them all up together.

A group's tables share the operation, the number of partitions, the widths and the networks' shape, so that their ids
``[N, G]`` go through one chain of operators with a constant per table. The rows of their j-th tables follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from ..bags import EmbeddingBag
from ..collection import EmbeddingCollection
from ..partitions import ExplicitPartition, Partition
from ..paths import PathNetworks
from ..schemes import AnyPartition, Path, TableSpec
from ..store.model_file import tables_of
from ..tables import Tables

Unknown = Literal["nan", "zeros"]  # the vector of an id that is outside of its table


@dataclass(frozen=True)
class Buckets:
    """One partition of each table: ``start + (id // stride) % size``, or ``start + maps[map_start + id]``.

    None stands for what no table of the group needs: a stride of 1, a remainder that changes nothing.
    """

    strides: list[int] | None
    sizes: list[int] | None
    maps: list[Tensor] | None
    map_starts: list[int] | None
    starts: list[int] | None  # first row, or network, of each table


@dataclass(frozen=True)
class Level:
    """One level of path networks (section 4.1): which network an id takes, and the layers of all of them."""

    buckets: Buckets
    weights: list[list[Tensor]]  # [layer][table]: [networks of the table, in, out]
    biases: list[list[Tensor]]


@dataclass(frozen=True)
class Group:
    """Tables that are stored alike."""

    features: list[int]  # as positions in the module
    limits: list[int]  # number of ids
    permutations: tuple[list[int], list[int]] | None  # multiplier and shift
    padding: list[int] | None  # -1 for a table without
    operation: str
    width: int  # columns that come out of a table
    buckets: list[Buckets]
    rows: list[list[Tensor]]  # [partition][table]
    levels: list[Level]
    activation: str | None


def groups_of(tables: Tables) -> list[Group]:
    """The groups of a module, in the order of each one's first table."""
    alike: dict[object, list[int]] = {}
    for feature, spec in enumerate(tables.specs):
        explicit = tuple(isinstance(p, ExplicitPartition) for p in spec.partitions)
        activation = spec.scheme.activation if isinstance(spec.scheme, Path) else None
        widths = tuple(width for _, width in spec.shapes)
        operation = spec.operation if len(widths) > 1 else "one table"
        alike.setdefault((operation, explicit, widths, spec.hidden, activation), []).append(feature)
    return [group_of(tables, features) for features in alike.values()]


def group_of(tables: Tables, features: list[int]) -> Group:
    """Some tables of a module, which must be stored alike, as a group."""
    specs = [tables.specs[feature] for feature in features]
    rows = [list(same) for same in zip(*(tables.tables(feature) for feature in features), strict=True)]
    permutations = [spec.permutation for spec in specs]
    pairs = ([p.multiplier if p else 1 for p in permutations], [p.shift if p else 0 for p in permutations])
    padding = [-1 if (pad := tables.padding[feature]) is None else pad for feature in features]
    networks = [n for n in tables.paths if isinstance(n, PathNetworks) and features[0] in n.members]
    return Group(
        features=features,
        limits=[spec.num_embeddings for spec in specs],
        permutations=pairs if any(permutations) else None,
        padding=padding if any(pad >= 0 for pad in padding) else None,
        operation=specs[0].operation,
        width=specs[0].embedding_dim * specs[0].num_vectors,
        buckets=[_buckets(specs, j, [len(table) for table in same]) for j, same in enumerate(rows)],
        rows=[[table.detach() for table in same] for same in rows],
        levels=_levels(tables, networks[0], features) if networks else [],
        activation=networks[0].activation if networks else None,
    )


def columns_in_order(groups: Sequence[Group]) -> list[int]:
    """Where the columns of each feature, in order, lie among the groups' columns end to end."""
    first, place = {}, 0
    for group in groups:
        for feature in group.features:
            first[feature] = range(place, place + group.width)
            place += group.width
    return [column for feature in sorted(first) for column in first[feature]]


def check_options(model: nn.Module, unknown: str, jagged: bool, sample_weights: bool) -> None:
    """Raise ValueError unless the options of an export fit a model."""
    tables = tables_of(model)
    if tables.bits or any(spec.num_own or spec.pool is not None for spec in tables.specs):
        raise ValueError(f"{type(tables).__name__} must have tables of floats, without HotCold, to be exported")
    if len(tables.features) != len(tables.names):
        raise ValueError(f"{type(tables).__name__} must have tables of one feature each to be exported")
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


def _levels(tables: Tables, networks: PathNetworks, features: list[int]) -> list[Level]:
    specs = [tables.specs[feature] for feature in features]
    per_level = len(networks.weights) // len(networks.counts)
    levels = []
    for level in range(len(networks.counts)):
        sizes = [spec.path_sizes[level] for spec in specs]
        slices = []
        for feature, size in zip(features, sizes, strict=True):
            before = networks.members[: networks.members.index(feature)]
            first = sum(tables.specs[other].path_sizes[level] for other in before)
            slices.append(slice(first, first + size))
        layers = range(level * per_level, (level + 1) * per_level)
        weights = [[networks.weights[i].detach()[own] for own in slices] for i in layers]
        biases = [[networks.biases[i].detach()[own] for own in slices] for i in layers]
        levels.append(Level(_buckets(specs, level + 1, sizes), weights, biases))
    return levels


def _buckets(specs: Sequence[TableSpec], j: int, sizes: Sequence[int]) -> Buckets:
    """The j-th partition of each table, whose rows (or networks) are ``sizes`` in number and follow each other."""
    partitions: list[AnyPartition] = [spec.partitions[j] for spec in specs]
    starts = _starts(sizes)
    maps = [p.index for p in partitions if isinstance(p, ExplicitPartition)]
    if maps:
        return Buckets(None, None, maps, _starts([len(index) for index in maps]), starts)
    closed = [p for p in partitions if isinstance(p, Partition)]
    wraps = any(p.stride * p.size < spec.num_embeddings for p, spec in zip(closed, specs, strict=True))
    strides = [p.stride for p in closed]
    return Buckets(
        strides if max(strides) > 1 else None, [p.size for p in closed] if wraps else None, None, None, starts
    )


def _starts(sizes: Sequence[int]) -> list[int] | None:
    """Where each of several parts begins; None where all begin at 0, that is, where there is one."""
    return [sum(sizes[:place]) for place in range(len(sizes))] if len(sizes) > 1 else None

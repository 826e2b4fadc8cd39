"""From ids to row numbers of TorchRec's tables: a parameter-free module, which input pipelines may run ahead."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...checks import InvalidIdMode, check_ids
from ...schemes import TableSpec


def row_numbers(spec: TableSpec, ids: Tensor) -> Tensor:
    """The rows that each id reads, ``[N, K]``, counted over the stored tables of ``spec`` one after another.

    A path-based table stores the rows of its first partition only.

    >>> from quorem import QR
    >>> row_numbers(QR(4, operation="add").spec(100, 8), torch.tensor([0, 26, 99]))
    tensor([[ 0, 25],
            [ 1, 26],
            [24, 28]])
    """
    return torch.stack([rows + base for rows, base in zip(_rows(spec, ids), _bases(spec), strict=True)], 1)


def _rows(spec: TableSpec, ids: Tensor) -> list[Tensor]:
    """The row ``[N]`` of each stored table."""
    ids = ids if spec.permutation is None else spec.permutation(ids)
    return [partition(ids) for partition, _ in zip(spec.partitions, spec.shapes, strict=False)]


def _bases(spec: TableSpec) -> list[int]:
    """The row numbers at which the stored tables begin."""
    return [sum(rows for rows, _ in spec.shapes[:j]) for j in range(len(spec.shapes))]


@dataclass(frozen=True)
class Feature:
    """One feature of a collection: its table, and the keys under which TorchRec looks its rows up.

    Tables that add, and single ones, are one table of TorchRec's, ``merged``, with K row numbers for each id. The
    others are a table and a key for each partition.
    """

    name: str
    table: str
    spec: TableSpec
    padding: int | None

    @property
    def merged(self) -> bool:
        """Whether all stored rows of the table are in one table of TorchRec's."""
        return self.spec.operation == "add" or len(self.spec.shapes) == 1

    @property
    def summed(self) -> bool:
        """Whether a bag of row numbers, summed, is the bag of the ids: all but ``mult`` and path-based tables."""
        return self.spec.hidden is None and (self.merged or self.spec.operation != "mult")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the row numbers."""
        return (self.name,) if self.merged else tuple(f"{self.name}:{j}" for j in range(len(self.spec.shapes)))

    @property
    def stored(self) -> tuple["StoredTable", ...]:
        """TorchRec's tables for each key."""
        spec = self.spec
        if self.merged:
            return (StoredTable(self.table, sum(rows for rows, _ in spec.shapes), spec.shapes[0][1]),)
        return tuple(StoredTable(f"{self.table}:{j}", *shape) for j, shape in enumerate(spec.shapes))

    @property
    def width(self) -> int:
        """Columns of the vector that comes out: K D for feature generation."""
        return self.spec.embedding_dim * self.spec.num_vectors


class StoredTable(NamedTuple):
    """A table of TorchRec's."""

    name: str
    num_rows: int
    width: int


class Ids(NamedTuple):
    """A feature's ids in a batch."""

    ids: Tensor  # [N]
    lengths: Tensor  # [B]
    weights: Tensor | None  # [N]
    used: Tensor | None  # bool [N, K]: which rows are read; None where all are


class RowBatch(NamedTuple):
    """A batch of row numbers, as TorchRec's collections take them."""

    bags: KeyedJaggedTensor | None
    vectors: tuple[KeyedJaggedTensor, ...]  # one for each collection of unpooled vectors
    features: tuple[Ids, ...]


class RowNumbers(nn.Module):
    """Maps the ids of a KeyedJaggedTensor to row numbers, whatever the order of its keys.

    An id out of range raises IndexError on the CPU. On a GPU it reads no row, hence gives zeros, and
    ``on_invalid_id`` says whether that is reported. The padding id reads no row either.

    Args:
        features: of the collection, in the order of its output.
        bags: keys that are looked up and pooled by TorchRec.
        vectors: keys of each collection of unpooled vectors.
        weighted: whether the batches have weights.
        on_invalid_id: as in ``quorem.Embedding``.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        bags: Sequence[str],
        vectors: Sequence[Sequence[str]],
        weighted: bool,
        on_invalid_id: InvalidIdMode,
    ) -> None:
        super().__init__()
        self.features, self.weighted, self.on_invalid_id = tuple(features), weighted, on_invalid_id
        self.bags, self.vectors = list(bags), [list(keys) for keys in vectors]
        self.warned = False

    def forward(self, features: KeyedJaggedTensor) -> RowBatch:
        """The row numbers of a batch.

        Raises:
            KeyError: if a feature is missing.
            ValueError: if the batch has no weights but must, or a batch size for each key.
            TypeError: if the ids are not integers.
            IndexError: if an id on the CPU is outside its table.
        """
        read = self._read(features)
        jagged: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        for feature, batch in zip(self.features, read, strict=True):
            jagged.update(zip(feature.keys, _jagged(feature, batch), strict=True))
        stride = features.stride()
        bags = _keyed(self.bags, jagged, stride) if self.bags else None
        vectors = tuple(_keyed(keys, jagged, stride, weighted=False) for keys in self.vectors)
        return RowBatch(bags, vectors, read)

    def _read(self, features: KeyedJaggedTensor) -> tuple[Ids, ...]:
        """Each feature's ids, checked."""
        keys = features.keys()
        if missing := [f.name for f in self.features if f.name not in keys]:
            raise KeyError(f"features has keys {keys} but must have {', '.join(map(repr, missing))}")
        if self.weighted and features.weights_or_none() is None:
            raise ValueError("features must have weights: the collection was made with is_weighted=True")
        if features.variable_stride_per_key():
            raise ValueError("features must have one batch size for all keys")
        check_ids(features.values(), "features")
        batches: list[Ids] = []
        masks: dict[int, Tensor] = {}
        counts: list[Tensor] = []
        for j, f in enumerate(self.features):
            jagged = features[f.name]
            weights = jagged.weights() if self.weighted else None
            batches.append(Ids(jagged.values(), jagged.lengths(), weights, None))
            mask, outside = _unread(f, jagged.values())
            if mask is not None:
                masks[j] = mask
                counts.append(torch.stack([mask.sum(), outside]))
        numbers = torch.stack(counts).tolist() if counts else []  # the one time that it waits for a GPU
        num_outside = sum(outside for _, outside in numbers)
        for (j, mask), (num_unread, _) in zip(masks.items(), numbers, strict=True):
            if num_unread:
                used = mask.logical_not()[:, None].expand(-1, len(self.features[j].spec.shapes))
                batches[j] = batches[j]._replace(used=used)
        if num_outside:
            self._report(num_outside)
        return tuple(batches)

    def _report(self, num_outside: int) -> None:
        """Do what ``on_invalid_id`` says about ids that are not on the CPU."""
        tables = ", ".join(dict.fromkeys(f"table {f.table}" for f in self.features))
        if self.on_invalid_id == "raise":
            raise IndexError(f"{num_outside} ids are out of range in {tables}")
        if self.on_invalid_id == "warn" and not self.warned:
            self.warned = True
            warnings.warn(f"{num_outside} ids out of range in {tables}: each gave a vector of zeros", stacklevel=2)


def raises_at_once(ids: Tensor) -> bool:
    """Whether an id out of range raises IndexError: on a GPU, looking for one would have to wait for it."""
    return ids.device.type == "cpu"


def _unread(feature: Feature, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """Which ids ``[N]`` read no row, None where all do for certain, and the number of ids out of range."""
    limit, padding = feature.spec.num_embeddings, feature.padding
    outside = torch.zeros((), dtype=torch.int64, device=ids.device)
    if raises_at_once(ids):
        low, high = ids.aminmax() if len(ids) else (0, 0)
        if low < 0 or high >= limit:
            value = int(ids[(ids < 0) | (ids >= limit)][0])
            raise IndexError(f"id {value} is outside [0, {limit}) of table {feature.table}")
        return None if padding is None else ids == padding, outside
    invalid = (ids < 0) | (ids >= limit)
    return invalid if padding is None else invalid | (ids == padding), invalid.sum()


def _jagged(feature: Feature, batch: Ids) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Row numbers, lengths and weights of each of the feature's keys."""
    ids, lengths, weights, used = batch
    if used is not None:
        ids = ids.clamp(0, feature.spec.num_embeddings - 1)  # ids out of range are dropped, but are partitioned first
    if feature.merged:
        rows = row_numbers(feature.spec, ids)
        if weights is not None:
            weights = weights[:, None].expand(rows.shape)
        if used is None:
            return [(rows.flatten(), lengths * rows.shape[1], None if weights is None else weights.flatten())]
        return [(rows[used], lengths_of(used.sum(1), lengths), None if weights is None else weights[used])]
    columns = _rows(feature.spec, ids)
    if used is None:
        return [(rows, lengths, weights) for rows in columns]
    return [
        (rows[mask], lengths_of(mask, lengths), None if weights is None else weights[mask])
        for rows, mask in zip(columns, used.unbind(1), strict=True)
    ]


def lengths_of(counts: Tensor, lengths: Tensor) -> Tensor:
    """The sum of ``counts`` ``[N]`` over each bag, of ``lengths`` ``[B]``."""
    ends = nn.functional.pad(counts.cumsum(0), (1, 0))
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return ends[bounds].diff().to(lengths.dtype)


def _keyed(
    keys: list[str], jagged: dict[str, tuple[Tensor, Tensor, Tensor | None]], stride: int, weighted: bool = True
) -> KeyedJaggedTensor:
    """The batch of some keys. TorchRec takes no empty batch: it becomes one of a single sample without ids."""
    values, lengths, weights = zip(*(jagged[key] for key in keys), strict=True)
    if not stride:
        stride, lengths = 1, tuple(length.new_zeros(1) for length in lengths)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weighted and weights[0] is not None else None,
        stride=stride,
        length_per_key=[len(v) for v in values],
    )

"""Map ids to row numbers of TorchRec's tables, in a module without parameters that input pipelines may run early."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...checks import InvalidIdMode, check_ids
from ..features import Feature, StoredTable
from ..shards import Shards


class Ids(NamedTuple):
    """A feature's ids in a batch."""

    ids: Tensor  # [N]; the distinct ids of the batch where rows are sent once
    lengths: Tensor  # [B]
    weights: Tensor | None  # one for each id of the bags
    used: Tensor | None = None  # bool [N, K]: which parts of the table each id reads; None where it reads all
    inverse: Tensor | None = None  # where rows are sent once: for each id of the bags, its position in ``ids``
    positions: tuple[Tensor, ...] = ()  # and for each part, the positions among its shard's rows of the rows read


class RowBatch(NamedTuple):
    """A batch of row numbers, as TorchRec's collections take them."""

    bags: KeyedJaggedTensor | None
    vectors: tuple[KeyedJaggedTensor, ...]  # one for each collection of unpooled vectors, or of shards
    features: tuple[Ids, ...]
    id_lists: Tensor  # the lists of hot and cold ids


class Jagged(NamedTuple):
    """The row numbers of one key."""

    values: Tensor
    lengths: Tensor
    weights: Tensor | None


class RowNumbers(nn.Module):
    """Maps the ids of a KeyedJaggedTensor to row numbers, whatever the order of its keys.

    An id out of range raises IndexError on the CPU. On a GPU it reads no row, so its vector is zero, and
    ``on_invalid_id`` says whether that is reported. The padding id reads no row either.

    Args:
        features: the features of the collection, in the order of its output.
        id_lists: the lists of hot and cold ids.
        bags: keys that TorchRec looks up and pools.
        vectors: keys of each collection of unpooled vectors.
        weighted: whether the batches have weights.
        on_invalid_id: as in ``quorem.Embedding``.
    """

    id_lists: Tensor

    def __init__(
        self,
        features: Sequence[Feature],
        id_lists: Tensor,
        bags: Sequence[str],
        vectors: Sequence[Sequence[str]],
        weighted: bool,
        on_invalid_id: InvalidIdMode,
    ) -> None:
        super().__init__()
        self.features, self.weighted = tuple(features), weighted
        self.on_invalid_id: InvalidIdMode = on_invalid_id
        self.bags, self.vectors = list(bags), [list(keys) for keys in vectors]
        self.warned = False
        self.register_buffer("id_lists", id_lists, persistent=False)

    def forward(self, features: KeyedJaggedTensor) -> RowBatch:
        """The row numbers of a batch.

        Raises:
            KeyError: if a feature is missing.
            ValueError: if weights are missing, or keys have different batch sizes.
            TypeError: if the ids are not integers.
            IndexError: if an id on the CPU is outside its table.
        """
        self._check(features)
        if self.id_lists.device != features.device():
            self.id_lists = self.id_lists.to(features.device())
        batches, rows = self._ids(features), []
        for i, (f, unread) in enumerate(
            zip(self.features, self._unread([batch.ids for batch in batches]), strict=True)
        ):
            ids = batches[i].ids if unread is None else batches[i].ids.clamp(0, f.spec.num_embeddings - 1)
            reads = f.reads(ids, self.id_lists)
            used = reads.used
            if unread is not None:
                read = unread.logical_not()[:, None].expand(-1, len(reads.rows))
                used = read if used is None else used & read
            batches[i] = batches[i]._replace(used=used)
            rows.append(reads.rows)
        return self._row_batch(batches, rows, features.stride())

    def _ids(self, features: KeyedJaggedTensor) -> list[Ids]:
        """Each feature's ids."""
        batches = []
        for f in self.features:
            jagged = features[f.name]
            weights = jagged.weights() if self.weighted else None
            batches.append(Ids(f.ids_of_table(jagged.values()), jagged.lengths(), weights))
        return batches

    def _row_batch(self, batches: list[Ids], rows: list[list[Tensor]], stride: int) -> RowBatch:
        """The row numbers under TorchRec's keys; ``rows`` has, for each feature and part, the row of each id."""
        jagged: dict[str, Jagged] = {}
        for f, batch, of_parts in zip(self.features, batches, rows, strict=True):
            jagged.update(zip(f.keys, _jagged(f, batch, of_parts), strict=True))
        bags = _keyed(self.bags, jagged, stride) if self.bags else None
        vectors = tuple(_keyed(keys, jagged, stride, weighted=False) for keys in self.vectors)
        return RowBatch(bags, vectors, tuple(batches), self.id_lists)

    def _check(self, features: KeyedJaggedTensor) -> None:
        keys = features.keys()
        if missing := [f.name for f in self.features if f.name not in keys]:
            raise KeyError(f"features has keys {keys} but must have {', '.join(map(repr, missing))}")
        if self.weighted and features.weights_or_none() is None:
            raise ValueError("features must have weights: the collection was made with is_weighted=True")
        if features.variable_stride_per_key():
            raise ValueError("features must have one batch size for all keys")
        check_ids(features.values(), "features")

    @property
    def stored(self) -> list[StoredTable]:
        """TorchRec's tables."""
        return list({stored.name: stored for f in self.features for stored in f.stored}.values())

    def _unread(self, ids: Sequence[Tensor]) -> list[Tensor | None]:
        """For each feature, which of its ids are padding or out of range, so that they read no row; None if none is."""
        masks: dict[int, Tensor] = {}
        counts: list[Tensor] = []
        for j, f in enumerate(self.features):
            mask, outside = _unread(f, ids[j])
            if mask is not None:
                masks[j] = mask
                counts.append(torch.stack([mask.sum(), outside]))
        numbers = torch.stack(counts).tolist() if counts else []  # the only place that waits for the GPU
        if num_outside := sum(outside for _, outside in numbers):
            self._report(num_outside)
        unread = {j: mask for (j, mask), (count, _) in zip(masks.items(), numbers, strict=True) if count}
        return [unread.get(j) for j in range(len(self.features))]

    def _report(self, num_outside: int) -> None:
        """Handle ids out of range on a GPU as ``on_invalid_id`` says."""
        tables = ", ".join(dict.fromkeys(f"table {f.table}" for f in self.features))
        if self.on_invalid_id == "raise":
            raise IndexError(f"{num_outside} ids are out of range in {tables}")
        if self.on_invalid_id == "warn" and not self.warned:
            self.warned = True
            warnings.warn(f"{num_outside} ids out of range in {tables}: each gave a vector of zeros", stacklevel=2)


class UniqueRows(RowNumbers):
    """Maps ids to the distinct rows of a batch, in the few TorchRec tables that contain all rows (``shards``).

    A rank requests the distinct rows of its batch, and composes and pools them itself. So ids that occur several times
    are sent once, and so are rows that many ids share.

    Args:
        features: the features of the collection, in the order of its output.
        id_lists: the lists of hot and cold ids.
        shards: where the rows are.
        weighted: whether the batches have weights.
        on_invalid_id: as in ``quorem.Embedding``.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        id_lists: Tensor,
        shards: Shards,
        weighted: bool,
        on_invalid_id: InvalidIdMode,
    ) -> None:
        keys = [[table.name for table in group] for group in shards.groups]
        super().__init__(features, id_lists, [], keys, weighted, on_invalid_id)
        self.shards = shards

    @property
    def stored(self) -> list[StoredTable]:
        """The shards."""
        return [table for group in self.shards.groups for table in group]

    def _ids(self, features: KeyedJaggedTensor) -> list[Ids]:
        """Each feature's distinct ids."""
        batches = []
        for batch in super()._ids(features):
            ids, inverse = torch.unique(batch.ids, return_inverse=True)
            batches.append(batch._replace(ids=ids, inverse=inverse))
        return batches

    def _row_batch(self, batches: list[Ids], rows: list[list[Tensor]], stride: int) -> RowBatch:
        """The distinct rows of each shard, each in a bag of its own."""
        read: dict[tuple[int, int], dict[tuple[int, int], Tensor]] = {}  # by group and shard, then by feature and part
        for i, (f, batch) in enumerate(zip(self.features, batches, strict=True)):
            for j, (part, numbers) in enumerate(zip(f.parts, rows[i], strict=True)):
                location = self.shards.locations[part.name]
                numbers = (numbers if batch.used is None else numbers[batch.used[:, j]]) + location.base
                read.setdefault((location.group, location.shard), {})[i, j] = numbers.long()
        distinct: dict[tuple[int, int], Tensor] = {}
        positions: dict[tuple[int, int], Tensor] = {}
        for shard, of_parts in read.items():
            distinct[shard], inverse = torch.unique(torch.cat(list(of_parts.values())), return_inverse=True)
            positions |= zip(of_parts, inverse.split([len(numbers) for numbers in of_parts.values()]), strict=True)
        for i, f in enumerate(self.features):
            batches[i] = batches[i]._replace(positions=tuple(positions[i, j] for j in range(len(f.parts))))
        keyed = tuple(
            _one_row_each(tables, [distinct[group, shard] for shard in range(len(tables))])
            for group, tables in enumerate(self.shards.groups)
        )
        return RowBatch(None, keyed, tuple(batches), self.id_lists)


def _one_row_each(tables: Sequence[StoredTable], rows: list[Tensor]) -> KeyedJaggedTensor:
    """Row numbers of some shards as bags of one row; shards with fewer rows than others end with empty bags."""
    counts = [len(each) for each in rows]
    stride = max(1, *counts)  # TorchRec does not support an empty batch
    lengths = torch.zeros(len(tables), stride, dtype=torch.int32, device=rows[0].device)
    for length, count in zip(lengths, counts, strict=True):
        length[:count] = 1
    values = torch.cat(rows)
    if max(table.num_rows for table in tables) < 2**31:
        values = values.int()  # half as many bytes to send
    keys = [table.name for table in tables]
    return KeyedJaggedTensor(keys, values, lengths=lengths.flatten(), stride=stride, length_per_key=counts)


def raises_at_once(ids: Tensor) -> bool:
    """Whether an id out of range raises IndexError at once: not on a GPU, where the check would wait for the GPU."""
    return ids.device.type == "cpu"


def _unread(feature: Feature, ids: Tensor) -> tuple[Tensor | None, Tensor]:
    """Which ids ``[N]`` read no row (None if all are known to read some), and the number of ids out of range."""
    limit, padding = feature.spec.num_embeddings, feature.padding
    none = torch.zeros((), dtype=torch.int64, device=ids.device)
    if raises_at_once(ids):
        low, high = ids.aminmax() if len(ids) else (0, 0)
        if low < 0 or high >= limit:
            value = int(ids[(ids < 0) | (ids >= limit)][0])
            raise IndexError(f"id {value} is outside [0, {limit}) of table {feature.table}")
        return None if padding is None else ids == padding, none
    invalid = (ids < 0) | (ids >= limit)
    return invalid if padding is None else invalid | (ids == padding), invalid.sum()


def _jagged(feature: Feature, batch: Ids, rows: list[Tensor]) -> list[Jagged]:
    """The row numbers of each of the feature's keys."""
    lengths, weights, used = batch.lengths, batch.weights, batch.used
    rows = [row + base if base else row for row, base in zip(rows, feature.bases, strict=True)]
    if feature.merged:
        numbers = torch.stack(rows, 1) if len(rows) > 1 else rows[0][:, None]
        if weights is not None:
            weights = weights[:, None].expand(numbers.shape)
        if used is None:
            lengths = lengths * len(rows) if len(rows) > 1 else lengths
            return [Jagged(numbers.flatten(), lengths, None if weights is None else weights.flatten())]
        return [Jagged(numbers[used], lengths_of(used.sum(1), lengths), None if weights is None else weights[used])]
    if used is None:
        return [Jagged(row, lengths, weights) for row in rows]
    return [
        Jagged(row[mask], lengths_of(mask, lengths), None if weights is None else weights[mask])
        for row, mask in zip(rows, used.unbind(1), strict=True)
    ]


def lengths_of(counts: Tensor, lengths: Tensor) -> Tensor:
    """The sum of ``counts`` ``[N]`` over each bag; the bags have ``lengths`` ``[B]``."""
    sums = nn.functional.pad(counts.cumsum(0), (1, 0))
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return sums[bounds].diff().to(lengths.dtype)


def _keyed(keys: list[str], jagged: dict[str, Jagged], stride: int, weighted: bool = True) -> KeyedJaggedTensor:
    """The batch of some keys. TorchRec does not support an empty batch: it gets one sample without ids instead."""
    values, lengths, weights = zip(*(jagged[key] for key in keys), strict=True)
    if not stride:
        stride, lengths = 1, tuple(length.new_zeros(1) for length in lengths)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths).int(),
        weights=torch.cat(weights) if weighted and weights[0] is not None else None,
        stride=stride,
        length_per_key=[len(v) for v in values],
    )

"""Map ids to row numbers of TorchRec's tables, in a module without parameters that input pipelines may run early."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...checks import InvalidIdMode, check_ids
from ..features import Feature, PartReads, StoredTable


class Ids(NamedTuple):
    """A feature's ids in a batch."""

    ids: Tensor  # [N]
    lengths: Tensor  # [B]
    weights: Tensor | None  # [N]
    used: Tensor | None  # bool [N, K]: which parts of the table each id reads; None where it reads all


class RowBatch(NamedTuple):
    """A batch of row numbers, as TorchRec's collections take them."""

    bags: KeyedJaggedTensor | None
    vectors: tuple[KeyedJaggedTensor, ...]  # one for each collection of unpooled vectors
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
        self._move_id_lists(features)
        batches = self._batches(features)
        jagged: dict[str, Jagged] = {}
        masks = self._unread([batch.ids for batch in batches])
        for i, (f, batch, unread) in enumerate(zip(self.features, batches, masks, strict=True)):
            ids = batch.ids if unread is None else batch.ids.clamp(0, f.spec.num_embeddings - 1)
            reads = f.reads(ids, self.id_lists)
            if unread is not None:
                read = unread.logical_not()[:, None].expand(-1, len(reads.rows))
                reads = reads._replace(used=read if reads.used is None else reads.used & read)
            batches[i] = batch._replace(used=reads.used)
            jagged.update(zip(f.keys, _jagged(f, reads, batch), strict=True))
        stride = features.stride()
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

    def _move_id_lists(self, features: KeyedJaggedTensor) -> None:
        if self.id_lists.device != features.device():
            self.id_lists = self.id_lists.to(features.device())

    def _batches(self, features: KeyedJaggedTensor) -> list[Ids]:
        """Each feature's ids."""
        batches = []
        for f in self.features:
            jagged = features[f.name]
            weights = jagged.weights() if self.weighted else None
            batches.append(Ids(f.ids_of_table(jagged.values()), jagged.lengths(), weights, None))
        return batches

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


def _jagged(feature: Feature, reads: PartReads, batch: Ids) -> list[Jagged]:
    """The row numbers of each of the feature's keys."""
    lengths, weights, used = batch.lengths, batch.weights, reads.used
    rows = [row + base if base else row for row, base in zip(reads.rows, feature.bases, strict=True)]
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

"""Map ids to the distinct rows of a batch, in the few TorchRec tables that contain all rows (``shards``).

A rank requests the distinct rows of its batch, and composes and pools them itself (``gathered``). So ids that occur
several times are sent once, and so are rows that many ids share.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ...checks import InvalidIdMode
from ..features import Feature, StoredTable
from ..shards import Shards
from .rows import RowNumbers


class Unique(NamedTuple):
    """The distinct values of each segment, rising."""

    values: Tensor  # int64 [U], segment by segment
    inverse: Tensor  # int64 [N]: the position in ``values`` of each value that was given
    counts: list[int]  # distinct values of each segment


def unique_by_segment(values: Tensor, bounds: Sequence[int]) -> Unique:
    """The distinct values of ``values[bounds[s]:bounds[s + 1]]`` for each s; ``bounds`` go from 0 to N.

    >>> unique = unique_by_segment(torch.tensor([7, 7, 3, 7]), [0, 3, 4])
    >>> unique.counts, unique.values[unique.inverse].tolist()
    ([2, 1], [7, 7, 3, 7])
    """
    parts, inverse = [values[:0].long()], [values[:0].long()]
    counts: list[int] = []
    for first, last in pairwise(bounds):
        distinct, positions = torch.unique(values[first:last].long(), return_inverse=True)
        inverse.append(positions + sum(counts))
        parts.append(distinct)
        counts.append(len(distinct))
    return Unique(torch.cat(parts), torch.cat(inverse), counts)


class Lookup(NamedTuple):
    """The rows that the distinct ids of a feature read."""

    ids: Tensor  # [U]
    used: Tensor | None  # bool [U, K]: which parts each id reads; None where it reads all
    positions: dict[int, Tensor]  # for each part, positions among the rows of its shard, for the ids that read it


class UniqueBatch(NamedTuple):
    """A batch of distinct rows, and how to compose and pool them."""

    vectors: tuple[KeyedJaggedTensor, ...]  # for each width: a key for each shard, one row in each bag
    lookups: tuple[Lookup, ...]  # one for each feature
    inverse: Tensor  # [N]: the position of each id among the distinct ids of all features
    bounds: list[int]  # [F + 1]: where the ids of each feature start
    lengths: Tensor  # [F, B]
    weights: Tensor | None  # [N]
    id_lists: Tensor


class UniqueRows(RowNumbers):
    """Maps the ids of a KeyedJaggedTensor to the distinct rows that they read; otherwise like ``RowNumbers``.

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
        self.first_shards = [0, *accumulate(map(len, shards.groups))]  # number of the first shard of each group

    @property
    def stored(self) -> list[StoredTable]:
        """The shards."""
        return [table for group in self.shards.groups for table in group]

    def forward(self, features: KeyedJaggedTensor) -> UniqueBatch:  # type: ignore[override]
        """The distinct rows of a batch. Raises as ``RowNumbers`` does."""
        self._check(features)
        self._move_id_lists(features)
        names = [f.name for f in self.features]
        keys = features.keys()
        if keys != names:
            features = features.permute([keys.index(name) for name in names])
        stride = features.stride()
        offsets = features.offsets()
        bounds = offsets[:: max(stride, 1)].tolist() if stride else [0] * (len(names) + 1)
        unique = unique_by_segment(features.values(), bounds)
        lookups, rows = self._lookups(unique)
        return UniqueBatch(
            self._keyed_rows(rows),
            lookups,
            unique.inverse,
            bounds,
            features.lengths().view(len(names), stride),
            features.weights() if self.weighted else None,
            self.id_lists,
        )

    def _lookups(self, unique: Unique) -> tuple[tuple[Lookup, ...], Unique]:
        """The lookups of each feature, and the distinct rows that they read in each shard."""
        ids = [f.ids_of_table(part) for f, part in zip(self.features, unique.values.split(unique.counts), strict=True)]
        lookups = []
        reads_of_shard: list[list[tuple[Lookup, int, Tensor]]] = [[] for _ in self.stored]
        for f, values, unread in zip(self.features, ids, self._unread(ids), strict=True):
            valid = values if unread is None else values.clamp(0, f.spec.num_embeddings - 1)
            reads = f.reads(valid, self.id_lists)
            used = None if len(f.parts) == 1 else reads.used
            if unread is not None:
                read = unread.logical_not()[:, None].expand(-1, len(f.parts))
                used = read if used is None else used & read
            lookups.append(Lookup(valid, used, {}))
            for j, (part, rows) in enumerate(zip(f.parts, reads.rows, strict=True)):
                location = self.shards.locations[part.name]
                numbers = (rows if used is None else rows[used[:, j]]) + location.base
                reads_of_shard[self.first_shards[location.group] + location.shard].append(
                    (lookups[-1], j, numbers.long())
                )
        numbers_of_shard = [[numbers for _, _, numbers in reads] for reads in reads_of_shard]
        edges = [0, *accumulate(sum(map(len, parts)) for parts in numbers_of_shard)]
        distinct = unique_by_segment(torch.cat([part for parts in numbers_of_shard for part in parts]), edges)
        first_rows = accumulate(distinct.counts, initial=0)
        for parts, start, first in zip(reads_of_shard, edges, first_rows, strict=False):
            for lookup, j, numbers in parts:
                lookup.positions[j] = distinct.inverse[start : start + len(numbers)] - first
                start += len(numbers)
        return tuple(lookups), distinct

    def _keyed_rows(self, rows: Unique) -> tuple[KeyedJaggedTensor, ...]:
        """The distinct rows as bags of one row; shards with fewer rows than others end with empty bags."""
        keyed, first_rows = [], [0, *accumulate(rows.counts)]
        for keys, (first, last) in zip(self.vectors, pairwise(self.first_shards), strict=True):
            counts = rows.counts[first:last]
            stride = max(1, *counts)  # TorchRec does not support an empty batch
            lengths = torch.zeros(len(keys), stride, dtype=torch.int32, device=rows.values.device)
            for length, count in zip(lengths, counts, strict=True):
                length[:count] = 1
            values = rows.values[first_rows[first] : first_rows[last]]
            if max(table.num_rows for table in self.stored[first:last]) < 2**31:
                values = values.int()  # half as many bytes to send
            keyed.append(
                KeyedJaggedTensor(keys, values, lengths=lengths.flatten(), stride=stride, length_per_key=counts)
            )
        return tuple(keyed)

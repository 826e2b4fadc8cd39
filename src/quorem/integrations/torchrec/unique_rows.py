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
from ...ops.search import Searcher
from ...ops.unique import Unique, unique_by_segment
from ..features import Feature, StoredTable
from ..shards import Shards
from .rows import RowNumbers


class Lookup(NamedTuple):
    """The rows that the distinct ids of a feature read."""

    ids: Tensor  # [U]
    used: Tensor | None  # bool [U, K]: which parts each id reads; None where it reads all
    positions: list[Tensor]  # for each part, positions among the rows of its shard, for the ids that read it


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
        self.search = Searcher()

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
        lookups, numbers = self._lookups(unique)
        segments = [parts for group in numbers for parts in group]
        edges = [0, *accumulate(sum(map(len, parts)) for parts in segments)]
        rows = unique_by_segment(torch.cat([part.long() for parts in segments for part in parts]), edges)
        lookups = self._with_positions(lookups, rows, edges)
        return UniqueBatch(
            self._keyed_rows(rows),
            tuple(lookups),
            unique.inverse,
            bounds,
            features.lengths().view(len(names), stride),
            features.weights() if self.weighted else None,
            self.id_lists,
        )

    def _lookups(self, unique: Unique) -> tuple[list[Lookup], list[list[list[Tensor]]]]:
        """The lookups of each feature, still without positions, and the row numbers by group and shard."""
        ids = [f.ids_of_table(part) for f, part in zip(self.features, unique.values.split(unique.counts), strict=True)]
        lookups: list[Lookup] = []
        numbers: list[list[list[Tensor]]] = [[[] for _ in group] for group in self.shards.groups]
        for f, values, unread in zip(self.features, ids, self._unread(ids), strict=True):
            valid = values if unread is None else values.clamp(0, f.spec.num_embeddings - 1)
            reads = f.reads(valid, self.id_lists, self.search)
            used = None if len(f.parts) == 1 else reads.used
            if unread is not None:
                read = unread.logical_not()[:, None].expand(-1, len(f.parts))
                used = read if used is None else used & read
            lookups.append(Lookup(valid, used, []))
            for j, (part, rows) in enumerate(zip(f.parts, reads.rows, strict=True)):
                location = self.shards.locations[part.name]
                part_rows = rows if used is None else rows[used[:, j]]
                numbers[location.group][location.shard].append(part_rows + location.base)
        return lookups, numbers

    def _with_positions(self, lookups: list[Lookup], rows: Unique, edges: list[int]) -> list[Lookup]:
        """Add to the lookups the positions of their rows, which are in the order of the features in every shard."""
        firsts = [0, *accumulate(rows.counts)]
        first_segments = [0, *accumulate(len(group) for group in self.shards.groups)]
        starts = edges[:-1].copy()
        for f, lookup in zip(self.features, lookups, strict=True):
            for j, part in enumerate(f.parts):
                location = self.shards.locations[part.name]
                segment = first_segments[location.group] + location.shard
                count = len(lookup.ids) if lookup.used is None else int(lookup.used[:, j].sum())
                positions = rows.inverse[starts[segment] : starts[segment] + count]
                starts[segment] += count
                lookup.positions.append(positions - firsts[segment])
        return lookups

    def _keyed_rows(self, rows: Unique) -> tuple[KeyedJaggedTensor, ...]:
        """The distinct rows as bags of one row; shards with fewer rows than others end with empty bags."""
        keyed, segments = [], [0, *accumulate(len(group) for group in self.shards.groups)]
        firsts = [0, *accumulate(rows.counts)]
        for keys, (first, last) in zip(self.vectors, pairwise(segments), strict=True):
            counts = rows.counts[first:last]
            stride = max(1, *counts)  # TorchRec does not support an empty batch
            lengths = torch.zeros(len(keys), stride, dtype=torch.int32, device=rows.values.device)
            for length, count in zip(lengths, counts, strict=True):
                length[:count] = 1
            values = rows.values[firsts[first] : firsts[last]]
            if max(table.num_rows for table in self.stored[first:last]) < 2**31:
                values = values.int()  # half as many bytes to send
            keyed.append(
                KeyedJaggedTensor(keys, values, lengths=lengths.flatten(), stride=stride, length_per_key=counts)
            )
        return tuple(keyed)

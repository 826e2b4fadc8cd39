"""A trained table that is read in blocks of ids, bucket by bucket of the largest table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..paper.renumbering import Mixing, Permutation
from ..paper.schemes import AnyPartition

BLOCK_NUMBERS = 2**17  # numbers of the trained table that are processed at a time
UNSEEN = 1e-9  # weight of an id that never occurs, relative to the smallest frequency above zero


class Block(NamedTuple):
    """Some ids: their rows ``[N, D]``, weights ``[N, 1]`` (None: all one), and buckets ``[N]`` for each partition."""

    rows: Tensor
    weights: Tensor | None
    buckets: list[Tensor]

    def sum_into_(self, table: Tensor, j: int, values: Tensor) -> None:
        """Add ``values``, of a shape that expands to ``[N, D]``, times the weights to their rows of table ``j``."""
        values = values if self.weights is None else values * self.weights
        table.index_add_(0, self.buckets[j], values.expand(len(self.rows), -1))


@dataclass(frozen=True, eq=False)
class Target:
    """The table to fit, and how its ids fall into buckets.

    Args:
        dense: the trained table ``[n, D]``, or some of its columns.
        scale: the divisor of each column, ``[D]``.
        partitions: the partitions, the largest first.
        permutation: permutation of the ids, applied before the partitions.
        weights: weights of the rows of ``dense``, float64 ``[n]``; None weighs all equally.
        padding: a row of ``dense`` that is ignored.
        rows: the row of ``dense`` for each id, where that is not the id itself.
        members: the ids in order of their buckets in the first partition; ``with_partitions`` finds them.
        starts: where the members of each bucket start, one entry more than there are buckets.
    """

    dense: Tensor
    scale: Tensor
    partitions: tuple[AnyPartition, ...]
    permutation: Permutation | Mixing | None
    weights: Tensor | None
    padding: int | None
    rows: Tensor | None = None
    members: Tensor | None = None
    starts: Tensor | None = None

    @property
    def num_ids(self) -> int:
        """Number of ids to fit."""
        return len(self.dense if self.rows is None else self.rows)

    @property
    def sizes(self) -> list[int]:
        """Number of buckets of each partition."""
        return [part.size for part in self.partitions]

    def with_partitions(self, partitions: Sequence[AnyPartition]) -> "Target":
        """The same table under other partitions, the largest first."""
        largest, device = partitions[0], self.dense.device
        buckets = torch.empty(self.num_ids, dtype=torch.int32 if largest.size < 2**31 else torch.int64, device=device)
        for begin in range(0, self.num_ids, BLOCK_NUMBERS):
            ids = torch.arange(begin, min(begin + BLOCK_NUMBERS, self.num_ids), device="cpu").to(device)
            buckets[begin : begin + BLOCK_NUMBERS] = largest(self._number_of(ids))
        counts = buckets.bincount(minlength=largest.size)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
        members = buckets.argsort(stable=True)
        return replace(self, partitions=tuple(partitions), members=members, starts=starts)

    def columns(self, some: slice) -> "Target":
        """The target restricted to some columns of the table."""
        return replace(self, dense=self.dense[:, some], scale=self.scale[some])

    @property
    def block_ids(self) -> int:
        """The most ids of a block."""
        return max(1, BLOCK_NUMBERS // self.dense.shape[1])

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges ``[first, last)`` of the first partition's buckets, with about a block of ids each."""
        size = self.partitions[0].size
        step = max(1, self.block_ids * size // self.num_ids)
        for first in range(0, size, step):
            yield first, min(first + step, size)

    def blocks(self, first: int, last: int) -> Iterator[Block]:
        """Blocks of the ids in buckets ``[first, last)`` of the first partition, which blocks count from ``first``."""
        assert self.members is not None and self.starts is not None
        for ids in self.members[int(self.starts[first]) : int(self.starts[last])].split(self.block_ids):
            position = ids if self.rows is None else self.rows[ids]
            rows = self.dense.index_select(0, position) / self.scale  # in float64, like the scale
            weights = None if self.weights is None else self.weights[position][:, None]
            if self.padding is not None and (absent := (position == self.padding)[:, None]).any():
                weights = torch.where(absent, 0, rows.new_ones(()) if weights is None else weights)
                rows = rows.masked_fill(absent, 0)  # even if it has NaN
            buckets = [part(self._number_of(ids)) for part in self.partitions]
            yield Block(rows, weights, [buckets[0] - first, *buckets[1:]])

    def _number_of(self, ids: Tensor) -> Tensor:
        return ids if self.permutation is None else self.permutation(ids)

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all ids."""
        return float(self.num_ids) if self.weights is None else float(self.weights.sum())

    def zeros(self) -> list[Tensor]:
        """Small tables of zeros, ``[size, D]`` for each partition but the first."""
        d, device = self.dense.shape[1], self.dense.device
        return [torch.zeros(size, d, dtype=torch.float64, device=device) for size in self.sizes[1:]]


def weights_of(frequencies: Tensor | None, device: torch.device) -> Tensor | None:
    """Weights in (0, 1] that are proportional to the frequencies; an id that never occurs has almost none."""
    if frequencies is None:
        return None
    weights = frequencies.to(device, torch.float64)
    weights = weights / weights.max()
    return weights.clamp_(min=UNSEEN * float(weights[weights > 0].min()))

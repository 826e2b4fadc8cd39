"""A trained table that is read in blocks of ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..paper.partitions import Partition
from ..paper.renumbering import Mixing, Permutation
from ..paper.schemes import AnyPartition

BLOCK_NUMBERS = 2**17  # numbers of the trained table that are processed at a time
ROWS_TOGETHER = 32  # buckets of a range, at least: their rows are adjacent and are read at once
RANGES = 4  # ranges, at least; with few buckets a range then has fewer than ROWS_TOGETHER
UNSEEN = 1e-9  # weight of an id that never occurs, relative to the smallest frequency above zero


class Block(NamedTuple):
    """A grid of ids ``[T, W]``: their rows ``[T, W, D]``, weights (None: all one), and buckets for each partition.

    Buckets that do not change along a side of the grid are stored once: as ``[T, 1]`` or ``[1, W]``.
    """

    rows: Tensor
    weights: Tensor | None
    buckets: list[Tensor]

    def weighted(self, values: Tensor) -> Tensor:
        """``values`` times the weights."""
        return values if self.weights is None else values * self.weights

    def sum_into_(self, table: Tensor, j: int, values: Tensor) -> None:
        """Add ``values``, of a shape that expands to ``[T, W, D]``, to their rows of table ``j``."""
        bucket = self.buckets[j]
        values = values.expand(*self.rows.shape[:2], -1)
        for side in (0, 1):
            if bucket.shape[side] == 1:
                values = values.sum(side, keepdim=True)
        table.index_add_(0, bucket.flatten(), values.flatten(0, 1))

    def sum_weighted_into_(self, table: Tensor, j: int, values: Tensor) -> None:
        """``sum_into_`` of ``values`` times the weights, as a matrix product if values change along one side only."""
        (t, w, _), bucket, weights = self.rows.shape, self.buckets[j], self.weights
        if weights is not None and bucket.shape == (t, 1) and values.shape[0] == 1:
            table.index_add_(0, bucket[:, 0], weights[..., 0] @ values[0].expand(w, -1))
        elif weights is not None and bucket.shape == (1, w) and values.shape[1] == 1:
            table.index_add_(0, bucket[0], weights[..., 0].T @ values[:, 0].expand(t, -1))
        else:
            self.sum_into_(table, j, self.weighted(values))


@dataclass(frozen=True, eq=False)
class Target:
    """The table to fit, and how its ids fall into buckets.

    Args:
        dense: the trained table ``[n, D]``, or some of its rows and columns.
        scale: the divisor of each column, ``[D]``.
        partitions: the partitions, the largest first.
        permutation: permutation of the ids, applied before the partitions.
        weights: weights of the rows of ``dense``, float64 ``[n]``; None weighs all equally.
        padding: a row of ``dense`` that is ignored.
        threads: number of threads that share a pass.
        rows: the row of ``dense`` for each id, where that is not the id itself.
        members: the ids in order of their buckets in the first partition; None where the partition's stride and size
            give them.
        starts: where the members of each bucket start, one entry more than there are buckets.
    """

    dense: Tensor
    scale: Tensor
    partitions: tuple[AnyPartition, ...]
    permutation: Permutation | Mixing | None
    weights: Tensor | None
    padding: int | None
    threads: int = 1
    rows: Tensor | None = None
    members: Tensor | None = None
    starts: Tensor | None = None

    @property
    def num_ids(self) -> int:
        """Number of ids to fit."""
        if self.members is not None:
            return len(self.members)
        return len(self.dense if self.rows is None else self.rows)

    @property
    def sizes(self) -> list[int]:
        """Number of buckets of each partition."""
        return [part.size for part in self.partitions]

    def with_partitions(self, partitions: Sequence[AnyPartition]) -> "Target":
        """The same table under other partitions."""
        target = replace(self, partitions=tuple(partitions), members=None, starts=None)
        if self.permutation is None and self.rows is None and isinstance(partitions[0], Partition):
            return target
        number, size, device = self.num_ids, target.partitions[0].size, self.dense.device
        buckets = torch.empty(number, dtype=torch.int32 if size < 2**31 else torch.int64, device=device)
        counts = torch.zeros(size, dtype=torch.int64, device=device)
        for ids in torch.arange(number, device=device).split(BLOCK_NUMBERS):
            bucket = target.partitions[0](ids if self.permutation is None else self.permutation(ids))
            counts.index_add_(0, bucket, torch.ones_like(bucket))
            buckets[ids] = bucket.to(buckets.dtype)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
        return replace(target, members=buckets.argsort(stable=True), starts=starts)

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
        step = max(1, self.block_ids * size // self.num_ids, min(ROWS_TOGETHER, size // RANGES))
        for first in range(0, size, step):
            yield first, min(first + step, size)

    def blocks(self, first: int, last: int) -> Iterator[Block]:
        """Blocks of the ids in buckets ``[first, last)`` of the first partition, which blocks count from ``first``."""
        if self.members is not None and self.starts is not None:
            for ids in self.members[int(self.starts[first]) : int(self.starts[last])].split(self.block_ids):
                rows = self.row_of(ids)
                weights = None if self.weights is None else self.weights[rows][None]
                yield self._block(ids[None], self.dense.index_select(0, rows)[None], weights, first)
            return
        part, n = self.partitions[0], len(self.dense)
        assert isinstance(part, Partition)
        # Of every ``period`` ids, those from ``first * stride`` to ``last * stride`` are in these buckets.
        period = part.size * part.stride
        rounds = n // period
        whole, rest = _rounds(self.dense, period)
        whole_weights, rest_weights = (None, None) if self.weights is None else _rounds(self.weights, period)
        for start in range(first * part.stride, last * part.stride, self.block_ids):
            end = min(start + self.block_ids, last * part.stride)
            across = torch.arange(start, end, device=self.dense.device)[None]
            for begin in range(0, rounds, step := max(1, self.block_ids // (end - start))):
                rows = whole[begin : begin + step, start:end]
                weights = None if whole_weights is None else whole_weights[begin : begin + step, start:end]
                down = torch.arange(begin, begin + len(rows), device=rows.device)[:, None] * period
                yield self._block(down + across, rows, weights, first)
            if start < len(rest):
                rows = rest[start:end]
                weights = None if rest_weights is None else rest_weights[None, start:end]
                yield self._block(rounds * period + across[:, : len(rows)], rows[None], weights, first)

    def row_of(self, ids: Tensor) -> Tensor:
        """The row of ``dense`` for each of ``ids``."""
        return ids if self.rows is None else self.rows[ids]

    def _block(self, ids: Tensor, rows: Tensor, weights: Tensor | None, first: int) -> Block:
        """The block of ``ids`` and ``weights`` ``[T, W]``, with ``rows`` ``[T, W, D]``."""
        rows = rows.to(self.scale.dtype, copy=True).div_(self.scale)
        weights = None if weights is None else weights[..., None]
        if self.padding is not None and (absent := (self.row_of(ids) == self.padding)[..., None]).any():
            weights = torch.where(absent, 0, rows.new_ones(()) if weights is None else weights)
            rows = rows.masked_fill(absent, 0)  # even if it has NaN
        numbers = ids if self.permutation is None else self.permutation(ids)
        largest, *others = self.partitions
        if self.members is not None or not isinstance(largest, Partition):
            return Block(rows, weights, [largest(numbers) - first, *(part(numbers) for part in others)])
        period = largest.size * largest.stride
        above = [isinstance(part, Partition) and part.stride % period == 0 for part in others]
        # A digit above that of the largest table is the same for all ids of one round.
        buckets = [part(numbers[:, :1] if same else numbers) for part, same in zip(others, above, strict=True)]
        return Block(rows, weights, [largest(numbers[:1]) - first, *buckets])

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all ids."""
        return float(self.num_ids) if self.weights is None else float(self.weights.sum())

    def zeros(self) -> list[Tensor]:
        """Small tables of zeros, ``[size, D]`` for each partition but the first."""
        d, device = self.dense.shape[1], self.dense.device
        return [torch.zeros(size, d, dtype=torch.float64, device=device) for size in self.sizes[1:]]


def _rounds(values: Tensor, period: int) -> tuple[Tensor, Tensor]:
    """Values of all ids as ``[rounds, period, ...]``, and the values of the last round if it is incomplete."""
    rounds = len(values) // period
    return values[: rounds * period].unflatten(0, (rounds, period)), values[rounds * period :]


def weights_of(frequencies: Tensor | None, device: torch.device) -> Tensor | None:
    """Weights in (0, 1] that are proportional to the frequencies; an id that never occurs has almost none."""
    if frequencies is None:
        return None
    weights = frequencies.to(device, torch.float64)
    weights = weights / weights.max()
    return weights.clamp_(min=UNSEEN * float(weights[weights > 0].min()))

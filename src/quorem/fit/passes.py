"""The pass over a trained table that all fits use."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import Block, Target

THREADED_NUMBERS = 2**20  # threads share a pass over a table with at least so many numbers


class ErrorTerms(NamedTuple):
    """The squared error, and its derivatives by the small tables."""

    error: Tensor  # [D]
    gradients: list[Tensor]  # for each small table, minus the gradient of half the error
    curvatures: list[Tensor]  # for each small table, the second derivatives of half the error


def run_pass(
    target: Target,
    small: Sequence[Tensor],
    operation: str,
    wanted: Sequence[int] | None = None,
    *,
    largest: Tensor | None = None,
    of_zeros: bool = False,
) -> ErrorTerms:
    """Compute the best rows of the largest table for given small tables, the error, and its derivatives.

    Args:
        target: the table to fit.
        small: the small tables ``[size, D]``, one for each partition but the first.
        operation: ``"add"`` or ``"mult"``.
        wanted: positions of the small tables whose derivatives are returned; None for all.
        largest: filled with the rows of the largest table, if given.
        of_zeros: fit zeros instead of the target's rows.
    """
    work = _Pass(target, small, operation, range(len(small)) if wanted is None else wanted, largest, of_zeros)
    ranges = list(target.ranges())
    workers = 1 if target.dense.numel() < THREADED_NUMBERS else min(target.threads, len(ranges))
    if workers == 1:
        return work.over(ranges)
    with ThreadPoolExecutor(workers) as pool:
        first, *others = pool.map(work.over, [ranges[worker::workers] for worker in range(workers)])
    for other in others:
        first.error.add_(other.error)
        for total, part in zip(first.gradients + first.curvatures, other.gradients + other.curvatures, strict=True):
            total.add_(part)
    return first


@dataclass(frozen=True, eq=False)
class _Pass:
    """The arguments of ``run_pass``."""

    target: Target
    small: Sequence[Tensor]
    operation: str
    wanted: Sequence[int]
    largest: Tensor | None
    of_zeros: bool

    @torch.no_grad()
    def over(self, ranges: Sequence[tuple[int, int]]) -> ErrorTerms:
        """The pass over some ranges of buckets. Each range is read twice: for its rows, then for the error."""
        target, small = self.target, self.small
        terms = ErrorTerms(torch.zeros_like(target.scale), [], [])
        for j in self.wanted:
            terms.gradients.append(torch.zeros_like(small[j]))
            terms.curvatures.append(torch.zeros_like(small[j] if self.operation == "mult" else small[j][:, :1]))
        ids_a_bucket = target.num_ids / target.partitions[0].size
        for first, last in ranges:
            is_small = ids_a_bucket * (last - first) <= 4 * target.block_ids
            kept = list(target.blocks(first, last)) if is_small else None
            rows = self._best_rows(kept or target.blocks(first, last), last - first)
            if self.largest is not None:
                self.largest[first:last] = rows * target.scale
            for block in kept or target.blocks(first, last):
                self._add_terms_(terms, block, rows)
        return terms

    def _best_rows(self, blocks: Iterable[Block], num_rows: int) -> Tensor:
        """The best rows ``[num_rows, D]`` of the largest table in one range of buckets: weighted means."""
        scale = self.target.scale
        one, sums = scale.new_ones(1, 1), scale.new_zeros(num_rows, len(scale))
        weights = torch.zeros_like(sums if self.operation == "mult" else sums[:, :1])
        for block in blocks:
            rest, factor = self._split(block)
            block.sum_into_(sums, 0, rest if factor is None else rest * factor)
            block.sum_into_(weights, 0, one if factor is None else factor * factor)
        return torch.where(weights > 0, sums / weights, 0)

    def _add_terms_(self, terms: ErrorTerms, block: Block, rows: Tensor) -> None:
        """Add the error of one block, and its derivatives by the wanted small tables."""
        rest, factor = self._split(block)
        row = F.embedding(block.buckets[0], rows)
        rest = rest - (row if factor is None else row * factor)
        squares = rest * rest
        terms.error.add_((squares if block.weights is None else squares * block.weights).sum(0))
        for j, gradient, curvature in zip(self.wanted, terms.gradients, terms.curvatures, strict=True):
            if self.operation == "add":
                block.sum_into_(gradient, 1 + j, rest)
                block.sum_into_(curvature, 1 + j, row.new_ones(1, 1))
                continue
            pairs = enumerate(zip(self.small, block.buckets[1:], strict=True))
            slope = reduce(torch.mul, (F.embedding(bucket, table) for i, (table, bucket) in pairs if i != j), row)
            block.sum_into_(gradient, 1 + j, rest * slope)
            block.sum_into_(curvature, 1 + j, slope * slope)

    def _split(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """What the largest table has to fit, and the factors that its rows are multiplied by (None: one)."""
        rows = block.rows.new_zeros(1, 1) if self.of_zeros else block.rows
        others = [F.embedding(bucket, table) for table, bucket in zip(self.small, block.buckets[1:], strict=True)]
        if self.operation == "mult":
            return rows, reduce(torch.mul, others) if others else None
        return reduce(torch.sub, others, rows), None

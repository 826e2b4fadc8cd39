"""A trained table that is read in blocks of ids, and the sums over its ids that all fits use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper.renumbering import Mixing
from ..paper.schemes import AnyPartition

BLOCK_NUMBERS = 2**17  # numbers of the trained table that are processed at a time
UNSEEN = 1e-9  # weight of an id that never occurs, relative to the smallest frequency above zero


class Block(NamedTuple):
    """Some ids: their rows ``[N, D]``, weights ``[N, 1]``, and buckets ``[N]`` for each partition."""

    rows: Tensor
    weights: Tensor
    buckets: list[Tensor]

    def sum_into_(self, table: Tensor, j: int, values: Tensor) -> None:
        """Add ``values``, of a shape that expands to ``[N, D]``, times the weights to their rows of table ``j``."""
        table.index_add_(0, self.buckets[j], (values * self.weights).expand(len(self.rows), -1))

    def split(self, small: Sequence[Tensor], operation: str) -> tuple[Tensor, Tensor]:
        """What the largest table has to fit, given the small ones, and the factors that its rows are multiplied by."""
        others = [F.embedding(bucket, table) for table, bucket in zip(small, self.buckets[1:], strict=True)]
        one = self.rows.new_ones(1, 1)
        if operation == "mult":
            return self.rows, reduce(torch.mul, others, one)
        return reduce(torch.sub, others, self.rows), one


@dataclass(frozen=True, eq=False)
class Target:
    """The table to fit, and how its ids fall into buckets."""

    dense: Tensor  # the trained table [n, D], or some of its columns
    scale: Tensor  # the divisor of each column, [D]
    partitions: tuple[AnyPartition, ...]  # the largest first
    mixing: Mixing | None  # renumbers the ids before the partitions
    weights: Tensor | None  # of the rows of ``dense``, float64 [n]; None weighs all equally
    padding: int | None  # a row of ``dense`` that is ignored
    rows: Tensor | None = None  # the row of ``dense`` for each id, where that is not the id itself

    @property
    def num_ids(self) -> int:
        """Number of ids to fit."""
        return len(self.dense if self.rows is None else self.rows)

    @property
    def sizes(self) -> list[int]:
        """Number of buckets of each partition."""
        return [part.size for part in self.partitions]

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all ids."""
        return float(self.num_ids) if self.weights is None else float(self.weights.sum())

    def zeros(self) -> list[Tensor]:
        """Small tables of zeros, ``[size, D]`` for each partition but the first."""
        return [self.scale.new_zeros(size, len(self.scale)) for size in self.sizes[1:]]

    def blocks(self) -> Iterator[Block]:
        """All ids, a block at a time."""
        size = max(1, BLOCK_NUMBERS // len(self.scale))
        for first in range(0, self.num_ids, size):
            ids = torch.arange(first, min(first + size, self.num_ids), device=self.dense.device)
            position = ids if self.rows is None else self.rows[ids]
            rows = self.dense.index_select(0, position) / self.scale  # in float64, like the scale
            weights = rows.new_ones(len(ids)) if self.weights is None else self.weights[position]
            if self.padding is not None:
                absent = position == self.padding
                weights = weights.masked_fill(absent, 0)
                rows = rows.masked_fill(absent[:, None], 0)  # even if it is NaN
            number = ids if self.mixing is None else self.mixing(ids)
            yield Block(rows, weights[:, None], [part(number) for part in self.partitions])

    def best_rows(self, small: Sequence[Tensor], operation: str) -> Tensor:
        """The best rows ``[size, D]`` of the largest table for given small ones: weighted means over its buckets.

        ``operation`` is ``"add"`` or ``"mult"``.
        """
        sums = self.scale.new_zeros(self.sizes[0], len(self.scale))
        weights = torch.zeros_like(sums if operation == "mult" else sums[:, :1])
        for block in self.blocks():
            values, factor = block.split(small, operation)
            block.sum_into_(sums, 0, values * factor)
            block.sum_into_(weights, 0, factor * factor)
        return torch.where(weights > 0, sums / weights, 0)

    def error_terms(
        self, small: Sequence[Tensor], operation: str, wanted: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The squared error ``[D]`` with the best rows of the largest table, and derivatives by ``wanted`` tables.

        These are, for each wanted table, minus the gradient of half the error, and its second derivatives.
        """
        largest, error = self.best_rows(small, operation), torch.zeros_like(self.scale)
        gradients = [torch.zeros_like(small[j]) for j in wanted]
        curvatures = [torch.zeros_like(small[j] if operation == "mult" else small[j][:, :1]) for j in wanted]
        for block in self.blocks():
            values, factor = block.split(small, operation)
            row = F.embedding(block.buckets[0], largest)
            residual = values - row * factor
            error.add_((residual * residual * block.weights).sum(0))
            for j, gradient, curvature in zip(wanted, gradients, curvatures, strict=True):
                slope = row.new_ones(1, 1)
                if operation == "mult":  # the product of an id's rows of all other tables
                    slope = block.split([*small[:j], torch.ones_like(small[j]), *small[j + 1 :]], "mult")[1] * row
                block.sum_into_(gradient, 1 + j, residual * slope)
                block.sum_into_(curvature, 1 + j, slope * slope)
        return error, gradients, curvatures


def weights_of(frequencies: Tensor | None, device: torch.device) -> Tensor | None:
    """Weights in (0, 1] that are proportional to the frequencies; an id that never occurs has almost none."""
    if frequencies is None:
        return None
    weights = frequencies.to(device, torch.float64)
    weights = weights / weights.max()
    return weights.clamp_(min=UNSEEN * float(weights[weights > 0].min()))

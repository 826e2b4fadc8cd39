"""The pass over a trained table that all fits use."""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import Block, Target


class ErrorTerms(NamedTuple):
    """The squared error, and its derivatives by the small tables."""

    error: Tensor  # [D]
    gradients: list[Tensor]  # for each small table, minus the gradient of half the error
    curvatures: list[Tensor]  # for each small table, the second derivatives of half the error


@torch.no_grad()
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

    Each range of buckets is read twice: for its rows, then for the error.

    Args:
        target: the table to fit.
        small: the small tables ``[size, D]``, one for each partition but the first.
        operation: ``"add"`` or ``"mult"``.
        wanted: positions of the small tables whose derivatives are returned; None for all.
        largest: filled with the rows of the largest table, if given.
        of_zeros: fit zeros instead of the target's rows.
    """
    wanted = range(len(small)) if wanted is None else wanted
    terms = ErrorTerms(torch.zeros_like(target.scale), [], [])
    for j in wanted:
        terms.gradients.append(torch.zeros_like(small[j]))
        terms.curvatures.append(torch.zeros_like(small[j] if operation == "mult" else small[j][:, :1]))
    ids_a_bucket = target.num_ids / target.partitions[0].size

    def parts(first: int, last: int) -> Iterable[tuple[Block, Tensor, Tensor | None]]:
        for block in target.blocks(first, last):
            yield block, *_split(block, small, operation, of_zeros)

    for first, last in target.ranges():
        is_small = ids_a_bucket * (last - first) <= 4 * target.block_ids
        kept = list(parts(first, last)) if is_small else None
        rows = _best_rows(kept or parts(first, last), target, last - first, operation)
        if largest is not None:
            largest[first:last] = rows * target.scale
        for block, rest, factor in kept or parts(first, last):
            row = F.embedding(block.buckets[0], rows)
            rest = rest - (row if factor is None else row * factor)
            squares = rest * rest
            terms.error.add_((squares if block.weights is None else squares * block.weights).sum(0))
            for j, gradient, curvature in zip(wanted, terms.gradients, terms.curvatures, strict=True):
                slope = row.new_ones(1, 1) if operation == "add" else _slope(block, small, j, row)
                block.sum_into_(gradient, 1 + j, rest * slope)
                block.sum_into_(curvature, 1 + j, slope * slope)
    return terms


def _split(block: Block, small: Sequence[Tensor], operation: str, of_zeros: bool) -> tuple[Tensor, Tensor | None]:
    """What the largest table has to fit, and the factors that its rows are multiplied by (None: one)."""
    rows = block.rows.new_zeros(1, 1) if of_zeros else block.rows
    others = [F.embedding(bucket, table) for table, bucket in zip(small, block.buckets[1:], strict=True)]
    if operation == "mult":
        return rows, reduce(torch.mul, others) if others else None
    return reduce(torch.sub, others, rows), None


def _best_rows(
    parts: Iterable[tuple[Block, Tensor, Tensor | None]], target: Target, num_rows: int, operation: str
) -> Tensor:
    """The best rows ``[num_rows, D]`` of the largest table in one range of buckets: weighted means."""
    sums = target.scale.new_zeros(num_rows, len(target.scale))
    weights = torch.zeros_like(sums if operation == "mult" else sums[:, :1])
    for block, rest, factor in parts:
        factor = rest.new_ones(1, 1) if factor is None else factor
        block.sum_into_(sums, 0, rest * factor)
        block.sum_into_(weights, 0, factor * factor)
    return torch.where(weights > 0, sums / weights, 0)


def _slope(block: Block, small: Sequence[Tensor], j: int, row: Tensor) -> Tensor:
    """The product of an id's rows of all tables but the j-th small one."""
    pairs = enumerate(zip(small, block.buckets[1:], strict=True))
    return reduce(torch.mul, (F.embedding(bucket, table) for i, (table, bucket) in pairs if i != j), row)

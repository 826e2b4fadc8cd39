"""How TorchRec's tables start: as quorem's do, shard by shard."""

import warnings
from dataclasses import dataclass
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm import get_local_size

from ...init import NOISE
from ...schemes import TableSpec, ceil_div


def matched_bounds(spec: TableSpec) -> list[tuple[float, float]]:
    """The interval that each stored table starts in (``quorem.init.matched_``)."""
    bound = sqrt(1 / spec.num_embeddings)
    largest = max(range(len(spec.shapes)), key=lambda j: spec.shapes[j][0])
    neutral = (1 - NOISE, 1 + NOISE) if spec.operation == "mult" else (-NOISE * bound, NOISE * bound)
    alike = spec.operation in ("concat", "feature")
    return [(-bound, bound) if alike or j == largest else neutral for j in range(len(spec.shapes))]


@dataclass(frozen=True)
class Uniform:
    """An ``init_fn``: uniform values in the interval of each run of rows.

    Args:
        runs: number of rows, lowest and highest value of each run; together all rows of the table.
    """

    runs: tuple[tuple[int, float, float], ...]

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        """Fill a table, or the part of one that a rank has: all rows of some columns, or some rows."""
        total = sum(rows for rows, _, _ in self.runs)
        if weight.dim() != 2 or not len(weight):  # a table of other ranks
            return
        if len({run[1:] for run in self.runs}) == 1:
            weight.uniform_(*self.runs[0][1:])
        elif len(weight) % total == 0:
            for columns in weight.split(total):  # TorchRec stacks the shards of columns
                self._fill(columns, 0)
        else:
            self._fill(weight, first_row(len(weight), total))

    def _fill(self, weight: Tensor, first: int) -> None:
        start = 0
        for rows, low, high in self.runs:
            weight[max(start - first, 0) : max(start + rows - first, 0)].uniform_(low, high)
            start += rows


def first_row(rows: int, total: int) -> int:
    """The first row of this rank's shard of ``rows`` out of ``total``, as TorchRec cuts rows into blocks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for ranks in (world, get_local_size(world)):
        block = ceil_div(total, ranks)
        first = min(rank % ranks * block, total)
        if rows == min(block, total - first):
            return first
    warnings.warn(
        f"rank {rank} has {rows} of {total} rows, but which is not known: they start as the first", stacklevel=2
    )
    return 0

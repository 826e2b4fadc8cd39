"""Initialize TorchRec's tables like quorem's, shard by shard."""

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm import get_local_size

from ...paper.sizes import ceil_div
from ..features import Part


@dataclass(frozen=True)
class Uniform:
    """An ``init_fn`` for TorchRec's configs: uniform numbers from the interval of each part.

    Args:
        parts: the parts of the table.
    """

    parts: tuple[Part, ...]

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        """Fill a table, or the shard of it that a rank has: all rows of some columns, or some rows."""
        total = sum(part.num_rows for part in self.parts)
        if weight.dim() != 2 or not len(weight):  # this rank has no shard of the table
            return
        if len({(part.low, part.high) for part in self.parts}) == 1:
            weight.uniform_(self.parts[0].low, self.parts[0].high)
        elif len(weight) % total == 0:
            for columns in weight.split(total):  # TorchRec stacks the shards of columns
                self._fill(columns, 0)
        else:
            self._fill(weight, first_row(len(weight), total))

    def _fill(self, weight: Tensor, first: int) -> None:
        start = 0
        for part in self.parts:
            rows = weight[max(start - first, 0) : max(start + part.num_rows - first, 0)]
            rows.uniform_(part.low, part.high)
            start += part.num_rows


def first_row(rows: int, total: int) -> int:
    """The first row of this rank's shard of ``rows`` rows out of ``total``, by TorchRec's division into blocks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in (world, get_local_size(world)):
        block = ceil_div(total, size)
        first = min(rank % size * block, total)
        if rows == min(block, total - first):
            return first
    warnings.warn(f"rank {rank} has {rows} of {total} rows, unknown which: initialized as the first", stacklevel=2)
    return 0

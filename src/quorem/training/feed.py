"""Batches for a run: all rows are kept on the GPU if they fit, else a thread reads ahead."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..data.batches import Batch, ahead
from ..data.meta import SPLITS
from ..data.prepared import Prepared
from .config import RunConfig

BLOCK_ROWS = 1 << 16  # rows that are read ahead at a time
RESIDENT = 0.5  # rows are kept on the GPU if they take at most this share of its free memory


class Feed:
    """The rows of prepared data for runs on one device; several runs share it."""

    def __init__(self, prepared: Prepared, device: torch.device | str = "cpu") -> None:
        self.prepared, self.device = prepared, torch.device(device)
        self.rows = {name: prepared.split(name) for name in SPLITS}
        size = sum(num_bytes(rows) for rows in self.rows.values())
        self.resident = self.device.type == "cuda" and size <= RESIDENT * torch.cuda.mem_get_info(self.device)[0]
        if self.resident:
            self.rows = {name: rows.to(self.device) for name, rows in self.rows.items()}

    def training_rows(self, config: RunConfig) -> Batch:
        """The rows that a run trains on in each epoch."""
        rows = self.rows["train"]
        return rows if config.max_rows is None else rows.rows(0, min(config.max_rows, len(rows)))

    def training(
        self, config: RunConfig, first_step: int = 0, together: int = 1, periods: Sequence[int | None] = ()
    ) -> Iterator[Batch]:
        """The batches of a run from a step on. The batch of a step is the same if the run was interrupted.

        Up to ``together`` batches come at a time, as one ``Batch``, but never across a step that is a
        multiple of one of ``periods``.
        """
        step, rows = first_step, self.training_rows(config)
        per_epoch = math.ceil(len(rows) / config.batch_size)
        for epoch in range(first_step // per_epoch, config.epochs):
            skip = max(0, first_step - epoch * per_epoch) * config.batch_size
            order = None
            if config.shuffle:
                draw = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
                order = torch.randperm(len(rows), generator=draw, device="cpu")
            for block in self._blocks(rows, config.batch_size, skip, order):
                start = 0
                while start < len(block):
                    count = min([together, *(every - step % every for every in periods if every)])
                    stop = min(start + count * config.batch_size, len(block))
                    yield block.rows(start, stop)
                    step += math.ceil((stop - start) / config.batch_size)
                    start = stop

    def evaluation(self, split: str, size: int) -> Iterator[Batch]:
        """The batches of ``"validation"`` or ``"test"``, in order."""
        for block in self._blocks(self.rows[split], size):
            yield from block.batches(size)

    def _blocks(self, rows: Batch, size: int, skip: int = 0, order: Tensor | None = None) -> Iterator[Batch]:
        """Blocks of whole batches; while one is used, a thread reads the next, for a GPU into page-locked memory."""
        if self.resident:
            yield rows.rows(skip, len(rows)) if order is None else rows.take(order[skip:].to(self.device))
            return
        step = max(size, BLOCK_ROWS // size * size)

        def read(start: int) -> Batch:
            stop = min(start + step, len(rows))
            block = rows.take(torch.arange(start, stop) if order is None else order[start:stop])
            return block.pin_memory() if self.device.type == "cuda" else block

        for block in ahead(map(read, range(skip, len(rows), step))):
            yield block.to(self.device, non_blocking=True)


def num_bytes(rows: Batch) -> int:
    """Bytes of all tensors of some rows."""
    bags = [tensor for bag in rows.bags.values() for tensor in (bag.values, bag.offsets)]
    return sum(tensor.nbytes for tensor in (rows.labels, rows.dense, rows.ids, *bags))

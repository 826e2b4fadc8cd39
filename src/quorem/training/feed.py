"""Batches for a run: all rows are kept on the GPU if they fit, else a thread reads ahead."""

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
    """The rows of prepared data for runs on one device; several runs share it.

    Args:
        prepared: the data.
        device: device of the batches.
    """

    def __init__(self, prepared: Prepared, device: torch.device | str = "cpu") -> None:
        self.prepared, self.device = prepared, torch.device(device)
        self.rows = {name: prepared.split(name, check=False) for name in SPLITS}  # blocks are checked as they are read
        size = sum(num_bytes(rows) for rows in self.rows.values())
        self.resident = self.device.type == "cuda" and size <= RESIDENT * torch.cuda.mem_get_info(self.device)[0]
        if self.resident:
            self.rows = {name: prepared.split(name).to(self.device) for name in SPLITS}

    def training(
        self, config: RunConfig, first_step: int = 0, together: int = 1, periods: Sequence[int | None] = ()
    ) -> Iterator[Batch]:
        """The batches of a run from a step on. The batch of a step is the same if the run was interrupted.

        Args:
            config: configuration of the run.
            first_step: number of steps that are done already.
            together: yield up to this many batches at a time, as one ``Batch``.
            periods: numbers of steps; batches that are yielded together end at every multiple of each.
        """
        step = first_step
        rows = self.rows["train"]
        if config.max_rows is not None:
            rows = rows.rows(0, min(config.max_rows, len(rows)))
        per_epoch = steps_per_epoch(config, len(rows))
        for epoch in range(first_step // per_epoch, config.epochs):
            skip = max(0, first_step - epoch * per_epoch) * config.batch_size
            order = epoch_order(config, epoch, len(rows)) if config.shuffle else None
            for block in self._blocks("train", rows, config.batch_size, skip, order):
                start = 0
                while start < len(block):
                    count = min([together, *(every - step % every for every in periods if every)])
                    stop = min(start + count * config.batch_size, len(block))
                    yield block.rows(start, stop)
                    step += -(-(stop - start) // config.batch_size)
                    start = stop

    def evaluation(self, split: str, size: int) -> Iterator[Batch]:
        """The batches of ``"validation"`` or ``"test"``, in order."""
        for block in self._blocks(split, self.rows[split], size):
            yield from block.batches(size)

    def _blocks(
        self, split: str, rows: Batch, size: int, skip: int = 0, order: Tensor | None = None
    ) -> Iterator[Batch]:
        if not self.resident:
            yield from self._ahead(split, rows, size, skip, order)
        elif order is None:
            yield rows.rows(skip, len(rows))
        else:
            yield rows.take(order[skip:].to(self.device))

    def _ahead(self, split: str, rows: Batch, size: int, skip: int, order: Tensor | None) -> Iterator[Batch]:
        """Blocks of whole batches; while one is used, a thread reads the next, for a GPU into page-locked memory."""
        step = max(size, BLOCK_ROWS // size * size)
        first = self.prepared.meta["split"][split][0]

        def read(start: int) -> Batch:
            stop = min(start + step, len(rows))
            self.prepared.check(*(first + start, first + stop) if order is None else (first, first + len(rows)))
            block = rows.take(torch.arange(start, stop) if order is None else order[start:stop])
            return block.pin_memory() if self.device.type == "cuda" else block

        for block in ahead(map(read, range(skip, len(rows), step))):
            yield block.to(self.device, non_blocking=True)


def steps_per_epoch(config: RunConfig, num_rows: int) -> int:
    """Number of batches; the last may have fewer rows."""
    return -(-num_rows // config.batch_size)


def epoch_order(config: RunConfig, epoch: int, num_rows: int) -> Tensor:
    """The order of the rows in a shuffled epoch, which depends only on the seed and the epoch."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
    return torch.randperm(num_rows, generator=generator, device="cpu")


def num_bytes(rows: Batch) -> int:
    """Bytes of all tensors of some rows."""
    bags = [tensor for bag in rows.bags.values() for tensor in (bag.values, bag.offsets)]
    return sum(tensor.nbytes for tensor in (rows.labels, rows.dense, rows.ids, *bags))

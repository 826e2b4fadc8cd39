"""Rows of a click log as tensors, in batches. Needs only torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..checks import check_int

T = TypeVar("T")


@dataclass(frozen=True)
class Bags:
    """A multi-valued feature: the ids of all rows' bags, one after another, and where each bag begins.

    Shape:
        values ``[V]``, int32, or int64 for raw ids; offsets ``[B + 1]``, int64.
    """

    values: Tensor
    offsets: Tensor

    def rows(self, start: int, stop: int) -> "Bags":
        """The bags of rows ``[start, stop)``; their offsets start at 0 again."""
        offsets = self.offsets[start : stop + 1]
        return Bags(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def take(self, index: Tensor) -> "Bags":
        """The bags of the rows ``index``, in that order."""
        lengths = (self.offsets[1:] - self.offsets[:-1])[index]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        within = torch.arange(int(offsets[-1]), device=index.device) - offsets[:-1].repeat_interleave(lengths)
        return Bags(self.values[self.offsets[index].repeat_interleave(lengths) + within], offsets)


@dataclass(frozen=True)
class Batch:
    """Rows of a click log.

    Shape:
        labels ``[B]``, uint8; dense ``[B, num_dense]``, float32; ids ``[B, F]``, int32, or int64 for raw ids. ``ids``
        holds the features with one value per row; ``bags`` holds those with several values, by name.
    """

    labels: Tensor
    dense: Tensor
    ids: Tensor
    bags: Mapping[str, Bags] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows ``[start, stop)``, as views."""
        part = slice(start, stop)
        bags = {name: bag.rows(start, stop) for name, bag in self.bags.items()}
        return Batch(self.labels[part], self.dense[part], self.ids[part], bags)

    def take(self, index: Tensor) -> "Batch":
        """The rows ``index``, in that order."""
        bags = {name: bag.take(index) for name, bag in self.bags.items()}
        return Batch(self.labels[index], self.dense[index], self.ids[index], bags)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same rows on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same rows in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, apply: Callable[[Tensor], Tensor]) -> "Batch":
        bags = {name: Bags(apply(bag.values), apply(bag.offsets)) for name, bag in self.bags.items()}
        return Batch(apply(self.labels), apply(self.dense), apply(self.ids), bags)

    def jagged(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """All features as jagged input of an ``EmbeddingCollection``: values, and offsets ``[F * B + 1]``.

        ``names`` are all categorical features in order; those not in ``bags`` are the columns of ``ids``.
        """
        single = [name for name in names if name not in self.bags]
        if len(single) != self.ids.shape[1] or len(names) != len(single) + len(self.bags):
            rule = f"must be {self.ids.shape[1]} single-valued features and {list(self.bags)}"
            raise ValueError(f"names ({names}) {rule}")
        values, lengths, columns = [], [], iter(self.ids.unbind(1))
        for name in names:
            if name in self.bags:
                values.append(self.bags[name].values)
                lengths.append(self.bags[name].offsets.diff())
            else:
                values.append(next(columns))
                lengths.append(torch.ones(len(self), dtype=torch.int64, device=self.ids.device))
        ends = torch.cat(lengths).cumsum(0)
        return torch.cat(values), torch.cat([ends.new_zeros(1), ends])

    def embedding_inputs(self, names: Sequence[str]) -> tuple[Tensor, ...]:
        """The arguments of an ``EmbeddingCollection``: ``ids``, or ``jagged`` if there are bags."""
        return self.jagged(names) if self.bags else (self.ids,)

    def batches(self, size: int, *, seed: int | None = None) -> Iterator["Batch"]:
        """All rows, ``size`` at a time, in the last batch perhaps fewer: in order, or shuffled if a ``seed`` is given.

        >>> rows = Batch(torch.arange(5), torch.zeros(5, 1), torch.zeros(5, 2))
        >>> [batch.labels.tolist() for batch in rows.batches(2)]
        [[0, 1], [2, 3], [4]]
        """
        check_int("size", size)
        order = None
        if seed is not None:
            draw = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self), generator=draw, device="cpu").to(self.labels.device)
        for start in range(0, len(self), size):
            yield self.rows(start, start + size) if order is None else self.take(order[start : start + size])


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each produced by another thread while the previous one is used. None of them may be None."""
    maker = ThreadPoolExecutor(1)
    try:
        coming = maker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, items, None)
            yield item
    finally:  # to wait here could block forever: an abandoned generator is closed wherever garbage is collected
        maker.shutdown(wait=False)

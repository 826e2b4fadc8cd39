"""Positions in rising lists of ids that are searched many times."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .unique import compiled

PER_RUN = 4  # list entries for each entry of the index, which so takes about one byte for each of the list


class Index(NamedTuple):
    """Where the ids of each run of ``2**shift`` begin in a rising list."""

    version: int  # of the list: a write into it makes the index invalid
    starts: Tensor  # int32, or int64 where the list is that long
    shift: int


def search(ordered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries of a rising list are below each id, and whether the id is in it.

    >>> search(torch.tensor([2, 5]), torch.tensor([1, 5, 9]))
    (tensor([0, 1, 2]), tensor([False,  True, False]))
    """
    below = torch.searchsorted(ordered, ids.to(ordered.dtype))
    if not len(ordered):
        return below, torch.zeros_like(ids, dtype=torch.bool)
    return below, ordered[below.clamp(max=len(ordered) - 1)] == ids


class Searcher:
    """``search`` for ids of at least 0, with an index of each list that is kept until the list changes."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, int], Index] = {}

    def __call__(self, ordered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As ``search``."""
        count_below = compiled("search", "count_below")
        if count_below is None or ids.device.type != "cpu" or not len(ordered):
            return search(ordered, ids)
        key = ordered.data_ptr(), len(ordered)
        index = self._indices.get(key)
        if index is None or index.version != ordered._version:
            index = self._indices[key] = _index(ordered)
        below, inside = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)
        inputs = ordered.numpy(), index.starts.numpy(), index.shift, ids.contiguous().numpy()
        count_below(*inputs, below.numpy(), inside.numpy())
        return below, inside

    def __getstate__(self) -> dict[str, Any]:
        """Without the indices, whose keys are addresses."""
        return {"_indices": {}}


def _index(ordered: Tensor) -> Index:
    limit, shift = int(ordered[-1]) + 1, 0
    while limit >> shift > len(ordered) // PER_RUN:
        shift += 1
    runs = torch.arange((limit >> shift) + 2, dtype=torch.int64, device=ordered.device) << shift
    starts = torch.searchsorted(ordered, runs.clamp(max=limit).to(ordered.dtype), out_int32=len(ordered) < 2**31)
    return Index(ordered._version, starts, shift)

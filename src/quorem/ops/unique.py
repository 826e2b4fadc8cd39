"""The distinct values of each segment of a tensor, and the position of each value among them."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cpu import kernels


class Unique(NamedTuple):
    """The distinct values of each segment, in any order."""

    values: Tensor  # int64 [U], segment by segment
    inverse: Tensor  # int64 [N]: the position in ``values`` of each value that was given
    counts: list[int]  # distinct values of each segment


def unique_by_segment(values: Tensor, bounds: Sequence[int]) -> Unique:
    """The distinct values of ``values[bounds[s]:bounds[s + 1]]`` for each s; ``bounds`` go from 0 to N.

    >>> unique = unique_by_segment(torch.tensor([7, 7, 3, 7]), [0, 3, 4])
    >>> unique.counts, unique.values[unique.inverse].tolist()
    ([2, 1], [7, 7, 3, 7])
    """
    fused = compiled("launch_unique", "unique_by_segment")
    if fused is not None and values.device.type == "cpu":
        return Unique(*fused(values.long().contiguous(), bounds))
    parts, inverse = [values[:0].long()], [values[:0].long()]
    counts: list[int] = []
    for first, last in pairwise(bounds):
        distinct, positions = torch.unique(values[first:last].long(), return_inverse=True)
        inverse.append(positions + sum(counts))
        parts.append(distinct)
        counts.append(len(distinct))
    return Unique(torch.cat(parts), torch.cat(inverse), counts)


@cache
def compiled(module: str, function: str) -> Any:
    """A function of a module of ``cpu``; None where Numba is missing."""
    return getattr(import_module(f".cpu.{module}", __package__), function) if kernels() else None

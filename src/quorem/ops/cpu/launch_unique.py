"""Distinct values: tensors to arrays for the compiled ``unique``."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .unique import distinct


def unique_by_segment(values: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """As ``ops.unique.unique_by_segment``, of contiguous int64 values, in order of first appearance."""
    edges = np.asarray(bounds, np.int64)
    uniques, inverse = torch.empty_like(values), torch.empty_like(values)
    counts = np.empty(len(edges) - 1, np.int64)
    longest = int(np.diff(edges).max(initial=0))
    number = np.int32 if len(values) < 2**31 else np.int64
    cells = np.empty(1 << max(1, (2 * longest - 1).bit_length()), number)  # a power of two, at most half full
    total = distinct(values.numpy(), edges, cells, uniques.numpy(), inverse.numpy(), counts)
    return uniques[:total], inverse, counts.tolist()

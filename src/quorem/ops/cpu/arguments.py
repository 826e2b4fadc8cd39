"""From tensors to what the kernels take: addresses and integers, in the tuples that ``rows`` describes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..reference import accumulator
from . import forward

KINDS = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
}
Integers = tuple[int, ...]


def supported(weight: Tensor, ids: Tensor, grad: Tensor | None = None) -> bool:
    """Whether the kernels can take these; every caller returns NotImplemented if not."""
    right_grad = grad is None or grad.dtype == weight.dtype
    return weight.dtype in KINDS and ids.dtype in (torch.int32, torch.int64) and right_grad


@dataclass(eq=False)
class Batch:
    """The ids of a batch. ``kept`` holds the memory that the addresses point to."""

    source: Integers
    bags: Integers  # offsets, where, scale (see forward.spread_bags), or zeros for a lookup; and the batch size
    ids: int  # of all features
    longest: int  # ids of one feature
    kept: tuple[Tensor, ...]


def lookup_batch(ids: Tensor) -> Batch:
    """The batch of a lookup, ids ``[B, F]``."""
    size, features = ids.shape
    wide = int(ids.dtype == torch.int64)
    return Batch((ids.data_ptr(), wide, *ids.stride()), (0, 0, 0, size), size * features, size, (ids,))


def bag_batch(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    weight: Tensor,
    integers: tuple[Tensor, ...],
    mean: bool,
) -> Batch:
    """The batch of a bag: jagged ids ``[V]``, each told its batch entry and its factor."""
    features = len(integers[3])
    size = (len(offsets) - 1) // features
    ids, offsets = ids.contiguous(), offsets.long().contiguous()
    where = torch.empty(ids.shape, dtype=torch.int32)
    scale = torch.empty(ids.shape, dtype=accumulator(weight))
    weights = None if sample_weights is None else sample_weights.to(scale.dtype).contiguous()
    source = (ids.data_ptr(), int(ids.dtype == torch.int64), 1, 0)
    forward.spread_bags(
        KINDS[weight.dtype],
        where.data_ptr(),
        scale.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        offsets.data_ptr(),
        source,
        layout_of(integers),
        integers[3].data_ptr(),
        size,
        features,
        mean,
    )
    longest = int(offsets[::size].diff().max()) if size else 0
    bags = (offsets.data_ptr(), where.data_ptr(), scale.data_ptr(), size)
    return Batch(source, bags, len(ids), longest, (ids, offsets, where, scale))


def table_of(weight: Tensor) -> Integers:
    """Address and width of a contiguous weight."""
    return weight.data_ptr(), weight.shape[1]


def layout_of(integers: tuple[Tensor, ...]) -> Integers:
    """Addresses and sizes of slots, parts and maps."""
    slots, parts, maps, _ = integers
    return slots.data_ptr(), parts.data_ptr(), maps.data_ptr(), parts.shape[0], parts.shape[1]

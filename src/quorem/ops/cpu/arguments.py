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


@dataclass(eq=False)
class Batch:
    """The ids of a batch. ``kept`` holds the memory that the addresses point to."""

    source: Integers
    bags: Integers  # offsets, where, scale (see forward.spread_bags), or zeros for a lookup; and the batch size
    ids: int  # of all features
    longest: int  # ids of one feature
    kept: tuple[Tensor, ...]


def lookup_batch(ids: Tensor, weight: Tensor, integers: tuple[Tensor, ...], grad: Tensor | None = None) -> Batch | None:
    """The batch of a lookup, ids ``[B, F]``; None if the kernels cannot take it."""
    if ids.dim() != 2 or ids.shape[1] != len(integers[3]) or not _supported(ids, weight, integers, grad, len(ids)):
        return None
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
    grad: Tensor | None = None,
) -> Batch | None:
    """The batch of a bag, each of its jagged ids ``[V]`` told its batch entry and its factor; None as above."""
    features = len(integers[3])
    size, rest = divmod(len(offsets) - 1, features)
    right_weights = sample_weights is None or sample_weights.shape == ids.shape
    if ids.dim() != 1 or rest or not right_weights or not _supported(ids, weight, integers, grad, size):
        return None
    ids, offsets = ids.contiguous(), offsets.long().contiguous()
    where = torch.empty(ids.shape, dtype=torch.int32)
    scale = torch.empty(ids.shape, dtype=accumulator(weight))
    weights = None if sample_weights is None else sample_weights.to(scale.dtype).contiguous()
    source = (ids.data_ptr(), int(ids.dtype == torch.int64), 1, 0)
    rising = forward.spread_bags(
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
        len(ids),
        mean,
    )
    if not rising:
        return None
    longest = int(offsets[::size].diff().max()) if size else 0
    bags = (offsets.data_ptr(), where.data_ptr(), scale.data_ptr(), size)
    return Batch(source, bags, len(ids), longest, (ids, offsets, where, scale))


def _supported(ids: Tensor, weight: Tensor, integers: tuple[Tensor, ...], grad: Tensor | None, size: int) -> bool:
    if weight.dtype not in KINDS or ids.dtype not in (torch.int32, torch.int64):
        return False
    shape = (size, len(integers[0]), weight.shape[1])
    return grad is None or (grad.dtype == weight.dtype and grad.shape == shape)


def table_of(weight: Tensor) -> Integers:
    """Address and width of a contiguous weight."""
    return weight.data_ptr(), weight.shape[1]


def layout_of(integers: tuple[Tensor, ...]) -> Integers:
    """Addresses and sizes of slots, parts and maps."""
    slots, parts, maps, _ = integers
    return slots.data_ptr(), parts.data_ptr(), maps.data_ptr(), parts.shape[0], parts.shape[1]

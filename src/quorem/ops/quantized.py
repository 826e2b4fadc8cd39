"""Rows stored in 8 or 4 bits, for inference: the truth, in plain PyTorch.

A row of W numbers is W codes, a scale and an integer zero point: number = scale * (code - zero). The range of a row is
widened to hold zero, so that zero is stored exactly. The scale is rounded up to float16, so that the codes cover the
range; a number is off by at most one scale, and by half of one unless it lies at the end of the range.

At D = 16 a row takes 19 bytes with 8 bits and 11 with 4, where float32 takes 64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-24  # the smallest float16


class QuantizedRows(NamedTuple):
    """Rows in few bits. Two codes of 4 bits share a byte, the lower half first."""

    codes: Tensor  # uint8 [R, W] or [R, ceil(W / 2)]
    scales: Tensor  # float16 [R]
    zeros: Tensor  # uint8 [R]


def quantize(rows: Tensor, bits: int) -> QuantizedRows:
    """``rows`` ``[R, W]``, finite, in ``bits`` a number.

    >>> quantize(torch.tensor([[-1.0, 0.0, 2.0]]), 8).zeros
    tensor([85], dtype=torch.uint8)
    """
    steps = 2**bits - 1
    rows = rows.float()
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    wanted = (high - low) / steps
    scales = wanted.half()
    scales = torch.where(scales.float() < wanted, torch.nextafter(scales, scales.new_tensor(torch.inf)), scales)
    scales = scales.clamp(min=SMALLEST_SCALE)
    scale = scales.float()[:, None]
    zero = (-low[:, None] / scale).round().clamp(0, steps)
    codes = ((rows / scale).round() + zero).clamp(0, steps).to(torch.uint8)
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return QuantizedRows(codes.contiguous(), scales, zero[:, 0].to(torch.uint8))


def dequantize(rows: QuantizedRows, bits: int, width: int) -> Tensor:
    """The numbers ``[..., W]`` of rows that have any leading dimensions, float32."""
    codes = rows.codes
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :width]
    numbers = codes.float() - rows.zeros.float()[..., None]
    return numbers * rows.scales.float()[..., None]


def take(rows: QuantizedRows, index: Tensor) -> QuantizedRows:
    """Some of the rows, ``[...]`` as ``index``."""
    return QuantizedRows(*(tensor[index] for tensor in rows))

"""Rows stored in 8 or 4 bits a number: the truth, in plain PyTorch.

A row of W numbers is one run of bytes: W codes (two to a byte with 4 bits, the lower half first), padded to an even
number of bytes; a scale, float16; and an integer zero point, int16. Then number = scale * (code - zero). At D = 16 that
is 20 or 12 bytes, where float32 takes 64.

The range of a row is widened to hold zero, so that zero is stored exactly, and the scale is rounded up, so that the
codes cover the range: a number is off by at most one scale, and by half of one unless it lies at the end of the range.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

BITS: tuple[Literal[8, 4], ...] = (8, 4)
SMALLEST_SCALE = 2.0**-24  # the smallest float16


def code_bytes(width: int, bits: int) -> int:
    """Bytes of the codes of a row of ``width`` numbers; scale and zero point take four more.

    >>> code_bytes(16, 8), code_bytes(16, 4), code_bytes(3, 4)
    (16, 8, 2)
    """
    return 2 * -(-width * bits // 16)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """``rows`` ``[R, W]``, finite, as bytes ``[R, code_bytes + 4]``.

    Args:
        rows: the numbers.
        bits: 8 or 4.

    >>> dequantize(quantize(torch.tensor([[-1.0, 0.0, 1.55]]), 8), 3, 8)
    tensor([[-1.0002,  0.0000,  1.5503]])
    """
    steps, width = 2**bits - 1, rows.shape[1]
    rows = rows.float()
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    wanted = (high - low) / steps
    scale = wanted.half()
    above = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    scale = torch.where(scale.float() < wanted, above, scale).clamp(min=SMALLEST_SCALE)[:, None]
    zero = (-low[:, None] / scale.float()).round().clamp(0, steps)
    codes = ((rows / scale.float()).round() + zero).clamp(0, steps).to(torch.uint8)
    codes = F.pad(codes, (0, code_bytes(width, bits) * 8 // bits - width))
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    ends = [scale.contiguous().view(torch.uint8), zero.to(torch.int16).view(torch.uint8)]
    return torch.cat([codes, *ends], 1)


def dequantize(rows: Tensor, width: int, bits: int) -> Tensor:
    """The numbers ``[..., W]``, float32, of rows as bytes."""
    codes, scale, zero = fields_of(rows)
    return (unpacked(codes, width, bits).float() - zero.float()) * scale.float()


def fields_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, the scale (float16) and the zero point (int16) of rows as bytes."""
    codes, scale, zero = rows.split([rows.shape[-1] - 4, 2, 2], -1)
    return codes, scale.contiguous().view(torch.float16), zero.contiguous().view(torch.int16)


def unpacked(codes: Tensor, width: int, bits: int) -> Tensor:
    """The codes ``[..., W]``, one to a byte."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return codes[..., :width]

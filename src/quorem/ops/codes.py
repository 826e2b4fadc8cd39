"""Rows stored in 8 or 4 bits a number: the truth, in plain PyTorch.

A row of W numbers is one run of bytes: W codes (two to a byte with 4 bits, the lower half first), then its scale. The
number of a code is scale * (code - zero).

A wide row has its codes padded to an even number of bytes; a scale, float16; and an integer zero point, int16. At
D = 16 that is 20 or 12 bytes, where float32 takes 64. A narrow row, of at most 8 numbers, has a scale of one byte,
``2 ** (e - 22) * (1 + m / 8)`` with 5 bits e and 3 bits m, and its zero point is the middle of the codes. At W = 4 that
is 5 or 3 bytes.

The range of a row holds zero, so that zero is stored exactly, and the scale is rounded up, so that the codes cover the
range: a number is off by at most one scale, and by half of one unless it lies at the end of the range.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

BITS: tuple[Literal[8, 4], ...] = (8, 4)
NARROW = 8  # numbers of the widest row whose scale has one byte
SMALLEST_SCALE = 2.0**-24  # the smallest float16
SMALLEST_NARROW_SCALE, LARGEST_NARROW_SCALE = 2.0**-22, 2.0**9 * 1.875
FIRST_SCALE = (127 - 22) << 23  # the smallest as bits of a float32; those of the scale of byte b are b << 20 more


def code_bytes(width: int, bits: int) -> int:
    """Bytes of the codes of a row of ``width`` numbers.

    >>> code_bytes(16, 8), code_bytes(16, 4), code_bytes(11, 4), code_bytes(3, 4)
    (16, 8, 6, 2)
    """
    return -(-width * bits // 8) if width <= NARROW else 2 * -(-width * bits // 16)


def row_bytes(width: int, bits: int) -> int:
    """Bytes of a row of ``width`` numbers.

    >>> row_bytes(16, 8), row_bytes(16, 4), row_bytes(4, 8), row_bytes(4, 4), row_bytes(2, 4)
    (20, 12, 5, 3, 2)
    """
    return code_bytes(width, bits) + (1 if width <= NARROW else 4)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """``rows`` ``[R, W]``, finite, as bytes ``[R, row_bytes]``.

    Args:
        rows: the numbers.
        bits: 8 or 4.

    >>> dequantize(quantize(torch.tensor([[-1.0, 0.0, 1.55]]), 8), 3, 8)
    tensor([[-1.0029,  0.0000,  1.5488]])
    """
    steps, width = 2**bits - 1, rows.shape[1]
    rows = rows.float()
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    if width <= NARROW:
        middle = 2 ** (bits - 1)
        wanted = torch.maximum(high / (middle - 1), -low / middle).clamp(min=SMALLEST_NARROW_SCALE)
        byte = ((wanted.view(torch.int32) - FIRST_SCALE + 2**20 - 1) >> 20).clamp(max=255)  # rounded up
        scale, zero = _scale_of(byte), torch.tensor(float(middle), device=rows.device)
        ends = [byte.to(torch.uint8)]
    else:
        wanted = (high - low) / steps
        half = wanted.half()
        above = torch.nextafter(half, torch.full_like(half, torch.inf))
        half = torch.where(half.float() < wanted, above, half).clamp(min=SMALLEST_SCALE)
        scale = half.float()
        zero = (-low / scale).round().clamp(0, steps)
        ends = [half.contiguous().view(torch.uint8), zero.to(torch.int16).view(torch.uint8)]
    codes = ((rows / scale).round() + zero).clamp(0, steps).to(torch.uint8)
    codes = F.pad(codes, (0, code_bytes(width, bits) * 8 // bits - width))
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return torch.cat([codes, *ends], 1)


def _scale_of(byte: Tensor) -> Tensor:
    return ((byte.to(torch.int32) << 20) + FIRST_SCALE).view(torch.float32)


def dequantize(rows: Tensor, width: int, bits: int) -> Tensor:
    """The numbers ``[..., W]``, float32, of rows as bytes."""
    codes, ends = rows.split([code_bytes(width, bits), rows.shape[-1] - code_bytes(width, bits)], -1)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    numbers = codes[..., :width].float()
    if width <= NARROW:
        return (numbers - 2 ** (bits - 1)) * _scale_of(ends.contiguous())
    scale, zero = (end.contiguous() for end in ends.split(2, -1))
    return (numbers - zero.view(torch.int16).float()) * scale.view(torch.float16).float()

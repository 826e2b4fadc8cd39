"""Rows stored in 8 or 4 bits a number: the truth, in plain PyTorch.

A wide row of W numbers is a run of bytes: W codes (two to a byte with 4 bits, the lower half first), padded to an even
number of bytes; a scale, float16; and an integer zero point, int16. At D = 16 that is 20 or 12 bytes, where float32
takes 64.

Narrow rows, of at most 8 numbers, come in blocks of 16: the codes of one row after the other, then one byte, the scale
of all of them, ``2 ** (e - 22) * (1 + m / 8)`` with 5 bits e and 3 bits m. Their zero point is the middle of the codes.
At W = 4 a row takes 4 or 2 bytes, and its block another one.

The number of a code is scale * (code - zero). The range of a row or block holds zero, so that zero is stored exactly,
and the scale is rounded up, so that the codes cover the range: a number is off by at most one scale, and by half of one
unless it lies at the end of the range.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

BITS: tuple[Literal[8, 4], ...] = (8, 4)
NARROW = 8  # numbers of the widest row that shares its scale
BLOCK_ROWS = 16  # narrow rows that share one
SMALLEST_SCALE = 2.0**-24  # the smallest float16
SMALLEST_NARROW_SCALE, LARGEST_NARROW_SCALE = 2.0**-22, 2.0**9 * 1.875
FIRST_SCALE = (127 - 22) << 23  # the smallest as bits of a float32; those of the scale of byte b are b << 20 more
# The finite float16 numbers from 0, by their bits; and the scales of narrow rows, by their byte. One tensor each, so
# that an exported graph has one copy.
HALVES = torch.arange(0x7C00, dtype=torch.int16, device="cpu").view(torch.float16).float()[:, None]
NARROW_SCALES = ((torch.arange(256, dtype=torch.int32, device="cpu") << 20) + FIRST_SCALE).view(torch.float32)[:, None]


def code_bytes(width: int, bits: int) -> int:
    """Bytes of the codes of a row of ``width`` numbers.

    >>> code_bytes(16, 8), code_bytes(16, 4), code_bytes(11, 4), code_bytes(3, 4)
    (16, 8, 6, 2)
    """
    return -(-width * bits // 8) if width <= NARROW else 2 * -(-width * bits // 16)


def stored_shape(num_rows: int, width: int, bits: int) -> tuple[int, int]:
    """The shape of so many rows as bytes: ``[R, bytes of a row]``, or ``[blocks, bytes of a block]`` if narrow.

    >>> stored_shape(1000, 16, 8), stored_shape(1000, 16, 4), stored_shape(1000, 4, 4), stored_shape(1000, 2, 4)
    ((1000, 20), (1000, 12), (63, 33), (63, 17))
    """
    size = code_bytes(width, bits)
    return (-(-num_rows // BLOCK_ROWS), BLOCK_ROWS * size + 1) if width <= NARROW else (num_rows, size + 4)


def num_stored(stored: Tensor, width: int) -> int:
    """The most rows that ``stored`` may hold: its last block may have fewer."""
    return len(stored) * (BLOCK_ROWS if width <= NARROW else 1)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """``rows`` ``[R, W]``, finite, as bytes in ``stored_shape``.

    >>> dequantize(quantize(torch.tensor([[-1.0, 0.0, 1.55]]), 8), torch.tensor(0), 3, 8)
    tensor([-1.0029,  0.0000,  1.5488])
    """
    steps, (num_rows, width) = 2**bits - 1, rows.shape
    rows = rows.float()
    if width <= NARROW:
        rows = F.pad(rows, (0, 0, 0, -num_rows % BLOCK_ROWS)).view(-1, BLOCK_ROWS * width)
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    if width <= NARROW:
        middle = 2 ** (bits - 1)
        wanted = torch.maximum(high / (middle - 1), -low / middle).clamp(min=SMALLEST_NARROW_SCALE)
        byte = ((wanted.view(torch.int32) - FIRST_SCALE + 2**20 - 1) >> 20).clamp(max=255)  # rounded up
        scale, zero = NARROW_SCALES.to(rows.device)[byte[:, 0]], torch.tensor(float(middle), device=rows.device)
        ends = [byte.to(torch.uint8)]
    else:
        wanted = (high - low) / steps
        half = wanted.half()
        above = torch.nextafter(half, torch.full_like(half, torch.inf))
        half = torch.where(half.float() < wanted, above, half).clamp(min=SMALLEST_SCALE)
        scale = half.float()
        zero = (-low / scale).round().clamp(0, steps)
        ends = [half.contiguous().view(torch.uint8), zero.to(torch.int16).view(torch.uint8)]
    codes = ((rows / scale).round() + zero).clamp(0, steps).to(torch.uint8).view(-1, width)
    codes = F.pad(codes, (0, code_bytes(width, bits) * 8 // bits - width))
    if bits == 4:
        codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    return torch.cat([codes.reshape(len(rows), -1), *ends], 1)


def dequantize(stored: Tensor, rows: Tensor, width: int, bits: int) -> Tensor:
    """The numbers ``[..., W]``, float32, of ``rows`` ``[...]`` of ``stored``.

    It has no view of bytes as another dtype, which ONNX does not have, so that exports trace it. Products with small
    matrices are exact here, and ONNX Runtime broadcasts last axes more slowly.
    """
    size, device = code_bytes(width, bits), rows.device
    if width <= NARROW:
        block = rows // BLOCK_ROWS
        start = rows * size + block  # before each block lie the scales of all others
        codes = stored.flatten()[start[..., None] + torch.arange(size, device=device)].float()
        ends = F.embedding(block, stored[:, -1:])
    else:
        taken = F.embedding(rows, stored)
        codes, ends = taken[..., :size].float(), taken[..., size:]
    if bits == 4:
        high = (codes / 16).floor()
        codes = torch.stack([codes - high * 16, high], -1).flatten(-2)
    if width <= NARROW:
        return (codes[..., :width] - 2 ** (bits - 1)) * F.embedding(ends[..., 0].long(), NARROW_SCALES.to(device))
    ends = ends.float()
    bits_of_scale = (ends @ torch.tensor([[1.0], [256.0], [0.0], [0.0]], device=device))[..., 0].long()
    scale = F.embedding(bits_of_scale, HALVES.to(device))
    zero = ends @ torch.tensor([[0.0], [0.0], [1.0], [0.0]], device=device).expand(4, width)
    return (codes[..., :width] - zero) * scale

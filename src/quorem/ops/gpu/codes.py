"""Rows as kernels read them: numbers, or codes of 8 or 4 bits that are dequantized on the way (see ``ops.codes``)."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import BITS, BLOCK_ROWS, FIRST_SCALE, NARROW, stored_shape
from .rows import TYPES

NARROW_ROW, SHARING, SCALE_BITS = tl.constexpr(NARROW), tl.constexpr(BLOCK_ROWS), tl.constexpr(FIRST_SCALE)


@triton.jit
def numbers_at(
    stored, ends, rows, columns, c, W: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr, NBITS: tl.constexpr, width=None
):  # fmt: skip
    """Columns ``[C]``, from ``c`` on, of ``rows`` ``[T, 1]``; zeros where a row is -1.

    With a ``width``, a row is the first of several of ``stored`` that hold so many numbers. If NBITS are 8 or 4, rows
    are bytes (``ops.codes``), and ``ends`` is ``stored`` as int32, or as int16 where wide
    rows are no multiple of four bytes.
    """
    read, row = rows >= 0, rows.to(tl.int64)
    mask = read & (columns < (W if width is None else width))[None, :]
    if NBITS == 0:
        return tl.load(stored + row * W + columns[None, :], mask=mask, other=0).to(ACC)
    else:
        IS_NARROW: tl.constexpr = W <= NARROW_ROW
        CODES: tl.constexpr = (W * NBITS + 7) // 8 if IS_NARROW else (W * NBITS + 15) // 16 * 2
        block = row // SHARING
        address = stored + (row * CODES + block if IS_NARROW else row * (CODES + 4))
        if NBITS == 8:
            codes = tl.load(address + columns[None, :], mask=mask, other=0)
        else:  # two columns are a byte
            byte = c // 2 + tl.arange(0, C // 2)
            pairs = tl.load(address + byte[None, :], mask=read & (byte < CODES)[None, :], other=0)
            codes = tl.interleave(pairs & 15, pairs >> 4)
        # A code is the lowest byte of the float 2**23 + code: both are whole, so the difference is exact.
        shifted = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        if IS_NARROW:
            last = stored + (block + 1) * (SHARING * CODES + 1) - 1
            byte = tl.load(last, mask=read, other=0).to(tl.int32)
            scale = tl.where(read, ((byte << 20) + SCALE_BITS).to(tl.float32, bitcast=True), 0.0)
            return (shifted - (8388608.0 + (1 << (NBITS - 1)))) * scale
        else:
            if CODES % 4 == 0:
                end = tl.load(ends + row * (CODES // 4 + 1) + CODES // 4, mask=read, other=0)
                scale, zero = end.to(tl.int16), end >> 16
            else:
                end = ends + row * (CODES // 2 + 2) + CODES // 2
                scale, zero = tl.load(end, mask=read, other=0), tl.load(end + 1, mask=read, other=0)
            from_zero = shifted - (8388608.0 + zero.to(tl.float32))
            return from_zero * scale.to(tl.float16, bitcast=True).to(tl.float32)


class StoredRows(NamedTuple):
    """The rows of a lookup, and how a kernel reads them."""

    stored: Tensor
    ends: Tensor | None  # for wide quantized rows, ``stored`` viewed as integers, for scale and zero point
    width: int  # numbers in a row
    bits: int  # bits of a number in quantized rows, else 0
    dtype: torch.dtype  # of the vectors

    @property
    def accumulator(self) -> Any:
        """Triton's type in which numbers are summed and multiplied."""
        return tl.float32 if self.bits else TYPES[self.stored.dtype]


def stored_rows(
    stored: Tensor, names: str = "", width: int | None = None, bits: int = 0, dtype: torch.dtype | None = None
) -> StoredRows | None:
    """Rows by the options of a lookup; None if the kernels do not support their format or alignment."""
    if not stored.is_contiguous():
        return None
    if width is None:
        return StoredRows(stored, None, stored.shape[1], 0, stored.dtype) if stored.dtype in TYPES else None
    fits = bits in BITS and stored.dtype == torch.uint8 and stored.shape[1] == stored_shape(1, width, bits)[1]
    if not fits or stored.data_ptr() % 4:
        return None
    integers = torch.int32 if stored.shape[1] % 4 == 0 else torch.int16
    return StoredRows(stored, None if width <= NARROW else stored.view(integers), width, bits, dtype)

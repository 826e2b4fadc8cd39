"""Rows as kernels read them: numbers, or codes of 8 or 4 bits that are dequantized on the way (see ``ops.codes``)."""

import numpy as np
from numba.core import types

from ..codes import BLOCK_ROWS, FIRST_SCALE
from .compiled import inner
from .vector import INT32, UINT8, choose, chosen, converted, item, lanes, load, load_bytes, reinterpreted, splat

# Kinds of rows (see ``vector``), by the bits of a code and whether rows are narrow.
CODE_KINDS = {(8, False): np.uint32(0), (4, False): np.int8(0), (8, True): np.uint64(0), (4, True): np.int64(0)}
_BITS = {types.uint32: (8, False), types.int8: (4, False), types.uint64: (8, True), types.int64: (4, True)}


@inner
def _codes_of_8_bits(zero, start, column):
    return load_bytes(1, zero, start, column)


@inner
def _codes_of_4_bits(zero, start, column):
    return (load_bytes(2, zero, start, column >> 1) >> (((lanes(zero) + column) & 1) << 2)) & 15


@chosen
def load_row(kind, zero, stored, row_size, row, column):
    """Load numbers of a row of ``stored`` from ``column`` on, one for each lane; the lanes divide ``column``.

    ``row_size`` is the bytes of a row; of narrow rows, those of its codes.
    """
    bits, is_narrow = _BITS.get(kind, (0, False))
    codes = _codes_of_8_bits if bits == 8 else _codes_of_4_bits
    middle = 2 ** (bits - 1)

    def numbers(kind, zero, stored, row_size, row, column):
        return load(kind, zero, stored + row * row_size, column)

    def wide(kind, zero, stored, row_size, row, column):
        code = codes(zero, stored + row * row_size, column)
        both = splat(code, item(INT32, stored + (row + 1) * row_size - 4, 0))  # the scale, then the zero point
        # float16 by integers: a load of one fills a part of a register, and then waits for the rest of it. Where it is
        # below its smallest normal number it is a difference: a product of such numbers takes a processor long.
        half = both & 0xFFFF
        normal = (half << 13) + (112 << 23)
        scale = choose(half < 0x400, reinterpreted(normal + (1 << 23)) - 2.0**-14, reinterpreted(normal))
        return converted(code - (both >> 16)) * scale

    def narrow(kind, zero, stored, row_size, row, column):
        block = row // BLOCK_ROWS
        code = codes(zero, stored + row * row_size + block, column)
        scale = np.int64(item(UINT8, stored + (block + 1) * (BLOCK_ROWS * row_size + 1) - 1, 0))
        return converted(code - middle) * reinterpreted(splat(code, (scale << 20) + FIRST_SCALE))

    return narrow if is_narrow else wide if bits else numbers

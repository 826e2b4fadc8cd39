"""Rows as kernels read them: numbers, or codes of 8 or 4 bits that are dequantized on the way (see ``ops.codes``)."""

import numpy as np
from numba.core import types

from ..codes import BLOCK_ROWS, FIRST_SCALE
from .compiled import inner
from .vector import UINT8, chosen, converted, item, lanes, load, load_bytes, reinterpreted, splat

# Kinds of rows (see ``vector``), by the bits of a code and whether rows are narrow.
CODE_KINDS = {(8, False): np.uint32(0), (4, False): np.int8(0), (8, True): np.uint64(0), (4, True): np.int64(0)}
_BITS = {types.uint32: (8, False), types.int8: (4, False), types.uint64: (8, True), types.int64: (4, True)}
_HALF = np.int16(0)


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
        end = stored + (row + 1) * row_size
        code = codes(zero, stored + row * row_size, column)
        # float16 by integers: a load of one fills a part of a register, and then waits for the rest of it.
        bits = np.int64(item(_HALF, end - 4, 0)) << 13
        scale = reinterpreted(splat(code, bits)) * np.float32(2.0**112)
        return converted(code - item(_HALF, end - 2, 0)) * scale

    def narrow(kind, zero, stored, row_size, row, column):
        block = row // BLOCK_ROWS
        code = codes(zero, stored + row * row_size + block, column)
        scale = np.int64(item(UINT8, stored + (block + 1) * (BLOCK_ROWS * row_size + 1) - 1, 0))
        return converted(code - middle) * reinterpreted(splat(code, (scale << 20) + FIRST_SCALE))

    return narrow if is_narrow else wide if bits else numbers

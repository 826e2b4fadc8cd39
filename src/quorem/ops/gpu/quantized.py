"""Lookups and bags of rows with 8 or 4 bits per number, by the kernels of ``lookup``, which unpack them.

``ops.codes`` defines the format of a row; ``ops.lookup`` is the plain reference.
"""

from typing import Any

import torch
from torch import Tensor

from ..codes import BITS, code_bytes
from ..layout import Layout
from .host import IdBatch, checked_rows
from .lookup import StoredRows, bag_rows, lookup_rows


def lookup_quantized(
    ids: Tensor, stored: Tensor, layout: Layout, *, width: int, bits: int, dtype: torch.dtype, names: str = ""
) -> Any:
    """``ops.lookup.lookup`` in rows of bytes in one launch."""
    return lookup_quantized_counting(ids, stored, layout, None, width=width, bits=bits, dtype=dtype)


def lookup_quantized_counting(
    ids: Tensor,
    stored: Tensor,
    layout: Layout,
    invalid: Tensor | None,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
    names: str = "",
) -> Any:
    """``ops.lookup.lookup_counting`` in rows of bytes in one launch; if ``invalid`` is None, they are not counted."""
    rows = _rows(stored, width, bits)
    if rows is None:
        return NotImplemented
    return lookup_rows(ids, rows, layout, checked_rows(stored, layout), invalid, dtype)


def bag_quantized(
    ids: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    stored: Tensor,
    layout: Layout,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
    mean: bool,
    names: str = "",
) -> Any:
    """``ops.lookup.bag`` in rows of bytes in one launch."""
    rows = _rows(stored, width, bits)
    if rows is None:
        return NotImplemented
    return bag_rows(IdBatch(ids, offsets, sample_weights, mean), rows, layout, checked_rows(stored, layout), dtype)


def _rows(stored: Tensor, width: int, bits: int) -> StoredRows | None:
    """The rows for the kernels; None if the kernels do not support their format or alignment."""
    fits = bits in BITS and stored.dtype == torch.uint8 and stored.shape[1] == code_bytes(width, bits) + 4
    if not fits or not stored.is_contiguous() or stored.data_ptr() % 4:
        return None
    return StoredRows(stored, stored.view(torch.int32 if stored.shape[1] % 4 == 0 else torch.int16), width, bits)
